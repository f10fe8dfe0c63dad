"""Host memory: made ready ahead of the first save, not larger than the state, and a budget that is kept."""

import dataclasses
import gc
import threading

import pytest
import torch

from kit.writing import stream_file, write_file
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.formats import file_plan, safetensors, torch_archive
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import GRANULE, SharedBuffer
from safe_ckpt.core.staging.progress import read_mark
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.core.storage.reader import digest_of, read_whole
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import ConfigError
from support import Quiet, run_program

OPTIONS = WriteOptions(direct=True, chunk_bytes=1 << 20, flush_every_bytes=64 << 20)


def mixed():
    shared = torch.randn(700_000)
    return {
        "large": torch.randn(900_001),
        "turned": torch.randn(300, 500).t(),
        "slices": [shared[:10], shared[5:]],
        "small": [torch.tensor(3), torch.empty(0), torch.ones(3, dtype=torch.bool)],
        "text": ("x", None, 2**70),
    }


IMAGES = {
    "archive": lambda: torch_archive.torch_plan("x.pt", mixed(), strict=True, key="x"),
    "single file": lambda: file_plan.single(torch_archive.torch_plan("x.pt", mixed(), strict=True, key="x"), "x.pt"),
    "safetensors": lambda: safetensors.safetensors_plan(
        "x.safetensors", {"a": torch.randn(900_001), "b": torch.ones(3)}
    ),
    "json": lambda: file_plan.json_plan("x.json", {"a": [1, 2.5, "x"]}),
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("buffer_bytes", [4096, 1 << 20, 64 << 20])
def test_a_streamed_file_has_the_bytes_of_one_written_from_a_buffer(tmp_path, kind, buffer_bytes):
    """A file that is streamed through a small buffer is, bit for bit, the one that is written from an arena."""
    image = IMAGES[kind]()
    buffer = SharedBuffer()
    (task,) = snapshot.take([image], buffer, str(tmp_path), {"name": "x"})
    from_arena = write_file(task, memoryview(buffer.memory), OPTIONS, Quiet())
    streamed = stream_file(image, task, dataclasses.replace(OPTIONS, chunk_bytes=buffer_bytes))
    assert streamed == from_arena
    assert digest_of(tmp_path / image.path, streamed.size_bytes) == streamed.xxh3_128
    buffer.close()


@pytest.mark.slow
def test_a_state_above_the_budget_is_saved_within_it(tmp_path):
    """A state of 256 MiB under max_host_bytes of 8 MiB: saved and exact, with hardly more memory than the budget."""
    done = run_program("saves_above_the_budget", str(tmp_path / "exp"), fresh=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24


def test_a_budget_below_a_mebibyte_is_refused():
    """Said when the settings are made, with the key and what is allowed."""
    with pytest.raises(ConfigError, match=r"max_host_bytes.*1048576"):
        CheckpointConfig(max_host_bytes=1000)


def test_memory_is_ready_before_the_first_save(tmp_path):
    """A resume on a fresh run makes room for the state, with what the optimizer will hold; the first save grows nothing."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
        (buffer,) = ckpt._engine._stager._free
        assert ckpt.resume(state) is None
        for thread in threading.enumerate():
            if thread.name == "safe_ckpt-prepare":
                thread.join(30)
        ready = buffer.size
        model(torch.randn(2, 1024)).sum().backward()
        optimizer.step()
        ckpt.save(1, state).result(timeout_s=60)
        size = sum(t.nbytes for t in model.parameters()) * 3
        assert buffer.size == ready
        assert size <= ready <= size + (64 << 20)


def preparing():
    return [thread for thread in threading.enumerate() if thread.name == "safe_ckpt-prepare"]


def test_memory_that_is_being_made_ready_does_not_stand_in_the_way(tmp_path):
    """A save right behind, a second preparation, a close: what was saved is there, and no preparation goes on for long."""
    for step in range(1, 6):
        with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
            ckpt.prepare({"w": torch.empty(64 << 20, dtype=torch.uint8)})
            ckpt.prepare({"w": torch.empty(65 << 20, dtype=torch.uint8)})
            ckpt.save(step, {"w": torch.full((5,), float(step))})
        with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
            ckpt.prepare({"w": torch.empty(64 << 20, dtype=torch.uint8)})
            state = {"w": torch.zeros(5)}
            assert ckpt.resume(state).step == step
        assert state["w"].tolist() == [step] * 5
    for thread in preparing():
        thread.join(30)
    assert preparing() == []


def test_memory_that_is_never_ready_does_not_stand_in_the_way(tmp_path, monkeypatch):
    """Behind a preparation that hangs a save takes memory of its own, no second preparation begins, and the end comes."""
    begun, going_on, reserve = [], threading.Event(), SharedBuffer.reserve

    def hang(self, size, **more):
        if threading.current_thread() in preparing():
            begun.append(size)
            assert going_on.wait(60)
        reserve(self, size, **more)

    monkeypatch.setattr(SharedBuffer, "reserve", hang)
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=Timeouts(barrier_s=1))) as ckpt:
        for mebibytes in (64, 65):
            ckpt.prepare({"w": torch.empty(mebibytes << 20, dtype=torch.uint8)})
        assert ckpt.save(1, {"w": torch.ones(5)}).result(timeout_s=30).step == 1
        assert len(begun) == 1
    (left,) = preparing()
    going_on.set()
    left.join(30)
    assert not left.is_alive()


def test_an_arena_tells_how_far_it_is_filled():
    """The mark is zero before the copying and the end after it; a second save of the same arena starts from zero again."""
    buffer = SharedBuffer()
    image = IMAGES["archive"]()
    for _ in range(2):
        tasks, copy = snapshot.lay_out([image], buffer, "x", {})
        assert read_mark(memoryview(buffer.memory)) == 0
        copy.run()
        assert read_mark(memoryview(buffer.memory)) == tasks[0].offset + image.length
    assert buffer.size % GRANULE == 0
    buffer.close()


def test_reading_finds_the_end_of_a_shorter_file(tmp_path):
    """A file that is cut off gives another digest and zeros behind its end, whatever its length."""
    for length in (0, 1, 4096, 4097, (1 << 20) + 1, (40 << 20) + 5):
        data = torch.randint(0, 256, (length,), dtype=torch.uint8).numpy().tobytes()
        file = tmp_path / "x"
        file.write_bytes(data)
        memory, digest = read_whole(file, length)
        assert memory[:length] == data
        assert digest == digest_of(file, length)
        if length:
            file.write_bytes(data[:-1])
            assert read_whole(file, length)[1] != digest
            assert digest_of(file, length) != digest


def test_reading_without_direct_io_gives_the_same(tmp_path, monkeypatch):
    """Where a file system refuses to be read past the page cache, it is read through it."""
    file = tmp_path / "x"
    data = bytes(range(256)) * (1 << 14)
    file.write_bytes(data + b"end")
    expected = read_whole(file, len(data) + 3)
    monkeypatch.delattr("os.O_DIRECT")
    memory, digest = read_whole(file, len(data) + 3)
    assert (memory[: len(data) + 3], digest) == (data + b"end", expected[1])


def test_lazy_modules_are_not_prepared_for_and_raise_nothing(tmp_path):
    """Lazy modules: nothing is made ready, and nothing is raised."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
        assert ckpt.resume({"model": model}) is None


def test_a_preparation_never_grows_an_arena_that_is_in_use(tmp_path, monkeypatch):
    """A save that comes while memory is still being made ready waits for that; it does not share the arena with it."""
    growing, go_on = threading.Event(), threading.Event()
    reserve = SharedBuffer.reserve

    def slow(self, size, **how):
        if threading.current_thread().name == "safe_ckpt-prepare":
            growing.set()
            go_on.wait(30)
        reserve(self, size, **how)

    monkeypatch.setattr(SharedBuffer, "reserve", slow)
    with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
        ckpt.prepare({"w": torch.empty(8 << 20, dtype=torch.uint8)})
        assert growing.wait(30)
        threading.Timer(0.2, go_on.set).start()
        ckpt.save(1, {"w": torch.ones(5)}).result(timeout_s=60)
        assert go_on.is_set()


def test_a_checkpointer_that_nobody_holds_does_not_wait_for_its_memory(tmp_path, monkeypatch):
    """Dropped while memory is made ready for it: its directory can be opened again at once."""
    growing, go_on, gone_on, reserve = threading.Event(), threading.Event(), threading.Event(), SharedBuffer.reserve

    def slow(self, size, **how):
        growing.set()
        go_on.wait(30)
        gone_on.set()
        reserve(self, size, **how)

    monkeypatch.setattr(SharedBuffer, "reserve", slow)
    ckpt = Checkpointer(tmp_path, CheckpointConfig())
    ckpt.prepare({"w": torch.empty(8 << 20, dtype=torch.uint8)})
    assert growing.wait(30)
    del ckpt
    gc.collect()
    with Checkpointer(tmp_path, CheckpointConfig()):
        assert not gone_on.is_set()
    go_on.set()


def test_loaded_memory_is_not_shared_with_forked_processes(tmp_path):
    """An optimizer keeps the tensors that were loaded: what a forked process does to its own must not reach this one."""
    done = run_program("forked_after_a_resume", str(tmp_path / "exp"))
    assert done.stdout.strip() == "True", done.stderr


def test_a_closed_writer_stays_closed(tmp_path):
    """A process that is started beside a close would stay until the end of the program."""
    writer = WriterSupervisor(CheckpointConfig().writer, CheckpointConfig().timeouts, lambda *_: None)
    writer.close()
    writer.start()
    assert writer.pid is None
