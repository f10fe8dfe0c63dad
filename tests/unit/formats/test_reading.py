"""Reading back: the quick ways give what torch's own give."""

import io
import mmap
import pickle

import pytest
import torch

from kit.writing import write_file
from safe_ckpt.core.formats import safetensors, torch_archive, torch_reading
from safe_ckpt.core.formats.safetensors import safetensors_plan
from safe_ckpt.core.formats.torch_archive import torch_plan
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.core.storage.reader import read_whole
from safe_ckpt.errors import HostileCheckpointError
from support import Quiet


def zoo():
    shared = torch.arange(20.0)
    return {
        "dtypes": [torch.ones(3).to(dtype) for dtype in torch_archive.STORAGES],
        "new dtypes": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint16)],
        "views": [shared[:5], shared[5:], shared.view(4, 5).t()],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "neg": torch.ones(2, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "empty": [torch.empty(0), torch.empty(2, 0), torch.tensor(1.5)],
        "numbers": [0, -1, 2**61, 2**62, -(2**62), 2**70, 1.5, True, None, "x", (1, (2,))],
    }


def test_structures_are_pickled_as_torch_does_it(monkeypatch):
    """The quick reduction of plain tensors gives, byte for byte, what Tensor.__reduce_ex__ gives."""
    quick = torch_archive.pickle_state(zoo(), strict=True, key="x")
    monkeypatch.setattr(torch_archive, "_is_plain", lambda _: False)
    slow = torch_archive.pickle_state(zoo(), strict=True, key="x")
    assert quick.data == slow.data
    assert list(quick.storages) == list(slow.storages)


def in_memory(image):
    memory = mmap.mmap(-1, -(-image.length // 4096) * 4096)
    for offset, data in image.pieces:
        memory[offset : offset + len(data)] = data
    for offset, tensor in image.tensors:
        memory[offset : offset + tensor.nbytes] = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    return memory


@pytest.fixture
def archive():
    """A torch archive in memory that torch wrote."""
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(5000.0), "b": (torch.ones(3), "x")}, buffer)
    data = buffer.getvalue()
    memory = mmap.mmap(-1, -(-len(data) // 4096) * 4096)
    memory[: len(data)] = data
    return memory, len(data)


def test_an_archive_is_read_without_a_copy(archive):
    """Contract with torch: the tensors lie in the memory that was read. A release where this fails still reads, with a copy."""
    memory, length = archive
    loaded = torch_reading.parse_archive(memory, length)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert begin <= loaded["a"].data_ptr() < begin + len(memory)
    assert loaded["a"].equal(torch.arange(5000.0))
    loaded["a"].zero_()
    assert loaded["b"][0].equal(torch.ones(3))


def test_an_archive_is_read_where_torch_has_other_insides(archive, monkeypatch):
    """A release whose reader takes no such file: the public function does it, with a copy."""
    memory, length = archive

    def refuse(*_):
        raise TypeError("no such overload")

    monkeypatch.setattr(torch_reading, "_View", refuse)
    loaded = torch_reading.parse_archive(memory, length)
    assert loaded["a"].equal(torch.arange(5000.0))
    assert loaded["b"][1] == "x"


@pytest.mark.parametrize("error", [TypeError, AttributeError, RuntimeError, KeyError])
def test_an_archive_is_read_whatever_a_release_made_of_its_own_loader(archive, monkeypatch, error):
    """The private loader is there, and fails when it is called: the public function reads the archive."""
    memory, length = archive
    theirs = torch.serialization._load

    def refuse(*arguments, **options):
        if options.get("overall_storage") is None:  # torch.load's own call
            return theirs(*arguments, **options)
        raise error("another signature")

    monkeypatch.setattr(torch.serialization, "_load", refuse)
    loaded = torch_reading.parse_archive(memory, length)
    assert loaded["a"].equal(torch.arange(5000.0))
    assert loaded["b"][1] == "x"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_place", [True, False])
def test_sparse_tensors_are_read_without_a_warning_and_never_lead_outside(in_place, monkeypatch, tmp_path):
    """A newer torch warns that it checks their indices: we do not. In every release wrong indices are refused."""
    if not in_place:
        monkeypatch.setattr(torch_reading, "_View", None)
    state = {"good": torch.eye(3).to_sparse(), "more": torch.eye(3).to_sparse()}
    bad = torch.sparse_coo_tensor(torch.tensor([[0, 99]]), torch.ones(2), (3,), check_invariants=False)
    for content, fits in ((state, True), ({"bad": bad}, False)):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        memory = mmap.mmap(-1, 1 << 16)
        memory[: len(buffer.getvalue())] = buffer.getvalue()
        if fits:
            loaded = torch_reading.parse_archive(memory, len(buffer.getvalue()))
            assert all(loaded[name].to_dense().equal(torch.eye(3)) for name in state)
        else:
            with (
                pytest.raises(HostileCheckpointError, match=r"no such file.*(size is inconsistent|found index)"),
                torch_reading.refusing(tmp_path, "a.pt"),
            ):
                torch_reading.parse_archive(memory, len(buffer.getvalue()))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError()]
)
def test_a_machine_without_memory_says_nothing_of_a_file(tmp_path, error):
    """Its error is raised as it is: the checkpoint is not passed over."""
    with pytest.raises(type(error)) as caught, torch_reading.refusing(tmp_path, "a.pt"):
        raise error
    assert caught.value is error


def test_an_archive_with_code_in_it_is_refused(archive):
    """Reading runs nothing: only what weights_only admits comes back."""
    buffer = io.BytesIO()
    torch.save({"x": io.BytesIO}, buffer)
    memory = mmap.mmap(-1, 1 << 16)
    memory[: len(buffer.getvalue())] = buffer.getvalue()
    with pytest.raises(pickle.UnpicklingError):
        torch_reading.parse_archive(memory, len(buffer.getvalue()))


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_pickled_by_torchs_own_code():
    """They claim to be strided and have no sizes."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert torch_plan("x.pt", {"n": nested}, strict=False, key="x").tensors


def test_safetensors_lie_in_memory_and_are_apart():
    """Tensors, strides and aliases come back; to change one changes no other."""
    one = torch.arange(12.0).view(3, 4)
    image = safetensors_plan("x.safetensors", {"a": one, "b": one.clone().t(), "c": one, "d": torch.ones(3).bool()})
    loaded = safetensors.parse_safetensors(in_memory(image), image.length)
    assert loaded["a"].equal(one)
    assert loaded["b"].equal(one.t())
    assert loaded["b"].stride() == (1, 4)
    assert loaded["c"] is loaded["a"]
    loaded["a"].zero_()
    assert loaded["b"].equal(one.t())


def test_an_archive_planned_in_memory_is_parsed_from_its_file(tmp_path):
    """What ``torch_plan`` plans, ``parse_archive`` reads from the file."""
    buffer = SharedBuffer()
    image = torch_plan("x.pt", zoo(), strict=True, key="x")
    (task,) = snapshot.take([image], buffer, str(tmp_path), {})
    options = WriteOptions(direct=True, chunk_bytes=4096, flush_every_bytes=4096)
    result = write_file(task, memoryview(buffer.memory), options, Quiet())
    buffer.close()
    memory, digest = read_whole(tmp_path / "x.pt", result.size_bytes)
    assert digest == result.xxh3_128
    loaded = torch_reading.parse_archive(memory, result.size_bytes)
    expected = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["numbers"] == expected["numbers"]
    for name in ("dtypes", "views", "empty"):
        for one, other in zip(loaded[name], expected[name], strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert one.equal(other)
    assert loaded["sparse"].to_dense().equal(torch.eye(3))
