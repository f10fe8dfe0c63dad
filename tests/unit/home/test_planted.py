"""What somebody who may write to the hidden folder has put there: nothing outside is read, written, moved or waited for."""

import os

import pytest
import torch

from kit.inside import lock_in
from safe_ckpt import Checkpointer
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.home.lease import Lease, fate_of_process, own_lease
from safe_ckpt.errors import DirectoryInUseError

NAMES = ("events.jsonl", "events.jsonl.1", "lock", "lock.seen", "lock.alive", "lock.x")
FOLDERS = ("pending/op", "trash/op", "quarantine/.moving-x", "quarantine/x", "staging/x", "kept/x", "names/x", "starts")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "directory"])
def test_a_job_touches_nothing_behind_links_planted_in_its_hidden_folder(tmp_path, kind):
    """Links, second names, pipes and folders in every place of the hidden folder."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    (victim / "step-00000009").mkdir(parents=True)
    (victim / "step-00000009/data").write_text("precious")
    (victim / "file").write_text("precious")
    state = {"w": {"t": torch.ones(3)}}
    with Checkpointer(run) as ckpt:
        ckpt.save(1, state).result(timeout_s=20)
    hidden = run / HIDDEN
    for name in NAMES:
        (hidden / name).unlink(missing_ok=True)
        if kind == "link":
            os.symlink(victim / "file", hidden / name)
        elif kind == "hard link":
            os.link(victim / "file", hidden / name)
        elif kind == "pipe":
            os.mkfifo(hidden / name)
        else:
            (hidden / name).mkdir()
    for name in FOLDERS if kind == "link" else ():
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(victim, hidden / name)
    if kind == "link":
        (hidden / "trash/op").unlink()
        os.symlink(victim, hidden / "trash/op")
    before = contents(victim)
    with Checkpointer(run) as ckpt:
        assert ckpt.resume(state).step == 1
        ckpt.save(2, state).result(timeout_s=20)
    with Checkpointer(run) as ckpt:
        assert ckpt.resume(state).step == 2
    assert contents(victim) == before


def test_a_pipe_in_the_place_of_the_seen_record_is_not_waited_for(tmp_path):
    """A waiting job keeps there when it first saw the lock."""
    os.mkfifo(tmp_path / "lock.seen")
    facts = {"token": "x", "host": "elsewhere", "pid": 1, "started_at": "2020-01-01", "kernel": "k", "namespace": 1}
    (tmp_path / "lock").write_bytes(Lease(**facts, process_start=1, lease_s=60.0).to_bytes())
    with pytest.raises(DirectoryInUseError):
        lock_in(tmp_path, lease_s=6.0).acquire(0.0)


def test_a_holder_that_cannot_be_looked_at_is_not_dead(monkeypatch):
    """Without descriptors, say, nothing is known of it."""
    lease = own_lease(token="x", started_at="2026-01-01", lease_s=60.0)
    assert fate_of_process(lease) == "alive"

    def refuse(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("safe_ckpt.core.home.lease.process_start", refuse)
    assert fate_of_process(lease) == "unknown"
