"""One copy that two threads share: every byte is there once it is over, whoever was faster, and nothing is written after."""

import contextlib
import functools
import random
import signal
import threading
import time

import pytest
import torch

from kit.inside import before_pieces, copy_after
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.device import TensorCopy
from safe_ckpt.core.staging.progress import FIRST_BYTE, read_mark
from safe_ckpt.core.staging.snapshot import CopyPlan, StagingCopy
from safe_ckpt.core.staging.worker_thread import Background
from safe_ckpt.errors import SaveError
from support import share_copies

PIECE = 256
SIZES = (1, 255, 256, 257, 4096, 0, 100_000)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many pieces, so that the two meet in all kinds of places; some are copied with the interpreter lock."""
    share_copies(monkeypatch, piece_bytes=PIECE, locked_below_bytes=200)


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


def begun_copy(moves, end):
    """A shared buffer with room for all of them, and the copy that is to fill it."""
    buffer = SharedBuffer()
    buffer.reserve(end)
    turns = [[move for move in moves if move.deferred is deferred] for deferred in (False, True)]
    return buffer, StagingCopy("c", buffer, tuple(map(CopyPlan.of, turns)), end)


def watch_marks(monkeypatch, buffer, expected):
    """Everything before a mark must be in place when the mark is set: the writer reads it."""
    marking, wrong = SharedBuffer.mark, []

    def mark(self, end):
        if not buffer.bytes[FIRST_BYTE : max(end, FIRST_BYTE)].equal(expected[: max(end - FIRST_BYTE, 0)]):
            wrong.append(end)
        marking(self, end)

    monkeypatch.setattr(SharedBuffer, "mark", mark)
    return wrong


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "overlapped"])
def test_two_threads_copy_every_byte_of_a_state(monkeypatch, deferred):
    """60 states, each with both threads at once: what lies in the shared buffer is the state, and no mark runs ahead of it."""
    for seed in range(60):
        moves, expected, end = moves_of(seed, deferred=deferred)
        buffer, copy = begun_copy(moves, end)
        helpers = []
        with monkeypatch.context() as patch:
            wrong = watch_marks(patch, buffer, expected)

            def ask(work, helpers=helpers):
                helpers.append(threading.Thread(target=work))
                helpers[-1].start()

            if copy.run(ask):
                thread = threading.Thread(target=copy.run_deferred)
                thread.start()
                copy.pass_gate(30)
                thread.join(30)
        assert not wrong
        assert copy.error is None
        assert copy.wait(0)
        assert buffer.bytes[FIRST_BYTE:end].equal(expected)
        assert read_mark(memoryview(buffer.memory)) == end
        for helper in helpers:
            helper.join(30)
        assert helpers or deferred  # a copy that is over when the gate comes needs no help
        buffer.close()


def test_two_threads_share_the_copy_of_thousands_of_small_tensors(monkeypatch):
    """The one that helps is asked when there is something to take, however long it took to cut the state into pieces."""
    moves = [
        TensorCopy(offset=FIRST_BYTE + 300 * n, tensor=torch.full((300,), n % 251, dtype=torch.uint8))
        for n in range(5000)
    ]
    expected, end = torch.cat([move.tensor for move in moves]), FIRST_BYTE + 300 * len(moves)
    buffer, copy = begun_copy(moves, end)
    helped, copying, helpers = threading.Event(), StagingCopy._copy_piece, []

    def copy_piece(self, piece):
        if threading.current_thread() in helpers:
            helped.set()
        elif helpers:
            helped.wait(30)  # not to be done before the other one has begun
        copying(self, piece)

    def ask(work):
        helpers.append(threading.Thread(target=work))
        helpers[-1].start()

    monkeypatch.setattr(StagingCopy, "_copy_piece", copy_piece)
    copy.run(ask)
    assert helped.is_set()
    assert buffer.bytes[FIRST_BYTE:end].equal(expected)
    buffer.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_shared_copy_is_not_over_while_a_piece_is_copied(monkeypatch, interrupted):
    """The one at the back is slow with its last piece: until then it is not over, also if Ctrl-C ends the one at the front."""
    moves, expected, end = moves_of(40, deferred=False)
    buffer, copy = begun_copy(moves, end)
    begun, go_on, copying = threading.Event(), threading.Event(), StagingCopy._copy_piece
    helper = threading.Thread(target=copy.help)

    def copy_piece(self, piece):
        if threading.current_thread() is helper:
            begun.set()
            go_on.wait(30)
        elif not begun.is_set():
            helper.start()
            begun.wait(30)
            if interrupted:
                raise KeyboardInterrupt
        copying(self, piece)

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [MemoryError, SystemExit])
def test_an_error_of_the_one_that_helps_fails_the_save(monkeypatch, kind):
    """Nothing gets lost on another thread: the piece that it had taken is in nobody's hands."""
    moves, _, end = moves_of(40, deferred=False)
    buffer, copy = begun_copy(moves, end)
    helper, copying = threading.Thread(target=copy.help), StagingCopy._copy_piece
    helped = threading.Event()

    def copy_piece(self, piece):
        if threading.current_thread() is helper:
            helped.set()
            raise kind("no more")
        if not helped.is_set():
            helper.start()
            helped.wait(30)
        copying(self, piece)

    monkeypatch.setattr(StagingCopy, "_copy_piece", copy_piece)
    copy.run()
    helper.join(30)
    assert isinstance(copy.error, kind if issubclass(kind, Exception) else SaveError)
    assert copy.wait(0)
    assert read_mark(memoryview(buffer.memory)) < end
    buffer.close()


def test_repeated_ctrl_c_does_not_end_a_shared_copy_early(monkeypatch):
    """Each Ctrl-C ends what the caller waits for; it is over when the other thread has let go of its piece, and not before."""
    moves, _, end = moves_of(40, deferred=False)
    buffer, copy = begun_copy(moves, end)
    begun, go_on = threading.Event(), threading.Event()
    helper = threading.Thread(target=copy.help)

    def before_each(left):
        if threading.current_thread() is helper:
            begun.set()
            go_on.wait(30)
        elif not begun.is_set():
            helper.start()
            begun.wait(30)
        elif left < 5:
            signal.raise_signal(signal.SIGINT)

    before_pieces(monkeypatch, before_each)
    with pytest.raises(KeyboardInterrupt):
        copy.run()
    for _ in range(3):
        copy.abandon()
        press = functools.partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        again, begun_at = threading.Timer(0.05, press), time.monotonic()
        again.start()
        with pytest.raises(KeyboardInterrupt):
            copy.wait(30)
            again.join()  # where nothing was left to wait for, it comes here: no test behind this one is interrupted
        assert time.monotonic() - begun_at < 20
        again.join()
        assert not copy.wait(0)
    go_on.set()
    assert copy.wait(30)
    assert copy.error is not None
    helper.join(30)
    buffer.close()


def test_help_that_comes_late_does_nothing():
    """The copy is over and its memory belongs to the next save: whoever comes now writes nothing and marks nothing."""
    moves, _, end = moves_of(40, deferred=True)
    buffer, copy = begun_copy(moves, end)
    assert copy.run()
    copy.run_deferred()
    buffer.bytes[FIRST_BYTE:end] = 0
    buffer.mark(0)
    copy.help()
    copy.pass_gate(1)
    assert not buffer.bytes[FIRST_BYTE:end].any()
    assert read_mark(memoryview(buffer.memory)) == 0
    buffer.close()


def test_a_copy_that_fails_returns_once_no_thread_reads_the_state(monkeypatch):
    """The one at the front fails: the caller may free the state when the call returns, so the other one has let go of it."""
    moves, _, end = moves_of(40, deferred=False)
    buffer, copy = begun_copy(moves, end)
    begun, go_on, copying = threading.Event(), threading.Event(), StagingCopy._copy_piece
    helper = threading.Thread(target=copy.help)

    def copy_piece(self, piece):
        if threading.current_thread() is helper:
            begun.set()
            go_on.wait(30)
        else:
            helper.start()
            begun.wait(30)
            raise ValueError("cannot be copied")
        copying(self, piece)

    monkeypatch.setattr(StagingCopy, "_copy_piece", copy_piece)
    front = threading.Thread(target=copy.run)
    front.start()
    assert begun.wait(30)
    front.join(0.2)  # it must not end: a longer look would only find it more surely
    assert front.is_alive()
    go_on.set()
    front.join(30)
    helper.join(30)
    assert isinstance(copy.error, ValueError)
    assert copy.wait(0)
    buffer.close()


def test_a_starved_copying_thread_helps_the_one_that_replaced_it(tmp_path, monkeypatch):
    """It had not come to run when a step stood at the gate; when it does, it takes its part of the copy."""
    started, copying = threading.Event(), StagingCopy._copy_piece
    names, failed = set(), []

    def copy_piece(self, piece):
        names.add(threading.current_thread().name)
        if threading.current_thread().name == "safe_ckpt-help":
            started.set()
            limit = time.monotonic() + 10
            while "safe_ckpt-copy" not in names and not failed:
                if time.monotonic() > limit:
                    failed.append(piece)
                time.sleep(0.001)
        copying(self, piece)

    copy_after(monkeypatch, started, thread="safe_ckpt-copy")
    monkeypatch.setattr(StagingCopy, "_copy_piece", copy_piece)
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path, CheckpointConfig(snapshot="overlapped")) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        net(torch.ones(300)).sum().backward()
        optimizer.step()
        assert handle.result(timeout_s=60).step == 1
    assert names >= {"safe_ckpt-copy", "safe_ckpt-help"}


def test_a_signal_handler_within_the_gate_can_wait_for_the_save(tmp_path, monkeypatch):
    """The training thread is interrupted while it asks for help: the thread that copies waits for nothing of it."""
    putting, at_the_gate, found = Background.put, threading.Event(), []

    def put(self, item):
        if self._name == "safe_ckpt-help" and threading.current_thread() is threading.main_thread() and not found:
            with self._changing:  # as ``put`` does, and here the handler comes
                at_the_gate.set()
                found.append(handle.result(timeout_s=20).step)
        putting(self, item)

    copy_after(monkeypatch, at_the_gate)
    monkeypatch.setattr(Background, "put", put)
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path, CheckpointConfig(snapshot="overlapped")) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        net(torch.ones(300)).sum().backward()
        optimizer.step()
    assert found == [1]
