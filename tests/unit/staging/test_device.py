"""Copies from devices, tried with devices that only remember: what is queued on a stream is done when somebody waits for it."""

import contextlib
import threading

import pytest
import torch

from kit.inside import engine_of
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.saving.stager import Stager
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import GRANULE, SharedBuffer
from safe_ckpt.core.staging.device import DeviceCopies, Devices, TensorCopy
from safe_ckpt.core.staging.progress import read_mark
from safe_ckpt.core.staging.snapshot import CopyPlan, StagingCopy
from safe_ckpt.errors import SaveError

BASE = 4096


class Stream:
    """A queue of work. ``synchronize`` does what is in it, after what it waits for."""

    def __init__(self, name):
        self.name, self.queue = name, []

    def synchronize(self):
        while self.queue:
            self.queue.pop(0)()

    def wait_event(self, event):
        self.queue.append(event.synchronize)

    def wait_stream(self, other):
        self.queue.append(other.synchronize)


class Event:
    def __init__(self, stream):
        self._stream, self._until = stream, len(stream.queue)
        self._work = list(stream.queue)

    def synchronize(self):
        for work in self._work:
            if work in self._stream.queue:
                self._stream.queue.remove(work)
                work()


class Remembering(Devices):
    """Every tensor is on a device; each thread has a default stream of its own, and says on which device it stands."""

    def __init__(self, *, pins=True):
        self.pins, self.registered, self.made = pins, [], []
        self.trainer = Stream("trainer")
        self._own = threading.local()
        self._own.stream = self.trainer
        self.log = []

    def has(self, tensor):
        return True

    def here(self):
        return [torch.device("cpu")]

    @contextlib.contextmanager
    def at(self, device):
        self.log.append(("at", threading.current_thread().name))
        yield

    def stream(self, device):
        self.made.append(Stream("side"))
        return self.made[-1]

    def current(self, device):
        if not hasattr(self._own, "stream"):
            self._own.stream = Stream("other")
        return self._own.stream

    @contextlib.contextmanager
    def on(self, stream, device):
        before, self._own.stream = self.current(None), stream
        yield
        self._own.stream = before

    def mark(self, stream):
        return Event(stream)

    def copy(self, move, memory, *, non_blocking):
        stream = self.current(None)
        stream.queue.append(lambda: move.into(memory))
        if not non_blocking:
            stream.synchronize()

    def register(self, address, size, device):
        self.registered.append((size, threading.current_thread().name))
        return (lambda: self.registered.append("taken back")) if self.pins else None


@pytest.fixture
def buffer():
    made = SharedBuffer()
    made.reserve(GRANULE)
    yield made
    made.close()


def moves_of(count=2, *, deferred=True):
    return [
        TensorCopy(offset=BASE + 400 * number, tensor=torch.full((100,), float(number + 1)), deferred=deferred)
        for number in range(count)
    ]


def staged(buffer, moves, devices):
    """The copy of these, of which ``devices`` says where they are."""
    copies = DeviceCopies(buffer, devices)
    turns = [[move for move in moves if move.deferred is deferred] for deferred in (False, True)]
    return StagingCopy(
        "c", buffer, tuple(CopyPlan.of(turn, copies.takes) for turn in turns), BASE + 400 * len(moves), devices=devices
    )


def held(buffer, move):
    return buffer.bytes[move.offset : move.offset + move.size].view(torch.float32)


def test_an_abandoned_copy_is_over_when_nothing_is_under_way(buffer):
    """Given up in the middle: what the device still has queued is done before the arena may be used again, not after."""
    devices, moves = Remembering(), moves_of()
    copy = staged(buffer, moves, devices)
    assert copy.run()
    (side,) = devices.made
    assert len(side.queue) == 3  # the trainer's work, and two copies
    copy.abandon()
    assert copy.wait(0)
    assert side.queue == []
    buffer.bytes.zero_()  # the next snapshot
    side.synchronize()
    assert not buffer.bytes.any()


@pytest.mark.parametrize("pins", [True, False])
def test_a_copy_that_fails_halfway_leaves_nothing_under_way(buffer, pins):
    """The second tensor cannot be copied: the first, and what of the second was queued, are over when the copy is."""

    class Failing(Remembering):
        def copy(self, move, memory, *, non_blocking):
            super().copy(move, memory, non_blocking=non_blocking)
            if move.tensor[0] == 2:
                raise RuntimeError("CUDA out of memory")

    devices = Failing(pins=pins)
    copy = staged(buffer, moves_of(), devices)
    copy.run()
    copy.run_deferred()
    assert copy.wait(0)
    assert "out of memory" in str(copy.error)
    assert all(stream.queue == [] for stream in [*devices.made, devices.current(None)])


def test_a_device_that_is_lost_fails_the_copy_and_ends_it(buffer):
    """Waiting raises: the copy is over, with that error, and nobody waits for it for ever."""

    class Lost(Stream):
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    devices = Remembering()
    devices.stream = lambda device: Lost("side")
    copy = staged(buffer, moves_of(), devices)
    copy.run()
    copy.abandon()
    assert copy.wait(0)
    assert copy.error is not None


def test_started_copies_come_after_the_trainers_work(buffer):
    """A side stream begins behind what the trainer has queued, and the bytes are marked only when they are there."""
    devices, moves = Remembering(), moves_of()
    devices.trainer.queue.append(lambda: [move.tensor.add_(10) for move in moves])
    copy = staged(buffer, moves, devices)
    assert copy.run()
    assert read_mark(memoryview(buffer.memory)) < moves[0].offset + moves[0].size
    copy.run_deferred()
    assert copy.error is None
    assert [held(buffer, move)[0].item() for move in moves] == [11.0, 12.0]
    assert read_mark(memoryview(buffer.memory)) == BASE + 800


def test_what_is_marked_on_the_way_is_there(buffer, monkeypatch):
    """The writer reads up to each mark at once: what a device has not finished by then is waited for."""
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 400)
    devices, moves = Remembering(), moves_of(4)
    copy, marks = staged(buffer, moves, devices), []
    mark = buffer.mark

    def look(end):
        mark(end)
        there = [move for move in moves if move.offset + move.size <= end]
        marks.append([held(buffer, move)[-1].item() for move in there] == [move.tensor[-1].item() for move in there])

    monkeypatch.setattr(buffer, "mark", look)
    assert copy.run()
    copy.run_deferred()
    assert copy.error is None
    assert len(marks) > 2
    assert all(marks)


def test_without_pinning_the_copying_thread_waits_for_the_trainers_stream(buffer):
    """Another thread's stream knows nothing of the trainer's: it waits for what was queued there when the copy began."""
    devices, moves = Remembering(pins=False), moves_of()
    devices.trainer.queue.append(lambda: [move.tensor.add_(10) for move in moves])
    copy = staged(buffer, moves, devices)
    assert copy.run()
    assert devices.made == []
    thread = threading.Thread(target=copy.run_deferred, name="copying")
    thread.start()
    thread.join()
    assert copy.error is None
    assert [held(buffer, move)[0].item() for move in moves] == [11.0, 12.0]
    assert ("at", "copying") in devices.log  # not on device 0, where a thread begins


def test_tensors_copied_at_once_are_copied_on_the_trainers_stream(buffer):
    """In order with its work, and in place when the call returns."""
    devices, moves = Remembering(), moves_of(deferred=False)
    devices.trainer.queue.append(lambda: [move.tensor.add_(10) for move in moves])
    copy = staged(buffer, moves, devices)
    assert not copy.run()
    assert copy.wait(0)
    assert [held(buffer, move)[0].item() for move in moves] == [11.0, 12.0]
    assert devices.trainer.queue == []


def test_the_gate_orders_the_trainer_behind_started_copies_alone(buffer):
    """With pinning the devices see to the order; without it somebody has to wait."""
    for pins in (True, False):
        devices, moves = Remembering(pins=pins), moves_of()
        other = SharedBuffer()
        other.reserve(GRANULE)
        copies = DeviceCopies(other, devices)
        copies.begin(moves)
        assert copies.order(moves) is pins
        assert not copies.order([*moves, *moves_of(1)])
        copies.forget()
        other.close()


def test_memory_is_pinned_once_and_ahead(buffer):
    """``prepare`` pins in the background what it has allocated; a refusal is not asked for again; closing takes it back."""
    devices = Remembering()
    stager = Stager(CheckpointConfig(), 0, devices=devices)
    stager.prepare(1 << 20, lambda: None)
    stager._preparing.join()
    assert [name for _, name in devices.registered] == ["safe_ckpt-prepare"] * CheckpointConfig().max_in_flight
    stager.close()
    assert devices.registered.count("taken back") == CheckpointConfig().max_in_flight
    refusing = Remembering(pins=False)
    assert not buffer.pin(torch.device("cpu"), refusing)
    assert not buffer.pin(torch.device("cpu"), refusing)
    assert len(refusing.registered) == 1


def test_memory_is_pinned_for_each_type_of_device_by_itself(buffer):
    """Where one type refuses, copies of another are started all the same. What has grown is pinned anew; a refusal stays."""

    class OneTypePins(Remembering):
        def register(self, address, size, device):
            self.registered.append(device.type)
            return (lambda: self.registered.append("taken back")) if device.type == "cuda" else None

    devices = OneTypePins()
    for _ in range(2):
        assert not buffer.pin(torch.device("xpu", 0), devices)
        assert buffer.pin(torch.device("cuda", 1), devices)
    assert devices.registered == ["xpu", "cuda"]
    buffer.reserve(2 * GRANULE)
    assert devices.registered[2:] == ["taken back"]
    assert buffer.pin(torch.device("cuda", 0), devices)
    assert not buffer.pin(torch.device("xpu", 0), devices)
    assert devices.registered[3:] == ["cuda"]


def test_another_thread_reads_behind_the_trainers_work():
    """What is streamed on a thread of its own is read when all that the trainer has queued for it is done."""
    devices, (move,) = Remembering(), moves_of(1)
    devices.trainer.queue.append(lambda: move.tensor.add_(10))
    devices.synchronize([move.tensor])
    assert move.tensor[0] == 11


def test_a_streamed_save_has_what_the_trainer_has_queued(tmp_path):
    """A state above max_host_bytes is written straight from the tensors, by another thread: not before the devices have done
    what the trainer had asked of them.
    """

    def state():
        return {name: {"t": torch.zeros(300_000), "u": torch.zeros(9)} for name in ("w", "x")}

    class EachAlone(Remembering):
        """What the trainer has queued for a tensor is done when that one is waited for, and not for another one."""

        def synchronize(self, tensors):
            for tensor in tensors:
                tensor.fill_(10)

    saved, found = state(), state()
    with Checkpointer(tmp_path, CheckpointConfig(max_host_bytes=1 << 20)) as ckpt:
        engine_of(ckpt)._stager._devices = EachAlone(pins=False)
        ckpt.save(1, saved).result(timeout_s=30)
        ckpt.resume(found)
    assert all(tensor.eq(10).all() for item in found.values() for tensor in item.values())


def test_a_device_that_is_lost_before_a_streamed_save_fails_it(tmp_path):
    """What the device still owes can never be read: the save says so, and nothing is committed."""

    class Lost(Remembering):
        def synchronize(self, tensors):
            raise RuntimeError("CUDA error: device lost")

    with Checkpointer(tmp_path, CheckpointConfig(max_host_bytes=1 << 20)) as ckpt:
        engine_of(ckpt)._stager._devices = Lost()
        with pytest.raises(SaveError, match="device lost"):
            ckpt.save(1, {"w": {"t": torch.zeros(300_000)}}).result(timeout_s=30)
    assert not (tmp_path / "step-00000001").exists()


def test_without_a_device_nothing_is_asked_of_one(buffer):
    """On this machine: no device, and tensors in host memory are none of its business."""
    copies = DeviceCopies(buffer)
    assert not copies.takes(moves_of(1)[0])
    copies.begin(moves_of())
    copies.synchronize()
    copies.forget()
    assert torch.accelerator.is_available() or Devices().here() == []
