"""What the commands say where a path means something else than they expect, and how their lines look."""

import os
import re

import pytest
import torch
from typer.testing import CliRunner

from safe_ckpt import Checkpointer
from safe_ckpt.tools.cli.app import app


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with Checkpointer(folder / "a") as ckpt:
        ckpt.save(1, {"model": {"w": torch.ones(4), "x" * 180: torch.ones(2)}})
        ckpt.save(2, {"model": {"w": torch.tensor([float("nan")])}})
    with Checkpointer(folder / "b") as ckpt:
        ckpt.save(1, {"n": 1})
    return folder


def said(*arguments, code=0):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_a_checkpoint_that_is_named_is_listed_alone(runs):
    """``list`` and ``resume-path`` of one checkpoint show that one, and do not say that a job would start afresh."""
    one = runs / "a/step-00000001"
    lines = said("list", one).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("step-00000001")
    assert str(one) in said("resume-path", one)


def test_a_directory_of_runs_names_them(runs):
    """``resume-path`` of what holds several runs names them, as ``list`` does."""
    for command, code in (("list", 0), ("resume-path", 1)):
        assert "each is a run of its own: a, b. Name one" in said(command, runs, code=code)


def test_an_unhealthy_one_is_called_so_with_the_two_ways_on(runs):
    """What is passed over for its numbers is unhealthy; it may be named, or its numbers be left out."""
    told = said("resume-path", runs / "a")
    assert "it is unhealthy: model.safetensors: w has 1 NaN" in told
    assert "name it (step=..., or its path); health.ignore leaves numbers out" in told


def test_convert_says_what_is_missing_and_makes_no_folder_that_looks_like_a_file(runs, tmp_path):
    """Without a format in the ending the option is asked for; ``y.safetensors`` would be a directory."""
    one = runs / "a/step-00000001"
    assert "--to: is missing: the ending of 'out' does not say the format" in said(
        "convert", one, tmp_path / "out", code=2
    )
    file = tmp_path / "y.safetensors"
    told = said("convert", one, file, "--to", "safetensors", code=2)
    assert "'y.safetensors' would be a directory, in which model.safetensors lies. Name it so, such as 'y'" in told
    assert os.listdir(tmp_path) == []


def test_a_long_name_does_not_push_the_columns_away(runs):
    """A name of 180 characters stands out of its column; the other lines stay narrow."""
    short, long = (
        line
        for line in said("inspect", runs / "a/step-00000001").splitlines()
        if line.startswith("model:") and "[" in line
    )
    assert len(short) < 60
    assert len(long) > 180


def test_counts_and_ages_are_words(runs):
    """One file is "1 file", and an age is written as in a report."""
    assert "(safetensors file, 1 file, " in said("verify", runs / "a/step-00000001/model.safetensors", code=3)
    assert re.search(r"  (a moment|[0-9]+ seconds?|[0-9]+ minutes?)  ", said("list", runs / "b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_what_may_not_be_looked_at_is_not_said_to_be_missing(tmp_path):
    """Without the permission to look, a path is not said not to exist."""
    (tmp_path / "closed").mkdir(mode=0)
    assert "cannot be looked at: Permission denied" in said("list", tmp_path / "closed/run", code=2)
