"""A file called ``latest`` may be anybody's: only where DeepSpeed's tags lie does it decide anything."""

import copy
import os
import pickle

import pytest
import torch
from typer.testing import CliRunner

from safe_ckpt import Checkpointer
from safe_ckpt.adapters.patch import Patch
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.errors import RestoreError
from safe_ckpt.layouts.top_level import read_layout
from safe_ckpt.tools.cli.app import app


def save(folder, *steps):
    with Checkpointer(folder) as ckpt:
        for step in steps:
            ckpt.save(step, {"x": step}).result(timeout_s=30)


def names(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_gc_never_reaches_into_another_directory(tmp_path):
    """What lies below has an owner of its own: gc deletes nothing there, and keeps its own newest, whatever ``latest`` says."""
    save(tmp_path, 1, 2)
    save(tmp_path / "below", 1, 2, 3)
    (tmp_path / "latest").write_text("below/step-00000003")
    assert run("gc", tmp_path, "--keep-last", "1").exit_code == 0
    assert names(tmp_path / "below") == ["step-00000001", "step-00000002", "step-00000003"]
    assert names(tmp_path) == ["step-00000002"]


def test_gc_keeps_the_newest_beside_tags_below(tmp_path):
    """The same where what lies below are tags of DeepSpeed."""
    save(tmp_path, 1, 2)
    tag = tmp_path / "warmup/global_step10"
    tag.mkdir(parents=True)
    torch.save({}, tag / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("warmup/global_step10")
    assert run("gc", tmp_path, "--keep-last", "1").exit_code == 0
    assert (names(tmp_path), tag.exists()) == (["step-00000002"], True)


def test_a_checkpoint_of_ours_is_not_chosen_by_a_foreign_file(tmp_path):
    """The order of commits decides, whatever a file of the user's says."""
    save(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("step-00000001")
    assert run("resume-path", tmp_path).stdout.strip().endswith("step-00000002")


@pytest.mark.timeout(60)
def test_a_pipe_called_latest_is_not_waited_for(tmp_path):
    """A pipe, and a link that leads to itself, are no file of DeepSpeed's."""
    save(tmp_path, 1)
    os.mkfifo(tmp_path / "latest")
    assert "step-00000001" in run("list", tmp_path).stdout
    os.unlink(tmp_path / "latest")
    os.symlink("latest", tmp_path / "latest")
    assert run("list", tmp_path).exit_code == 0


@pytest.mark.parametrize("old", [False, True])
def test_a_large_pickle_is_looked_into(tmp_path, old):
    """A replay buffer of millions of numbers within a stock checkpoint hides neither its step nor that it is complete."""
    state = {"global_step": 9, "loops": {}, "lr_schedulers": [], "state_dict": {}, "buffer": [True] * 4_500_000}
    torch.save(state, tmp_path / "a.ckpt", _use_new_zipfile_serialization=not old)
    seen = read_layout(tmp_path / "a.ckpt")
    assert (seen.step, seen.problem) == (9, "")


class Owner:
    def act(self):
        return "own"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copied_patch_gives_back_what_was_there(again):
    """An object and its patch that are copied together: the copy gets its own method back."""
    owner = Owner()
    made = again((owner, Patch(owner, {"act": str})))
    made[1].give_back()
    assert made[0].act() == "own"


def test_what_earlier_versions_left_is_swept(tmp_path):
    """Half saves and kept copies under their former names are gone after the next start."""
    for name in ("staging/op1", "kept/op0/dest"):
        (tmp_path / ".safe_ckpt" / name).mkdir(parents=True)
        (tmp_path / ".safe_ckpt" / name / "f.bin").write_bytes(b"x")
    home = FileHome(tmp_path, lease_s=60)
    home.open()
    home.close()
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_not_its_own_cause(tmp_path):
    """Who follows the causes of an error comes to an end."""
    save(tmp_path, 1)
    with Checkpointer(tmp_path) as ckpt, pytest.raises(RestoreError) as caught:
        ckpt.resume({"y": 0})
    assert caught.value.__cause__ is not caught.value
