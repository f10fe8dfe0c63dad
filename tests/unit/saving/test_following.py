"""Following a run: each checkpoint once, held while it is read, of any layout."""

import logging
import os
import threading
import time

import pytest
import torch

import safe_ckpt
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.errors import CheckpointNotFoundError, DirectoryError, NoValidCheckpointError, StateError
from safe_ckpt.testing import inline_saves

pytestmark = pytest.mark.timeout(60)
ONE = CheckpointConfig(retention=Retention(keep_last=1))


@pytest.fixture(autouse=True)
def _inline():
    with inline_saves():
        yield


def save(ckpt, step, **metrics):
    ckpt.save(step, {"w": {"t": torch.ones(2) * step}, "n": step}, metrics=metrics).result()


def names(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_what_is_there_comes_in_order_and_the_loop_ends_when_nothing_more_comes(tmp_path):
    """Each once, the oldest first."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    assert [one.step for one in safe_ckpt.follow(tmp_path, timeout_s=0)] == [1, 2, 3]
    assert [one.step for one in safe_ckpt.follow(tmp_path, timeout_s=0, newest_only=True)] == [3]
    assert [one.step for one in safe_ckpt.follow(tmp_path, timeout_s=0, after=2)] == [3]
    assert list(safe_ckpt.follow(tmp_path / "nothing", timeout_s=0)) == []


def test_a_new_one_is_waited_for(tmp_path):
    """Beside the job that saves it."""
    with Checkpointer(tmp_path) as ckpt:
        follower = safe_ckpt.follow(tmp_path, timeout_s=30)
        later = threading.Timer(0.1, save, (ckpt, 7))
        later.start()
        assert next(follower).step == 7
        later.join()
        follower.close()


def test_what_is_read_stays_while_the_block_runs(tmp_path):
    """Retention leaves it alone until then, and deletes it afterwards."""
    with Checkpointer(tmp_path, ONE) as ckpt:
        save(ckpt, 1)
        follower = safe_ckpt.follow(tmp_path, timeout_s=0)
        one = next(follower)
        assert one.pinned
        save(ckpt, 2)
        save(ckpt, 3)
        assert names(tmp_path) == ["step-00000001", "step-00000003"]
        two = next(follower)
        assert (two.step, two.missed) == (3, ())
        save(ckpt, 4)
        assert names(tmp_path) == ["step-00000003", "step-00000004"]
        follower.close()
        save(ckpt, 5)
        assert names(tmp_path) == ["step-00000005"]


def test_with_every_one_none_is_left_out(tmp_path):
    """However many are saved while a block runs; and behind the reader all go."""
    with Checkpointer(tmp_path, ONE) as ckpt:
        save(ckpt, 1)
        taken = []
        for one in safe_ckpt.follow(tmp_path, every=1, limit=9, timeout_s=0):
            taken.append((one.step, one.missed))
            for step in {1: (2, 3, 4), 2: (5,), 4: (6, 7)}.get(one.step, ()):
                save(ckpt, step)
        assert taken == [(step, ()) for step in range(1, 8)]
        save(ckpt, 99)
        assert names(tmp_path) == ["step-00000099"]


def test_each_second_is_kept_for_its_reader(tmp_path):
    """Those between go as the rules say, once the reader has seen them."""
    with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=2))) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2)
        follower = safe_ckpt.follow(tmp_path, every=2, timeout_s=0)
        assert next(follower).step == 2
        for step in range(3, 9):
            save(ckpt, step)
        assert [(one.step, one.missed) for one in follower] == [(4, ()), (6, ()), (8, ())]


def while_it_waits(monkeypatch, act, times):
    """What happens while a reader waits for the next one: ``act(n)``, so many times."""
    sleep, done = time.sleep, []

    def waits(seconds):
        if threading.current_thread() is threading.main_thread() and len(done) < times:
            done.append(None)
            act(len(done))
        else:
            sleep(seconds)

    monkeypatch.setattr("safe_ckpt.following.time.sleep", waits)


def test_what_was_read_goes_while_its_reader_waits_for_the_next(tmp_path, monkeypatch):
    """Its block is over: the next commit deletes it, although nothing else was taken yet."""
    there = []
    with Checkpointer(tmp_path, ONE) as ckpt:

        def act(number):
            save(ckpt, 1 + number)
            there.append(names(tmp_path))

        while_it_waits(monkeypatch, act, 3)
        save(ckpt, 1)
        follower = safe_ckpt.follow(tmp_path, every=2, timeout_s=30)
        assert [next(follower).step, next(follower).step] == [2, 4]
        follower.close()
    assert there == [["step-00000002"], ["step-00000003"], ["step-00000004"]]


def test_what_was_taken_is_not_told_as_missed(tmp_path, monkeypatch):
    """Also where the job saves twice before the reader looks again, and its limit is reached."""
    with Checkpointer(tmp_path, ONE) as ckpt:
        while_it_waits(monkeypatch, lambda _: [save(ckpt, step) for step in (2, 3)], 1)
        save(ckpt, 1)
        follower = safe_ckpt.follow(tmp_path, every=1, limit=1, timeout_s=30)
        assert next(follower).step == 1
        three = next(follower)
        assert (three.step, three.missed) == (3, ("step-00000002",))
        follower.close()


def test_what_exceeds_the_limit_is_told(tmp_path):
    """The oldest are given up, and the reader is told where they are missing."""
    with Checkpointer(tmp_path, ONE) as ckpt:
        save(ckpt, 1)
        follower = safe_ckpt.follow(tmp_path, every=1, limit=2, timeout_s=0)
        assert next(follower).step == 1
        for step in range(2, 8):
            save(ckpt, step)
        rest = [(one.step, one.missed) for one in follower]
    steps = [step for step, _ in rest]
    missed = [int(name[-8:]) for _, names in rest for name in names]
    assert sorted(steps + missed) == [2, 3, 4, 5, 6, 7]
    assert steps[-1] == 7
    assert rest[0][1] != ()


def test_without_every_what_was_seen_and_is_gone_is_told(tmp_path):
    """Nothing is kept for this reader, and it learns what it missed."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    follower = safe_ckpt.follow(tmp_path, timeout_s=0)
    assert next(follower).step == 1
    (tmp_path / "step-00000002").rename(tmp_path / "elsewhere")
    os.rename(tmp_path / "elsewhere", tmp_path.parent / f"{tmp_path.name}-elsewhere")
    three = next(follower)
    assert (three.step, three.missed) == (3, ("step-00000002",))


def test_one_that_is_pinned_stays(tmp_path):
    """``pin`` holds one, by its path or as the newest of a directory."""
    with Checkpointer(tmp_path, ONE) as ckpt:
        save(ckpt, 1)
        with safe_ckpt.pin(tmp_path / "step-00000001") as first, safe_ckpt.pin(tmp_path) as newest:
            assert first.step == newest.step == 1
            save(ckpt, 2)
            assert names(tmp_path) == ["step-00000001", "step-00000002"]
        save(ckpt, 3)
        assert names(tmp_path) == ["step-00000003"]
    with pytest.raises(CheckpointNotFoundError), safe_ckpt.pin(tmp_path / "step-00000001"):
        pass


def test_retention_says_which_reader_holds_what(tmp_path, caplog):
    """In the log, once for each checkpoint."""
    with Checkpointer(tmp_path, ONE) as ckpt:
        save(ckpt, 1)
        with safe_ckpt.pin(tmp_path, reader="eval"), caplog.at_level(logging.INFO, "safe_ckpt"):
            save(ckpt, 2)
            save(ckpt, 3)
    said = [record.message for record in caplog.records if "is not deleted" in record.message]
    assert len(said) == 1
    assert f"reader eval (process {os.getpid()}" in said[0]


def test_bad_arguments_are_refused(tmp_path):
    """Before anything is waited for."""
    for wrong in ({"every": 0}, {"limit": 0}, {"ttl_s": 0.1}, {"every": 1, "newest_only": True}):
        with pytest.raises(StateError):
            safe_ckpt.follow(tmp_path, **wrong)
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
    with pytest.raises(DirectoryError, match="is a checkpoint"):
        safe_ckpt.follow(tmp_path / "step-00000001")


def test_all_of_them_and_the_best(tmp_path):
    """By name, with what is wrong with one; the best by a metric, of those that are whole."""
    with Checkpointer(tmp_path) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan")), (4, 0.3)):
            save(ckpt, step, loss=loss)
    (tmp_path / "step-00000004" / "manifest.json").write_text("{}")
    found = safe_ckpt.checkpoints(tmp_path)
    assert [(one.step, one.whole) for one in sorted(found, key=lambda one: one.step)] == [
        (1, True),
        (2, True),
        (3, True),
        (4, False),
    ]
    assert safe_ckpt.best(tmp_path, "loss").step == 2
    assert safe_ckpt.best(tmp_path, "loss", "max").step == 1
    assert safe_ckpt.best(tmp_path, "other") is None
    assert safe_ckpt.checkpoints(tmp_path / "nothing") == []


def test_the_best_is_loaded(tmp_path):
    """``load`` takes it by the metric, and says when there is none."""
    with Checkpointer(tmp_path) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            save(ckpt, step, loss=loss)
    state = {"n": 0}
    assert safe_ckpt.load(tmp_path, state, best="loss").step == 2
    assert state["n"] == 2
    assert safe_ckpt.load(tmp_path, state, best="loss", mode="max").step == 1
    with pytest.raises(NoValidCheckpointError, match="has the metric 'acc'"):
        safe_ckpt.load(tmp_path, state, best="acc")
    with pytest.raises(StateError):
        safe_ckpt.load(tmp_path, state, best="loss", step=1)
