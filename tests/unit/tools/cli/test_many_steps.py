"""More commits than any list of the last ones has room for, with steps whose text does not sort as their numbers do."""

import json

import pytest
import torch
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.tools.cli.app import app

COUNT = 20


def said(*args):
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return done.stdout


def state(step=0):
    return {"w": {"t": torch.full((3,), float(step))}, "at": {"step": step}}


def listed(folder):
    return [row["step"] for row in json.loads(said("list", folder, "--json"))]


def resumed(folder):
    """The step that a new job goes on from, by the number in the state as well."""
    with Checkpointer(folder) as ckpt:
        there = state()
        info = ckpt.resume(there)
    assert there["at"]["step"] == info.step == there["w"]["t"][0]
    return info.step


def loss_of(step):
    """9.5, 10.5, 9.5, ...: as text the larger one is the smaller one. The last of all is the best."""
    return 9.5 + step % 2


@pytest.mark.parametrize("first", [1, 91, 99_999_990])
def test_what_stays_and_what_is_taken_follow_numbers(tmp_path, first):
    """Over 9, 10, 11 and the end of the digits of a name, for 20 commits of two jobs: retention, list, resume-path, gc and the
    resume go by the order of commits.
    """
    steps = list(range(first, first + COUNT))
    for part in (steps[: COUNT // 2], steps[COUNT // 2 :]):
        with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=12))) as ckpt:
            for step in part:
                ckpt.save(step, state(step)).result(timeout_s=30)
    by_commit = steps[::-1][:12]
    assert listed(tmp_path) == by_commit
    assert resumed(tmp_path) == steps[-1]
    assert said("resume-path", tmp_path).strip() == str(tmp_path / f"step-{steps[-1]:08d}")
    said("gc", tmp_path, "--keep-last", "3")
    assert listed(tmp_path) == by_commit[:3]
    assert resumed(tmp_path) == steps[-1]


@pytest.mark.parametrize("first", [1, 91, 99_999_990])
def test_what_is_saved_after_a_step_back_is_the_newest(tmp_path, first):
    """A job that goes back to an earlier step saves lower steps than those that lie there: the newest of its own stay, and are
    taken.
    """
    steps = list(range(first, first + COUNT))
    with Checkpointer(tmp_path) as ckpt:
        for step in steps:
            ckpt.save(step, state(step)).result(timeout_s=30)
    with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=2))) as ckpt:
        there = state()
        assert ckpt.resume(there, step=steps[7]).step == there["at"]["step"] == steps[7]
        for step in steps[8:11]:  # 9, 10 and 11, of which each lies there already
            ckpt.save(step, state(step)).result(timeout_s=30)
            assert listed(tmp_path)[0] == step
    assert listed(tmp_path)[:2] == [steps[10], steps[9]]
    assert resumed(tmp_path) == steps[10]


def test_the_best_are_chosen_by_number(tmp_path):
    """By the value of a metric, not by its text, and of equal ones the newest; failures of saves in between change nothing."""
    rules = Retention(keep_last=1, keep_best=3, metric="loss", mode="min")
    with Checkpointer(tmp_path, CheckpointConfig(retention=rules)) as ckpt:
        for step in range(1, COUNT + 1):
            ckpt.save(step, state(step), metrics={"loss": loss_of(step)}).result(timeout_s=30)
    kept = listed(tmp_path)
    assert [loss_of(step) for step in kept] == [9.5] * 3
    assert kept[0] == COUNT
