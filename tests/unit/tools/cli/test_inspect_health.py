"""``safe-ckpt`` on checkpoints whose numbers are bad."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from safe_ckpt import Checkpointer
from safe_ckpt.tools.cli.app import app


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.output


@pytest.fixture
def directory(tmp_path):
    state = {"t": {"w": torch.ones(4)}}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
        state["t"]["w"][2] = math.nan
        ckpt.save(2, state).result()
    return tmp_path


def test_a_marked_checkpoint_is_listed_as_it_is(directory):
    """And is not what a resume would take."""
    _, rows = run("list", directory, "--json")
    assert [(row["step"], row["state"]) for row in json.loads(rows)] == [(2, "unhealthy"), (1, "valid")]
    code, told = run("resume-path", directory)
    assert code == 0
    assert told.splitlines()[-1] == str(directory / "step-00000001")
    assert "it is unhealthy: t.safetensors: w has 1 NaN among 4 numbers" in told


def test_inspect_shows_the_worst_tensors(directory):
    """As a table and as JSON; of what was never looked at it says so."""
    code, table = run("inspect", directory / "step-00000002", "--health")
    assert code == 0
    assert ["w", "4", "1", "0"] in [line.split() for line in table.splitlines()]
    _, plain = run("inspect", directory / "step-00000002", "--health", "--json")
    assert json.loads(plain)["files"]["t.safetensors"]["sick_tensors"] == 1
