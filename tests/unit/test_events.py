"""What is told of saves: everything that happened, when it happened, and how long it took."""

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.inside import copy_after
from kit.limits import QUICK
from kit.patience import wait_until
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Telemetry, WriterConfig
from safe_ckpt.errors import ConfigError, DirectoryError, RendezvousTimeout
from safe_ckpt.events import (
    Agreed,
    Committed,
    Failed,
    Removed,
    Respawned,
    Retained,
    Snapshotted,
    Written,
)
from support import writers_of


def config(**more):
    return CheckpointConfig(timeouts=QUICK, **more)


def occupied(folder):
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_save_tells_its_whole_story(tmp_path):
    """Agreed, copied, written, committed, retained, in this order; moments and durations fit together and to the disk."""
    seen = []
    state = {"w": {"t": torch.zeros(100_000)}, "n": 1}
    with Checkpointer(tmp_path, config(retention=Retention(keep_last=1)), hooks=[seen.append]) as ckpt:
        ckpt.save(1, state).result(timeout_s=20)
        freed = occupied(tmp_path / "step-00000001")
        seen.clear()
        called = time.time()
        ckpt.save(2, state).result(timeout_s=20)
        ckpt.wait()
    ended = time.time()
    assert [type(event) for event in seen] == [Agreed, Snapshotted, Written, Committed, Removed, Retained]
    agreed, snapshotted, written, committed, removed, retained = seen
    moments = [event.at for event in seen]
    assert moments == sorted(moments)
    assert called <= moments[0]
    assert moments[-1] <= ended
    assert 0 < agreed.seconds < snapshotted.stall_s < committed.seconds < ended - called
    assert {event.name for event in seen[:4]} == {"step-00000002"}
    assert snapshotted.mode == "eager"
    assert committed.at - committed.seconds == pytest.approx(snapshotted.at - snapshotted.stall_s, abs=0.01)
    files = [file for file in (tmp_path / "step-00000002").iterdir() if file.name != "manifest.json"]
    assert written.size_bytes == committed.size_bytes == sum(file.stat().st_size for file in files)
    assert not committed.weights_only
    assert retained.kept == ("step-00000002",)
    assert retained.removed == (removed.path,) == (str(tmp_path / "step-00000001"),)
    assert retained.freed_bytes == freed


def test_without_a_rule_nothing_is_retained(tmp_path):
    """A list of all checkpoints after every save would grow for ever."""
    seen = []
    with Checkpointer(tmp_path, config(), hooks=[seen.append]) as ckpt:
        ckpt.save(1, {"a": 1}).result(timeout_s=20)
    assert [event.kind for event in seen] == ["agreed", "snapshotted", "written", "committed"]


@pytest.mark.parametrize("mode", ["overlapped", "streamed"])
def test_the_event_of_a_snapshot_tells_how_the_copy_was_taken(tmp_path, monkeypatch, mode):
    """Overlapped with training, or not at all where memory is short: then the caller waited for the disk."""
    seen, returned = [], threading.Event()
    copy_after(monkeypatch, returned)
    settings = {"overlapped": config(snapshot="overlapped"), "streamed": config(max_host_bytes=1 << 20)}[mode]
    model = torch.nn.Linear(1000, 600)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with Checkpointer(tmp_path, settings, hooks=[seen.append]) as ckpt:
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        returned_at = time.time()
        returned.set()
        handle.result(timeout_s=20)
        ckpt.wait()
    snapshotted, written = seen[1:3]
    assert isinstance(snapshotted, Snapshotted)
    assert (snapshotted.mode, snapshotted.size_bytes) == (mode, written.size_bytes)
    assert (written.at <= returned_at) == (mode == "streamed")
    if mode == "streamed":
        assert snapshotted.stall_s >= written.seconds


def test_events_tell_an_export_from_a_checkpoint(tmp_path):
    """An export is no checkpoint that training can go on from."""
    seen = []
    with Checkpointer(tmp_path / "runs", config(), hooks=[seen.append]) as ckpt:
        ckpt.export(torch.nn.Linear(4, 4), tmp_path / "weights", format="safetensors").result(timeout_s=20)
    assert [event.weights_only for event in seen if isinstance(event, Committed)] == [True]


def test_the_event_of_a_failure_has_phase_and_seconds(tmp_path):
    """The phase and the seconds; the next save is told as usual."""
    seen = []
    pending = tmp_path / ".safe_ckpt/pending"
    with Checkpointer(tmp_path, config(), hooks=[seen.append]) as ckpt:
        shutil.rmtree(pending)
        pending.touch()
        with pytest.raises(DirectoryError):
            ckpt.save(1, {"a": 1}).result(timeout_s=20)
        pending.unlink()
        ckpt.save(2, {"a": 1}).result(timeout_s=20)
    failed = next(event for event in seen if isinstance(event, Failed))
    assert str(pending) in failed.error
    assert "saving step-00000001" in failed.phase
    assert failed.seconds > 0
    assert failed.missing == ()
    assert isinstance(seen[-1], Committed)


def test_a_writer_that_died_is_told_with_the_checkpoint_it_was_for(tmp_path):
    """So that a report can say which save was slow for that reason."""
    seen = []
    with Checkpointer(tmp_path, config(writer=WriterConfig(inline_bytes=0)), hooks=[seen.append]) as ckpt:
        ckpt.save(1, {"a": 1}).result(timeout_s=20)
        (writer,) = writers_of(os.getpid())
        os.kill(writer, signal.SIGKILL)
        ckpt.save(2, {"a": 1}).result(timeout_s=20)
    assert [(event.pid, event.name) for event in seen if isinstance(event, Respawned)] == [(writer, "step-00000002")]


def _alone(rank, path):
    bad = Telemetry(prometheus_textfile=str(path / "nowhere/x.prom"))
    with pytest.raises(ConfigError, match="nowhere"):
        Checkpointer(path / "a", config(telemetry=bad))
    seen = []
    waits = CheckpointConfig(timeouts=replace(QUICK, barrier_s=1))
    ckpt = Checkpointer(path / "b", waits, hooks=[seen.append])
    if rank == 0:
        with pytest.raises(RendezvousTimeout):
            ckpt.save(7, {"a": 1})
        (path / "done").touch()
    else:
        wait_until((path / "done").exists, 30)
    ckpt.close()
    return [(event.name, event.step, event.missing, event.seconds >= 1) for event in seen if event.kind == "failed"]


def test_a_save_that_a_rank_missed_names_it(tmp_path):
    """Also where the ranks could not even agree; and a hook that cannot work is an error on every rank, none waits."""
    outcomes = values(spawn_ranks(_alone, 2, Path(tmp_path)))
    assert outcomes == [[("step-00000007", 7, (1,), True)], []]
