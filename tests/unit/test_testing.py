"""``safe_ckpt.testing``: saves within are over when they return, and nothing is started for them."""

import subprocess
import threading

import pytest
import torch

from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Unchanged, WriterConfig, publishing
from safe_ckpt.core.home.lease import Lease
from safe_ckpt.errors import DirectoryInUseError
from safe_ckpt.testing import inline_saves
from support import writer_processes

SIZE = 1_000_000  # 4 MB, more than a thread writes otherwise
PROCESS = CheckpointConfig(writer=WriterConfig(inline_bytes=0), retention=Retention(keep_last=1))


def state(value=1.0):
    return {"model": {"w": torch.full((SIZE,), value)}, "at": value}


@pytest.fixture
def no_process(monkeypatch):
    """What starts one raises."""

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize("snapshot", ["eager", "overlapped"])
def test_a_save_returns_when_it_is_committed_and_starts_no_process(tmp_path, no_process, snapshot):
    """Also a large one, and where each goes to the writer process otherwise: its name is there, and the old one is deleted."""
    config = CheckpointConfig(writer=PROCESS.writer, retention=PROCESS.retention, snapshot=snapshot)
    with inline_saves(), Checkpointer(tmp_path, config) as ckpt:
        for step in (1, 2, 3):
            assert ckpt.save(step, state(float(step))).done()
            assert [path.name for path in tmp_path.iterdir() if path.name != ".safe_ckpt"] == [f"step-0000000{step}"]
        found = state(0.0)
        assert ckpt.resume(found).step == 3
        assert found["model"]["w"].unique().tolist() == [3.0]
    assert writer_processes() == []


def test_outside_of_testing_a_process_writes(tmp_path):
    """Nothing stays switched when it is left; what was opened within stays as it was opened."""
    with inline_saves():
        within = Checkpointer(tmp_path / "within", PROCESS)
    with within, Checkpointer(tmp_path / "run", PROCESS) as ckpt:
        assert within.save(1, state()).done()
        ckpt.save(1, state()).result()
        assert len(writer_processes()) == 1


def test_testing_can_be_entered_within_itself_and_on_another_thread(tmp_path, no_process):
    """The outer one holds until it is left."""
    with inline_saves():
        thread = threading.Thread(target=inline_saves()(lambda: None))
        thread.start()
        thread.join()
        with inline_saves(), Checkpointer(tmp_path, PROCESS) as ckpt:
            ckpt.save(1, state())
        with Checkpointer(tmp_path, PROCESS) as ckpt:
            assert ckpt.save(2, state()).done()


def test_within_testing_copies_and_publications_start_no_process(tmp_path, no_process):
    """Files that another saver wrote, and files that are as they were."""
    with inline_saves():
        with publishing(tmp_path / "published", 1) as folder:
            torch.save(state(), folder / "all.pt")
        assert (tmp_path / "published/step-00000001/manifest.json").exists()
        with Checkpointer(tmp_path / "run", CheckpointConfig(unchanged=Unchanged(full_every=2))) as ckpt:
            for step in (1, 2, 3):
                assert ckpt.save(step, state()).done()


def test_a_failed_save_is_raised_where_it_always_is(tmp_path, monkeypatch):
    """``save`` returns the handle of the save that failed; its result raises, and so does the next call if nobody has asked."""
    with inline_saves(), Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr("safe_ckpt.core.writer.sink.write_file", _fail)
        handle = ckpt.save(1, state())
        assert handle.done()
        with pytest.raises(OSError, match="the disk is gone"):
            handle.result()
        ckpt.save(2, state())
        with pytest.raises(OSError, match="the disk is gone"):
            ckpt.save(3, state())


def _fail(*_, **__):
    raise OSError(5, "the disk is gone")


def test_a_holder_that_cannot_be_asked_is_not_waited_for(tmp_path):
    """The lock of a job on another host refuses at once, whatever its lease."""
    lease = Lease(
        token="ab",
        host="elsewhere",
        pid=1,
        started_at="2026-01-01T00:00:00+00:00",
        lease_s=3600.0,
        kernel="other",
        namespace=1,
        process_start=5,
    )
    (tmp_path / ".safe_ckpt").mkdir()
    (tmp_path / ".safe_ckpt/lock").write_bytes(lease.to_bytes())
    with inline_saves(), pytest.raises(DirectoryInUseError, match="elsewhere"):
        Checkpointer(tmp_path)


def _on_a_rank(rank, path):
    with inline_saves(), Checkpointer(path, PROCESS) as ckpt:
        handle = ckpt.save(1, state())
        return handle.done(), (path / "step-00000001/manifest.json").exists(), writer_processes()


def test_with_two_ranks_it_returns_when_both_are_committed(tmp_path):
    """On either rank the checkpoint has its name when ``save`` returns."""
    assert values(spawn_ranks(_on_a_rank, 2, tmp_path)) == [(True, True, [])] * 2
