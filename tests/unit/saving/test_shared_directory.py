"""One directory, several savers: what one of them deletes, and what a resume moves, is its own and damaged alone."""

import pytest
import torch

import safe_ckpt
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Timeouts
from safe_ckpt.errors import NoValidCheckpointError

STATE = {"w": torch.arange(1000.0)}
ONE = CheckpointConfig(retention=Retention(keep_last=1))
IMPATIENT = CheckpointConfig(timeouts=Timeouts(barrier_s=1.0))  # half of that is how long a file is awaited


def by_checkpointer(folder, step, config):
    with Checkpointer(folder, config) as ckpt:
        ckpt.save(step, STATE).result(timeout_s=60)


def by_publishing(folder, step, config):
    with safe_ckpt.publishing(folder, step, config=config) as inside:
        torch.save(STATE, inside / "state.pt")


SAVERS = {"Checkpointer": by_checkpointer, "publishing": by_publishing}


@pytest.mark.parametrize(("first", "second"), [("Checkpointer", "publishing"), ("publishing", "Checkpointer")])
def test_a_rule_deletes_what_its_own_saver_saved_and_nothing_else(tmp_path, first, second):
    """``keep_last=1`` of the second keeps all that the first saved without a rule."""
    for step in (1, 2):
        SAVERS[first](tmp_path, step, CheckpointConfig())
    for step in (11, 12, 13):
        SAVERS[second](tmp_path, step, ONE)
    there = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert there == ["step-00000001", "step-00000002", "step-00000013"]


@pytest.mark.parametrize("what", ["its only file", "one of several"])
def test_what_is_not_whole_is_passed_over_and_stays_where_it_is(tmp_path, what):
    """A file is missing: it may come yet, or somebody moved it. What has wrong bytes is moved into quarantine; a gap is not."""
    state = {"a": torch.arange(1000.0), "b": torch.nn.Linear(30, 30)}
    with Checkpointer(tmp_path, IMPATIENT) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).result(timeout_s=60)
    newest = tmp_path / "step-00000002"
    files = sorted(path for path in newest.iterdir() if path.name != "manifest.json")
    for file in files if what == "its only file" else files[:1]:
        file.unlink()
    with Checkpointer(tmp_path, IMPATIENT) as ckpt:
        assert ckpt.resume(state).step == 1
    assert newest.is_dir()
    assert not any((tmp_path / ".safe_ckpt" / "quarantine").glob("*"))
    for file in (tmp_path / "step-00000001").iterdir():
        if file.name != "manifest.json":
            file.unlink()
    with Checkpointer(tmp_path, IMPATIENT) as ckpt, pytest.raises(NoValidCheckpointError):
        ckpt.resume(state)
    assert newest.is_dir()
