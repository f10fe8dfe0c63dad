"""Checkpoints that were saved by an earlier commit, by each way to save: today's code lists, verifies and resumes them.

They lie in ``tests/corpus/checkpoints``; ``tests/corpus/make.py`` says by which commit, and how. What a resume has to find
follows from formulas in ``tests/corpus``.
"""

import json
import shutil

import pytest
from typer.testing import CliRunner

from corpus import plain
from corpus.make import CHECKPOINTS
from safe_ckpt.cli.app import app
from safe_ckpt.testing import spawn_ranks, values

BOTH = [(2, "valid"), (1, "valid")]
HELD = {
    "plain_one_rank": BOTH,
    "plain_frozen": BOTH,
    "plain_marked": [(2, "unhealthy"), (1, "valid")],
    "plain_ranks": BOTH,
    "plain_sharded": BOTH,
}


@pytest.fixture
def saved(tmp_path):
    """A copy of all of them."""
    return shutil.copytree(CHECKPOINTS, tmp_path / "checkpoints")


def rows(command, folder):
    done = CliRunner().invoke(app, [command, str(folder), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_they_are_listed_and_valid(saved, name):
    """Each with its step; what is marked is so because of its numbers, and its bytes are those that were written."""
    assert [(row["step"], row["state"]) for row in rows("list", saved / name)] == HELD[name]
    assert [row["state"] for row in rows("verify", saved / name)] == ["valid"] * len(HELD[name])


@pytest.mark.parametrize("name", plain.ONE_RANK)
def test_checkpointer_resumes_them(saved, name):
    """Weights, optimizer, data, generators and what belongs to the rank; the marked one is passed over."""
    plain.ONE_RANK[name][1](saved / name)


def test_one_rank_resumes_what_two_have_sharded(saved):
    """The parts of both are put together."""
    plain.resume_sharded_on_one_rank(saved / "plain_sharded")


def test_two_ranks_resume_theirs(saved):
    """Each finds what it had, and its part of what is sharded."""
    values(spawn_ranks(plain.resume_ranks, 2, saved))
