"""A checkpoint is no run, what was named and is not there is no fresh run, and no run that is held is deleted."""

import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import safe_ckpt
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, dcp, publishing
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.errors import (
    CheckpointNotFoundError,
    DirectoryError,
    NoValidCheckpointError,
)


def state(value=0.0):
    return {"t": torch.full((3,), value)}


@pytest.fixture
def run(tmp_path):
    """A directory with the checkpoints of steps 2 and 4."""
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (2, 4):
            ckpt.save(step, state(step)).result()
    return tmp_path / "run"


def published(folder):
    with publishing(folder, step=7) as inside:
        (inside / "file").write_bytes(b"x")


@pytest.mark.parametrize("below", ["", "deeper/run"])
@pytest.mark.parametrize("door", [Checkpointer, published])
def test_a_checkpoint_is_refused_as_a_directory_of_checkpoints(run, door, below):
    """By what it is, with the directory that it lies in, and before anything is written into it."""
    one = run / "step-00000002"
    before = sorted(one.rglob("*"))
    with pytest.raises(DirectoryError, match=f"the checkpoint|it is a checkpoint.*give the one that it lies in, {run}"):
        door(one / below)
    assert sorted(one.rglob("*")) == before


def test_a_run_may_lie_below_weights(tmp_path):
    """Weights that were written into the folder of a run are no checkpoint that would be deleted with the run."""
    with Checkpointer(tmp_path / "elsewhere") as ckpt:
        ckpt.export(state(), tmp_path / "out").result()
    with Checkpointer(tmp_path / "out" / "run") as ckpt:
        assert ckpt.save(1, state()).result().step == 1
    with Checkpointer(tmp_path / "out") as ckpt:
        assert ckpt.save(1, state()).result().step == 1


def _file(place):
    place.write_bytes(b"theirs")


def _link(place):
    (place.parent / "theirs").mkdir()
    place.symlink_to("theirs")


def _below(place):
    with Checkpointer(place / "deeper/run") as ckpt:
        ckpt.save(1, state()).result()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_file, "it is not a directory"),
        (_link, "it is not a directory"),
        (_below, "checkpoints are kept in it"),
        (lambda place: place.mkdir(), ""),
        (lambda place: None, ""),
    ],
    ids=["a file", "a link", "a run", "an empty folder", "nothing"],
)
def test_an_export_replaces_an_export_and_nothing_that_somebody_keeps(tmp_path, make, why):
    """The error says what is there, and that is left alone. An export that is exported again has the new weights."""
    place = tmp_path / "out"
    make(place)
    before = sorted(tmp_path.rglob("*"))
    with Checkpointer(tmp_path / "job") as ckpt:
        if why:
            with pytest.raises(DirectoryError, match=f"{why}, so it is not replaced"):
                ckpt.export(state(1.0), place)
        else:
            for value in (1.0, 2.0):
                ckpt.export(state(value), place).result()
    if why:
        assert [path for path in sorted(tmp_path.rglob("*")) if "job" not in path.parts] == before
    else:
        assert load_file(place / "model.safetensors")["t"].tolist() == [2.0] * 3


def test_retention_leaves_a_checkpoint_in_which_a_job_saves(tmp_path, caplog):
    """What a live job holds below a checkpoint, at whatever depth, keeps the checkpoint until that job has ended."""
    config = CheckpointConfig(retention=Retention(keep_last=1))
    with Checkpointer(tmp_path, config) as ckpt:
        ckpt.save(1, state()).result()
        inner = FileHome(tmp_path / "step-00000001" / "a" / "run", lease_s=10.0)
        inner.open()
        for step in (2, 3):
            ckpt.save(step, state()).result()
        ckpt.wait()
        assert sorted(one.name for one in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
        said = [one for one in caplog.messages if "step-00000001 is not deleted" in one]
        assert len(said) == 1
        assert f"process {os.getpid()}" in said[0]
        inner.close()
        ckpt.save(4, state()).result()
    assert [one.name for one in tmp_path.glob("step-*")] == ["step-00000004"]


def resumed(run):
    with Checkpointer(run) as ckpt:
        ckpt.resume(state(), step=77)


@pytest.mark.parametrize(
    "ask",
    [
        resumed,
        lambda run: safe_ckpt.load(run, state(), step=77),
        lambda run: safe_ckpt.load(run / "step-00000077", state()),
        lambda run: safe_ckpt.newest(run / "step-00000077"),
        lambda run: dcp.load(state(), checkpoint_id=run / "step-00000077"),
    ],
)
def test_a_checkpoint_that_was_named_and_is_not_there_is_no_fresh_run(run, ask):
    """An error of its own, which no program takes for a fresh run, and which says what is there."""
    with pytest.raises(
        CheckpointNotFoundError, match=r"step-00000077: there is no such checkpoint.*step-00000004"
    ) as caught:
        ask(run)
    assert not isinstance(caught.value, NoValidCheckpointError)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_name_in_a_run_that_has_saved_nothing_yet_is_none_of_a_run(tmp_path):
    """A job holds the directory, so its checkpoint is named, and that is not there."""
    with Checkpointer(tmp_path), pytest.raises(CheckpointNotFoundError, match="beside it there are none"):
        safe_ckpt.newest(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    "ask",
    [lambda run: safe_ckpt.load(run, state()), lambda run: dcp.load(state(), checkpoint_id=run / "latest")],
)
def test_a_run_that_is_not_there_is_a_fresh_one(tmp_path, ask, monkeypatch):
    """Also under a relative path; its absolute path is in the message."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoValidCheckpointError, match=str(tmp_path / "new")) as caught:
        ask(Path("new"))
    assert not caught.value.rejected


def test_a_fresh_start_logs_the_absolute_path(tmp_path, caplog, monkeypatch):
    """A mistyped path is seen in the log, where ``resume`` and ``newest`` return None."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    with Checkpointer("new") as ckpt:
        assert ckpt.resume(state()) is None
    assert f"{tmp_path / 'new'}: there is no checkpoint, so this starts afresh" in caplog.messages
    assert safe_ckpt.newest("other") is None
    assert f"{tmp_path / 'other'}: there is no checkpoint" in caplog.messages


def test_a_home_directory_is_meant_by_its_sign(tmp_path, monkeypatch):
    """``~`` is what a shell takes it for, in every call that takes a path."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with Checkpointer("~/run") as ckpt:
        ckpt.save(1, state(5.0)).result()
        ckpt.export(state(), "~/weights").result()
    published("~/published")
    dcp.save(state(), checkpoint_id="~/dcp/step-1")
    target = state()
    safe_ckpt.load("~/run", target)
    assert target["t"].tolist() == [5.0] * 3
    dcp.load(state(), checkpoint_id="~/dcp")
    assert safe_ckpt.newest("~/published").step == 7
    assert sorted(one.name for one in (tmp_path / "home").iterdir()) == [
        "dcp",
        "published",
        "run",
        "weights",
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["home"]


def test_bad_numbers_alone_say_how_to_go_on(tmp_path):
    """Where each checkpoint has bad numbers, the error says so in words, how one is named, and what is set for a mask."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(float("nan"))).result()
        with pytest.raises(NoValidCheckpointError) as caught:
            ckpt.resume(state())
        assert "it is unhealthy: t.safetensors" in str(caught.value)
        assert "name it: resume(state, step=...)" in str(caught.value)
        assert "health.ignore" in str(caught.value)
        assert ckpt.resume(state(), step=1).step == 1


class Cell(torch.nn.Module):
    """As state-space models have it: a module called ``state``, with a mask and a weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.weight = torch.nn.Parameter(torch.ones(3))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.state = torch.nn.Sequential(Cell())
        self.rssm = torch.nn.ModuleDict({"state": Cell()})


@pytest.mark.parametrize("how", ["module", "state dict", "archive"])
def test_a_module_called_state_is_no_optimizer(tmp_path, how):
    """Its mask may be infinite, and its trained weight may not; an optimizer's own state may not either."""
    model = Recurrent()
    items = {
        "module": {"model": model},
        "state dict": {"model": model.state_dict()},
        "archive": {"all": {"model": model.state_dict(), "epoch": 1, "kept": {1: 2}}},
    }[how]
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    with Checkpointer(tmp_path) as ckpt:
        assert not ckpt.save(1, {**items, "optimizer": optimizer}).result().marked
        next(iter(optimizer.state.values()))["exp_avg"][0] = torch.inf
        assert ckpt.save(2, {**items, "optimizer": optimizer}).result().marked
