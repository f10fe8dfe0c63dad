"""One copy that two threads share: every byte is there once it is over, whoever was faster, and nothing is written after."""

import contextlib
import random
import threading

import pytest
import torch

from safe_ckpt.core.cuda import TensorCopy
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.progress import FIRST_BYTE, read_mark
from safe_ckpt.core.staging.snapshot import StagingCopy

PIECE = 256
SIZES = (1, 255, 256, 257, 4096, 0, 100_000)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many pieces, so that the two meet in all kinds of places; some are copied with the interpreter lock."""
    monkeypatch.setattr(snapshot, "_PIECE", PIECE)
    monkeypatch.setattr(snapshot, "_LOCKED_BELOW", 200)
    monkeypatch.setattr(snapshot, "_HELP_FROM", 1)
    monkeypatch.setattr(snapshot.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def moves_of(seed, *, deferred):
    """Tensors of all sizes one behind the other, one of them not contiguous; and what the memory must hold."""
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    moves, expected, at = [], [], FIRST_BYTE
    for number in range(30):
        size = chooser.choice(SIZES)
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
        if number == seed % 60:  # in half of all seeds, and then nobody helps
            tensor = torch.randint(0, 255, (size, 2), dtype=torch.uint8, generator=generator)[:, 0]
        moves.append(TensorCopy(offset=at, tensor=tensor, deferred=deferred))
        expected.append(tensor)
        at += size
    return moves, torch.cat(expected), at


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "overlapped"])
def test_every_byte_is_copied(deferred):
    """60 states, each with both threads at once: what lies in the shared buffer is the state, and it is marked to its end."""
    for seed in range(60):
        moves, expected, end = moves_of(seed, deferred=deferred)
        buffer = SharedBuffer()
        buffer.reserve(end)
        copy = StagingCopy("c", buffer, moves, end)
        helpers = []

        def ask(work, helpers=helpers):
            helpers.append(threading.Thread(target=work))
            helpers[-1].start()

        if copy.run(ask):
            thread = threading.Thread(target=copy.run_deferred)
            thread.start()
            copy.pass_gate(30)
            thread.join(30)
        assert copy.error is None
        assert copy.wait(0)
        assert buffer.bytes[FIRST_BYTE:end].equal(expected)
        assert read_mark(memoryview(buffer.memory)) == end
        for helper in helpers:
            helper.join(30)
        assert helpers or deferred
        buffer.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_it_is_not_over_while_a_piece_is_copied(monkeypatch, interrupted):
    """The one at the back is slow with its last piece: until then it is not over, also if Ctrl-C ends the one at the front."""
    moves, expected, end = moves_of(40, deferred=False)
    buffer = SharedBuffer()
    buffer.reserve(end)
    copy = StagingCopy("c", buffer, moves, end)
    begun, go_on, copying = threading.Event(), threading.Event(), StagingCopy._copy_piece
    helper = threading.Thread(target=copy.help)

    def copy_piece(self, piece, memory):
        if threading.current_thread() is helper:
            begun.set()
            go_on.wait(30)
        elif not begun.is_set():
            helper.start()
            begun.wait(30)
            if interrupted:
                raise KeyboardInterrupt
        copying(self, piece, memory)

    def run():
        with contextlib.suppress(KeyboardInterrupt):
            copy.run()

    monkeypatch.setattr(StagingCopy, "_copy_piece", copy_piece)
    front = threading.Thread(target=run)
    front.start()
    assert begun.wait(30)
    front.join(0.2)  # it must not end: a longer look would only find it more surely
    assert not copy.wait(0)
    assert read_mark(memoryview(buffer.memory)) < end
    go_on.set()
    front.join(30)
    helper.join(30)
    assert copy.wait(0)
    assert (copy.error is not None) == interrupted
    assert interrupted or buffer.bytes[FIRST_BYTE:end].equal(expected)
    buffer.close()


def test_an_error_of_the_one_that_helps_fails_the_save(monkeypatch):
    """It does not get lost on another thread."""
    moves, _, end = moves_of(40, deferred=False)
    buffer = SharedBuffer()
    buffer.reserve(end)
    copy = StagingCopy("c", buffer, moves, end)
    helper, copying = threading.Thread(target=copy.help), StagingCopy._copy_piece
    helped = threading.Event()

    def copy_piece(self, piece, memory):
        if threading.current_thread() is helper:
            helped.set()
            raise MemoryError("no more")
        if not helped.is_set():
            helper.start()
            helped.wait(30)
        copying(self, piece, memory)

    monkeypatch.setattr(StagingCopy, "_copy_piece", copy_piece)
    copy.run()
    helper.join(30)
    assert isinstance(copy.error, MemoryError)
    assert copy.wait(0)
    buffer.close()


def test_help_that_comes_late_does_nothing():
    """The copy is over and its memory belongs to the next save: whoever comes now writes nothing and marks nothing."""
    moves, _, end = moves_of(40, deferred=True)
    buffer = SharedBuffer()
    buffer.reserve(end)
    copy = StagingCopy("c", buffer, moves, end)
    assert copy.run()
    copy.run_deferred()
    buffer.bytes[FIRST_BYTE:end] = 0
    buffer.mark(0)
    copy.help()
    copy.pass_gate(1)
    assert not buffer.bytes[FIRST_BYTE:end].any()
    assert read_mark(memoryview(buffer.memory)) == 0
    buffer.close()
