"""What a writer reports of a file is what the whole file turned out to be, never a state on the way there."""

import threading

import pytest
import torch
import xxhash

from kit.inside import once_written
from kit.writing import write_file
from safe_ckpt import CheckpointConfig, Checkpointer, WriterConfig
from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.writer import content
from safe_ckpt.errors import SaveError, StateError

CHUNK = 1 << 16
OPTIONS = WriteOptions(direct=False, chunk_bytes=CHUNK, flush_every_bytes=1 << 20)


@pytest.fixture
def late(monkeypatch):
    """The hasher comes to its end only when the writer has had every chance to be faster."""
    closing = content._Pass.closing

    def slowly(self, rest):
        threading.Event().wait(0.05)
        return closing(self, rest)

    monkeypatch.setattr(content._Pass, "closing", slowly)


@pytest.mark.parametrize("length", [4 * CHUNK, 4 * CHUNK + 1, 5 * CHUNK - 4096, 3 * CHUNK], ids=str)
def test_a_file_of_whole_chunks_is_reported_with_its_digest(tmp_path, late, length):
    """The last chunk may close a whole piece: its hash is announced only with the digest of the file."""
    memory = bytearray(torch.arange(length, dtype=torch.int32).to(torch.uint8).numpy().tobytes())
    task = WriteTask(path=str(tmp_path / "file"), offset=0, length=length)
    written = write_file(task, memoryview(memory), OPTIONS, Unwatched(), lambda: length)
    assert written.xxh3_128 == xxhash.xxh3_128(memory).hexdigest()
    assert (tmp_path / "file").read_bytes() == memory


def test_an_archive_of_whole_chunks_has_its_manifest(tmp_path, late):
    """What follows the image of an archive, the manifest and the directory, is there with the last chunk."""
    image = torch_archive.torch_plan("a.ckpt", {"w": torch.ones(4 * CHUNK // 4)}, strict=True, key="x")
    buffer = SharedBuffer()
    manifest = Manifest(name="a.ckpt", sequence=1, step=1, world_size=1)
    (task,) = snapshot.take([file_plan.single(image, "a.ckpt")], buffer, str(tmp_path), manifest.to_json())
    written = write_file(task, memoryview(buffer.memory), OPTIONS, Unwatched())
    data = (tmp_path / "a.ckpt").read_bytes()
    assert (written.size_bytes, written.xxh3_128) == (len(data), xxhash.xxh3_128(data).hexdigest())
    verify_files(tmp_path / "a.ckpt", read_manifest(tmp_path / "a.ckpt"))
    buffer.close()


def test_every_size_around_a_chunk_is_resumed(tmp_path):
    """Whatever the size of a tensor does to the last chunk of its file, the checkpoint is resumed from."""
    settings = WriterConfig(chunk_bytes=CHUNK, inline_bytes=0)
    with Checkpointer(tmp_path, CheckpointConfig(writer=settings)) as ckpt:
        for step in range(1, 40):
            numbers = (step * CHUNK - 4096) // 4
            ckpt.save(step, {"w": {"t": torch.full((numbers,), float(step))}}).result(timeout_s=60)
            state = {"w": {"t": torch.zeros(numbers)}}
            assert ckpt.resume(state).step == step
            assert state["w"]["t"].eq(step).all()


def test_a_stream_that_was_not_taken_to_its_end_reports_nothing():
    """A writer that stops early cannot report the digest of a part."""
    image = file_plan.single(torch_archive.torch_plan("a.pt", {"w": torch.ones(9999)}, strict=True, key="x"), "a.pt")
    (task,) = snapshot.list_tasks([image], "/folder", {})
    stream = content.TensorContent(task, image)
    next(stream.pieces(4096))
    with pytest.raises(OSError, match="before all bytes"):
        stream.closing()


BAD = [
    {"xxh3_128": ""},
    {"xxh3_128": "a" * 31},
    {"size_bytes": -1},
    {"size_bytes": True},
    {"path": "../a"},
    {"path": ""},
    {"rank": "0"},
]


@pytest.mark.parametrize("facts", BAD, ids=str)
def test_a_manifest_cannot_be_made_of_an_entry_that_a_reader_refuses(facts):
    """A manifest cannot be made of it."""
    with pytest.raises((TypeError, ValueError)):
        FileEntry(**{"path": "a", "size_bytes": 1, "xxh3_128": "a" * 32, "rank": 0, **facts})


def test_a_manifest_that_its_own_reader_refuses_is_not_written():
    """So a checkpoint that nothing could resume from never gets its name."""
    with pytest.raises(StateError, match="expected a number"):
        Manifest(name="a", sequence=1, step=1, world_size=1, metrics={"loss": "high"}).to_bytes()


@pytest.mark.parametrize("kind", ["no digest", "twice"])
def test_a_report_that_no_resume_would_take_fails_the_save(tmp_path, kind):
    """The checkpoint before stays, the error names the file, and the next save works."""

    def spoiled(report):
        row = report["files"][0]
        return {**report, "files": [{**row, "xxh3_128": ""}] if kind == "no digest" else [row, row]}

    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": {"t": torch.ones(10)}}).result(timeout_s=20)
        once_written(spoiled)
        with pytest.raises(SaveError, match=r"could not be resumed from.*w\.safetensors"):
            ckpt.save(2, {"w": {"t": torch.ones(10)}}).result(timeout_s=20)
        assert ckpt.resume({"w": {"t": torch.zeros(10)}}).step == 1
        ckpt.save(3, {"w": {"t": torch.ones(10)}}).result(timeout_s=20)
        assert ckpt.resume({"w": {"t": torch.zeros(10)}}).step == 3
