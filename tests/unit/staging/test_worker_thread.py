import threading
import weakref

import pytest

from kit.inside import engine_of
from kit.patience import scaled
from safe_ckpt import Checkpointer
from safe_ckpt.core.staging.worker_thread import Background
from support import run_program

WAIT_S = 20


class Item:
    def __init__(self, number):
        self.number = number
        self.done = threading.Event()


def test_a_worker_thread_does_its_work_in_order_on_one_thread():
    """What is put in is done in that order, on a single thread that stays."""
    seen, threads = [], set()

    def work(item):
        seen.append(item.number)
        threads.add(threading.current_thread())
        item.done.set()

    background = Background("t", work)
    background.start()
    (first,) = [thread for thread in threading.enumerate() if thread.name == "t"]
    items = [Item(number) for number in range(20)]
    for item in items:
        background.put(item)
    assert items[-1].done.wait(WAIT_S)
    assert seen == list(range(20))
    assert threads == {first}
    background.end()
    background.join(WAIT_S)
    assert not background.is_alive


def test_a_worker_thread_ends_after_the_work_it_was_given():
    """Ending waits for nothing and drops nothing; what comes later is refused, not lost."""
    go, done = threading.Event(), []
    background = Background("t", lambda item: (go.wait(WAIT_S), done.append(item)))
    for number in range(3):
        background.put(number)
    background.end()
    with pytest.raises(RuntimeError, match="was ended"):
        background.put(3)
    go.set()
    background.join(WAIT_S)
    assert done == [0, 1, 2]


def test_a_worker_ended_before_its_first_work_starts_no_thread():
    """No thread is started for nothing."""
    before = threading.active_count()
    background = Background("t", print)
    background.end()
    background.start()
    assert threading.active_count() == before
    assert not background.is_alive


def test_an_idle_thread_keeps_nothing_alive():
    """A snapshot's tensors are freed when their save is over, not when the next one comes."""
    background = Background("t", lambda item: item.done.set())
    item = Item(0)
    gone, freed = item.done, threading.Event()
    weakref.finalize(item, freed.set)
    background.put(item)
    assert gone.wait(WAIT_S)
    del item
    assert freed.wait(WAIT_S)
    background.end()


def test_a_worker_that_gets_no_thread_refuses_and_tries_again(monkeypatch):
    """A thread that could not be started is not taken for one that runs."""
    starting, refuse = threading.Thread.start, [True]

    def start(self):
        if refuse.pop():
            raise RuntimeError("can't start new thread")
        starting(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    item = Item(0)
    background = Background("t", lambda item: item.done.set())
    with pytest.raises(RuntimeError, match="can't start"):
        background.put(item)
    refuse.append(False)
    background.put(item)
    assert item.done.wait(WAIT_S)
    background.end()


def test_an_interrupted_start_leaves_one_thread(monkeypatch):
    """Ctrl-C while the thread starts: that thread ends, and what is put in later is done once, in order, on another."""
    starting, left, before = threading.Thread.start, [True], set(threading.enumerate())

    def start(self):
        starting(self)
        if left:
            left.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    background = Background("t", lambda item: (done.append((item.number, threading.current_thread())), item.done.set()))
    with pytest.raises(KeyboardInterrupt):
        background.put(Item(0))
    items = [Item(number) for number in range(1, 50)]
    for item in items:
        background.put(item)
    assert items[-1].done.wait(WAIT_S)
    assert [number for number, _ in done] == list(range(1, 50))
    assert len({thread for _, thread in done}) == 1
    background.end()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_worker_ended_by_a_handler_within_its_start_refuses(monkeypatch):
    """A signal's handler that ends it while the same thread puts something in: refused, and nothing waits for a lock."""
    starting = threading.Thread.start

    def start(self):
        starting(self)
        background.end()

    monkeypatch.setattr(threading.Thread, "start", start)
    background = Background("t", print)
    with pytest.raises(RuntimeError, match="was ended"):
        background.put(1)
    background.join(WAIT_S)
    assert not background.is_alive


def test_work_that_a_worker_accepts_while_it_is_ended_is_done():
    """Ended by another thread right when something is put in: it is done, since it was not refused."""
    done = []
    background = Background("t", done.append)
    background.start()
    waiting, ending = background._waiting, threading.Thread(target=background.end)

    class Late:
        def put(self, item):
            if item is not None:
                ending.start()
                ending.join(0.2)  # it has had its chance to come first
            waiting.put(item)

    background._waiting = Late()
    background.put(1)
    ending.join(WAIT_S)
    background.join(WAIT_S)
    assert not background.is_alive
    assert done == [1]
    with pytest.raises(RuntimeError, match="was ended"):
        background.put(2)


def test_an_error_of_the_work_does_not_end_the_worker_thread(caplog):
    """The thread outlives an error of what it does, and the log has it."""
    item = Item(0)

    def work(what):
        if what is None or not isinstance(what, Item):
            raise SystemExit("as a bug would")
        what.done.set()

    background = Background("t", work)
    background.put("wrong")
    background.put(item)
    assert item.done.wait(WAIT_S)
    assert "t failed" in caplog.text
    background.end()


def test_a_forked_process_does_not_wait_for_its_parents_worker_thread():
    """Forked while another thread is within a call: the child's calls return, and what it puts in is refused."""
    done = run_program("forked_within_a_call", flags=("-W", "ignore::DeprecationWarning"), finalize=True)
    assert done.stdout.split() == ["7", "False"], done.stderr


def test_a_forked_process_leaves_its_parents_writer_alone():
    """What a data loader's worker tidies away at its end is a copy: the writer process is still there."""
    done = run_program("forked_beside_a_writer", flags=("-W", "ignore::DeprecationWarning"), finalize=True)
    assert done.stdout.split() == ["None", "-9"], done.stderr


def test_the_thread_that_copies_waits_for_no_lock_of_the_one_that_helps(tmp_path):
    """Whoever holds that lock may have been interrupted by a signal's handler that waits for the copy."""
    with Checkpointer(tmp_path) as ckpt:
        stager, asked = engine_of(ckpt)._stager, threading.Event()

        def ask():
            stager._ask_for_help(lambda: None)
            asked.set()

        with stager._helper._changing:
            stager._copy_thread.put(ask)
            assert asked.wait(scaled(20))
