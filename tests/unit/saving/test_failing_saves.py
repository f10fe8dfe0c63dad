"""What a save that fails leaves for those after it: on the disk, in memory, and in the count of failures."""

import contextlib
import errno
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from frozen_jobs import FROZEN, Job
from small_runs import config, steps

from kit.inside import engine_of, exchange_no_names, once_written
from kit.patience import wait_until
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.saving import one_save, queue
from safe_ckpt.core.saving.queue import SaveQueue
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.storage import durable
from safe_ckpt.core.writer import sink
from safe_ckpt.errors import CommitOutcomeUnknown, SaveError


@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_was_replaced_outlives_an_unknown_outcome(tmp_path, monkeypatch, can_exchange):
    """The disk does not confirm the name of a step that is saved again, and it cannot be taken back: a power cut may still
    take the new one away, so the old one is whole on the disk, and stays there until the next start.
    """
    if not can_exchange:
        exchange_no_names(monkeypatch)
    step, hidden = tmp_path / "step-00000001", tmp_path / ".safe_ckpt"
    exchange, rename, sync, asked = durable.exchange, os.rename, durable.sync_directory, []
    with Checkpointer(tmp_path, config()) as ckpt:
        old = ckpt.save(1, {"x": 1}).result(timeout_s=20)

        def once(one, other):
            asked.append(one)
            return exchange(one, other) if len(asked) == 1 else False

        def no_way_back(source, target):
            if os.fspath(source) == str(step) and read_manifest(step).op_id != old.op_id:
                raise OSError(5, "Input/output error", str(source))
            rename(source, target)

        def unconfirmed(path):
            if path == str(tmp_path) and read_manifest(step).op_id != old.op_id:
                raise OSError(5, "Input/output error", path)
            sync(path)

        monkeypatch.setattr(durable, "exchange", once if can_exchange else exchange)
        monkeypatch.setattr(os, "rename", no_way_back)
        monkeypatch.setattr(durable, "sync_directory", unconfirmed)
        with pytest.raises(CommitOutcomeUnknown, match="did not confirm") as caught:
            ckpt.save(1, {"x": 2}).result(timeout_s=20)
        assert caught.value.code == errno.EIO
        (kept,) = [
            path.parent for path in hidden.rglob("manifest.json") if read_manifest(path.parent).op_id == old.op_id
        ]
        assert (kept / "x.json").read_text() == "1"
        monkeypatch.undo()
    assert read_manifest(step).op_id != old.op_id
    with Checkpointer(tmp_path, config()) as ckpt:
        assert not [*hidden.rglob("manifest.json")]
        state = {"x": 0}
        ckpt.resume(state)
        assert state == {"x": 2}


@contextlib.contextmanager
def in_the_way(folder):
    """No save can be prepared."""
    pending = folder / ".safe_ckpt/pending"
    pending.rmdir()
    pending.write_text("in the way")
    yield
    pending.unlink()
    pending.mkdir()


def test_failures_that_are_not_in_a_row_stop_no_run(tmp_path, caplog):
    """on_failure="warn": a success between two failures begins the count of max_consecutive_failures anew."""
    with Checkpointer(tmp_path, config(on_failure="warn", max_consecutive_failures=2)) as ckpt:
        for step in range(0, 8, 2):
            with in_the_way(tmp_path):
                ckpt.save(step, {"a": 1})
                ckpt.wait()
            ckpt.save(step + 1, {"a": 1})
            ckpt.wait()
        assert steps(tmp_path) == [f"step-0000000{step}" for step in (1, 3, 5, 7)]
    said = [text.rpartition(" (")[2] for text in caplog.messages if "ENOTDIR" in text]
    assert said == ["failure 1 in a row; training goes on)"] * 4


def test_memory_into_which_a_copy_still_writes_is_not_given_to_the_next_save(tmp_path, monkeypatch):
    """A copy hangs in the middle of a tensor, its save is given up, and it goes on while the next one is written: what that
    commits has not a byte of it. At the end no thread of either is left.
    """
    before = threading.enumerate()
    copying, writing, hung = StagingCopy._copy_piece, one_save.write, []
    go_on, stepped = threading.Event(), threading.Event()
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    state = {"model": net, "optimizer": optimizer}

    def hangs_once(self, piece):
        if not hung and threading.current_thread() is not threading.main_thread():
            hung.append(self)
            go_on.wait(60)
        copying(self, piece)

    def train():
        net(torch.ones(300)).sum().backward()
        optimizer.step()

    monkeypatch.setattr(StagingCopy, "_copy_piece", hangs_once)
    timeouts = {"barrier_s": 0.5, "shutdown_s": 0.5}
    with Checkpointer(
        tmp_path, CheckpointConfig.from_mapping({"snapshot": "overlapped", "timeouts": timeouts})
    ) as ckpt:
        failed = ckpt.save(1, state)
        train()
        with pytest.raises(SaveError, match="not complete after"):
            failed.result(timeout_s=60)
        expected = {name: value.clone() for name, value in net.state_dict().items()}

        def written_late(turn):
            """The copy of the first save ends between the copy and the writing of the second, with what the step has made."""
            assert stepped.wait(60)
            go_on.set()
            assert hung[0].wait(60)
            return writing(turn)

        monkeypatch.setattr(one_save, "write", written_late)
        handle = ckpt.save(2, state)
        train()
        stepped.set()
        handle.result(timeout_s=60)
        assert ckpt.resume(state).step == 2
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
    wait_until(lambda: {*threading.enumerate()} <= {*before}, 20, "the end of the threads of both copies")


def test_nothing_is_taken_from_the_checkpoint_before_a_save_of_unknown_outcome(tmp_path, monkeypatch):
    """That save may be committed, and what was the newest before may be deleted at any moment: frozen weights are written anew,
    and shared again from then on.
    """
    job, sync = Job(), durable.sync_directory

    def unconfirmed(path):
        if path == str(tmp_path):
            raise OSError(5, "Input/output error", path)
        sync(path)

    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, job.state).result(timeout_s=20)
        with monkeypatch.context() as away:
            away.setattr(durable, "sync_directory", unconfirmed)
            with pytest.raises(CommitOutcomeUnknown):
                ckpt.save(3, job.state).result(timeout_s=20)
        for step in (4, 5):
            ckpt.save(step, job.state).result(timeout_s=20)
    files = {int(path.parent.name[-1]): path.stat().st_ino for path in tmp_path.glob(f"step-*/{FROZEN}")}
    assert files[1] == files[2] != files[4] == files[5]


def test_a_save_leaves_nothing_on_the_disk_when_it_fails_right_before_its_commit(tmp_path):
    """All is written, and then a rank reports an error: before the next save begins the bytes are gone."""

    def fails(_):
        raise ArithmeticError("the report is lost")

    with Checkpointer(tmp_path, config()) as ckpt:
        once_written(fails)
        with pytest.raises(SaveError, match="the report is lost"):
            ckpt.save(1, {"w": torch.ones(1000)}).result(timeout_s=20)
        assert not [*(tmp_path / ".safe_ckpt").rglob("w.safetensors")]
        ckpt.save(2, {"w": torch.ones(1000)}).result(timeout_s=20)
    assert steps(tmp_path) == ["step-00000002"]


def test_an_end_in_a_hurry_waits_as_long_as_it_is_told(tmp_path, monkeypatch, caplog):
    """Not for what ends a job otherwise: a scheduler gives less time than ``shutdown_s`` has."""
    monkeypatch.setattr(queue, "_LAST_WORDS_S", 0.1)
    over = threading.Event()
    once_written(lambda _: over.wait(60) and None)
    ckpt = Checkpointer(tmp_path, config())
    ckpt.save(1, {"x": 1})
    engine_of(ckpt).close(quiet=True, within_s=1)
    over.set()
    assert "a save was not done within 1 s at shutdown and is given up" in caplog.text
    ckpt.close()


def test_a_save_for_which_a_signal_leaves_no_time_is_given_up_by_name(tmp_path, monkeypatch):
    """What is not written within signal_grace_s of the signal is no checkpoint, and the error names the setting."""
    over, real = threading.Event(), os.fsync

    def fsync(fd):
        if threading.current_thread().name == "safe_ckpt-write":
            over.wait(60)
        real(fd)

    monkeypatch.setattr(sink.os, "fsync", fsync)
    with Checkpointer(tmp_path, config(save_on_signals=("SIGUSR1",), signal_grace_s=1e-6)) as ckpt:
        signal.raise_signal(signal.SIGUSR1)
        assert ckpt.stop_requested
        with pytest.raises(SaveError, match="signal_grace_s") as caught:
            ckpt.save(1, {"w": torch.ones(1_000)}).result(timeout_s=20)
        over.set()
    assert (caught.value.phase, caught.value.rank) == ("shutdown", 0)
    assert steps(tmp_path) == []


ENDS = {
    "the block is left": (None, None),
    "close() is called": ("close", None),
    "an error ends the block": (KeyError("mine"), 7.0),
    "it is interrupted": (KeyboardInterrupt(), 7.0),
    "the program ends": (SystemExit(1), 7.0),
}


@pytest.mark.parametrize("how", ENDS)
def test_only_an_end_by_an_error_has_a_limit(tmp_path, monkeypatch, how):
    """Else what is in flight has as long as its bytes move; ``shutdown_s`` limits only what makes no progress."""
    ending, expected = ENDS[how]
    given, real = [], SaveQueue.close

    def close(self, *, within_s=None):
        given.append(within_s)
        real(self, within_s=within_s)

    monkeypatch.setattr(SaveQueue, "close", close)
    settings = config()
    settings = replace(settings, timeouts=replace(settings.timeouts, shutdown_s=7.0))
    with contextlib.suppress(KeyError, KeyboardInterrupt, SystemExit), Checkpointer(tmp_path, settings) as ckpt:
        ckpt.save(1, {"x": 1})
        if ending == "close":
            ckpt.close()
        elif ending is not None:
            raise ending
    assert given == [expected]
    assert steps(tmp_path) == ["step-00000001"]


def test_a_save_that_is_interrupted_before_its_tensors_are_streamed_is_not_committed(tmp_path, monkeypatch):
    """The caller goes on and changes them: nothing of them is written."""
    state = {"w": {"t": torch.ones(1 << 20)}}
    with Checkpointer(tmp_path, CheckpointConfig(max_host_bytes=1 << 20)) as ckpt:

        def interrupted(tensors):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine_of(ckpt)._stager._devices, "synchronize", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(1, state)
        with pytest.raises(SaveError, match="interrupted"):
            ckpt.save(2, state)
        assert ckpt.save(3, state).result(timeout_s=60).step == 3
    assert not (tmp_path / "step-00000001").exists()
