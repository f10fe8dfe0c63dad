"""What a run's directory is, looked at from outside: the same for every command, whichever adapter saves there."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from kit import warm
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.listing import read_listing
from support import flip_bit, program_path

STATE = {"w": {"t": torch.arange(2000.0)}}


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)))


def make(folder, *steps):
    with Checkpointer(folder) as ckpt:
        for step in steps:
            ckpt.save(step, STATE, metrics={"loss": step}).result(timeout_s=20)
    return folder


def layout(kind, folder):
    """Two checkpoints, as each adapter lays its directory out; the directory that a user would name comes first."""
    made = make(folder / "made", 1, 2)
    home = folder / "home"
    if kind == "plain":
        made.rename(home)
        return [home]
    below = home / "checkpoints" if kind == "accelerate" else home
    below.mkdir(parents=True)
    for number, step in enumerate(("step-00000001", "step-00000002")):
        name = f"checkpoint_{number}" if kind == "accelerate" else f"checkpoint-{number + 1}"
        (made / step).rename(below / name)
    (made / ".safe_ckpt").rename(home / ("_safe_ckpt" if kind == "transformers" else ".safe_ckpt"))
    return [home, below] if kind == "accelerate" else [home]


@pytest.mark.parametrize("kind", ["plain", "accelerate", "transformers"])
def test_every_command_finds_the_same_checkpoints(tmp_path, kind):
    """A flipped bit in the newest: list shows both, verify finds it, resume-path takes the other one."""
    homes = layout(kind, tmp_path)
    newest = read_listing(homes[0]).standing.usable[0].path
    flip_bit(newest / "w.safetensors", 5000)
    for home in homes:
        assert len(json.loads(run("list", home, "--json").stdout)) == 2
        verified = run("verify", home)
        assert verified.exit_code == 1
        assert f"damaged     {newest}" in verified.stdout
        done = run("resume-path", home)
        assert (done.exit_code, done.stdout) == (0, f"{read_listing(homes[0]).standing.usable[1].path}\n")


def test_a_folder_called_checkpoints_hides_nothing(tmp_path):
    """It is taken for Accelerate's only where nothing else is kept."""
    make(tmp_path, 1)
    (tmp_path / "checkpoints").mkdir()
    assert [candidate.path.name for candidate in read_listing(tmp_path).standing.usable] == ["step-00000001"]


def test_gc_does_not_count_what_is_damaged(tmp_path):
    """keep_last=1 with a damaged newest keeps the newest that is whole; a dry run says the same."""
    make(tmp_path, 1, 2, 3)
    flip_bit(tmp_path / "step-00000003/w.safetensors", 5000)
    for extra in (["--dry-run"], []):
        done = run("gc", tmp_path, "--keep-last", 1, "--json", *extra)
        assert done.exit_code == 0
        said = json.loads(done.stdout)
        assert [row["step"] for row in said["checkpoints"]] == [1]
        assert said["damaged"] == [str(tmp_path / "step-00000003")]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    assert run("resume-path", tmp_path).stdout == f"{tmp_path / 'step-00000002'}\n"


def test_files_converted_into_a_runs_directory_are_no_checkpoint_of_it(tmp_path):
    """Neither listed, nor resumed from, nor deleted by retention or gc; a copy under a name of one's own stays too."""
    make(tmp_path, 10)
    for name, form in (("export", "dcp"), ("weights.ckpt", "torch"), ("hf", "safetensors")):
        assert run("convert", tmp_path / "step-00000010", tmp_path / name, "--to", form, "--item", "w").exit_code == 0
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "backup-of-10")
    assert {row["name"] for row in json.loads(run("list", tmp_path, "--json").stdout)} <= {
        "step-00000010",
        "backup-of-10",
    }
    with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
        for step in (20, 30):
            ckpt.save(step, STATE).result(timeout_s=20)
    assert run("gc", tmp_path, "--keep-last", 1).exit_code == 0
    left = {path.name for path in tmp_path.iterdir()} - {".safe_ckpt"}
    assert left == {"step-00000030", "export", "weights.ckpt", "hf", "backup-of-10"}


def test_a_checkpoint_that_cannot_be_read_hides_no_other(tmp_path):
    """A newer format: list shows the rest and ends with 1, gc deletes nothing, resume-path says that a resume stops there."""
    make(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003/manifest.json").write_text('{"format": "safe_ckpt", "format_version": 99}')
    manifest = tmp_path / "step-00000002/manifest.json"
    manifest.unlink()
    manifest.mkdir()
    listed = run("list", tmp_path, "--json")
    states = {row["name"]: row["state"] for row in json.loads(listed.stdout)}
    assert listed.exit_code == 1
    assert states["step-00000001"] == "valid"
    assert "valid" not in (states["step-00000002"], states["step-00000003"])
    assert run("gc", tmp_path, "--keep-last", 1).exit_code == 1
    assert run("resume-path", tmp_path).exit_code == 1
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_a_checkpoint_deleted_while_it_is_read_is_not_called_damaged(tmp_path):
    """As a live job's retention does it."""
    place = make(tmp_path, 1) / "step-00000001"
    task = plan_tasks(place)
    place.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="deleted meanwhile"):
        verify_tasks([task])


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_json_has_null_for_a_metric_that_is_nan(tmp_path, command):
    """A metric that is NaN."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE, metrics={"loss": float("nan")}).result(timeout_s=20)
    path = tmp_path if command == "list" else tmp_path / "step-00000001"
    json.loads(run(command, path, "--json").stdout, parse_constant=pytest.fail)


def test_inspect_wants_one_checkpoint(tmp_path):
    """A directory of several: their names; one whose manifest is damaged: status 1."""
    make(tmp_path, 1, 2)
    done = run("inspect", tmp_path)
    assert done.exit_code == 1
    assert "name one of them: step-00000002, step-00000001" in done.output
    flip_bit(tmp_path / "step-00000001/manifest.json", 200)
    assert run("inspect", tmp_path / "step-00000001").exit_code == 1


def test_an_empty_directory_is_not_called_damaged(tmp_path):
    """There is no checkpoint in it: status 1, and that sentence."""
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    assert "there is no checkpoint in it" in done.output
    assert "damaged" not in done.output


def test_linked_folders_count_as_checkpoints(tmp_path):
    """As jobs on scratch disks lay them out; a circle of links ends."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    torch.save({"a": 1}, elsewhere / "model.pt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/weights").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(tmp_path / "run")
    assert catalog.looks_like_checkpoint(tmp_path / "run")
    (elsewhere / "model.pt").unlink()
    assert not catalog.looks_like_checkpoint(tmp_path / "run")


def test_a_manifest_above_what_is_read_is_refused_before_the_commit(tmp_path, monkeypatch):
    """What no resume would read must not take the place of what it does."""
    make(tmp_path, 1)
    monkeypatch.setattr("safe_ckpt.core.formats.manifest._MOST_FILES", 1)
    config = CheckpointConfig(retention=Retention(keep_last=1))
    with Checkpointer(tmp_path, config) as ckpt, pytest.raises(Exception, match="names 2 files, more than any"):
        ckpt.save(2, {"a": STATE["w"], "b": STATE["w"]}).result(timeout_s=20)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_ctrl_c_ends_a_verification(tmp_path):
    """64 GiB without a byte on the disk: it ends within seconds of the signal, with a status that is not 0."""
    file = tmp_path / "sparse"
    file.touch()
    os.truncate(file, 64 << 30)
    command = [sys.executable, str(program_path("reads_until_ctrl_c")), str(file)]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "reading\n"
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
    assert job.returncode == 130


def test_damaged_checkpoints_beside_a_converted_one_are_an_error(tmp_path):
    """A directory whose checkpoints are all damaged, beside a converted one: no resume invents a start."""
    make(tmp_path, 1)
    run("convert", tmp_path / "step-00000001", tmp_path / "export", "--to", "dcp")
    flip_bit(tmp_path / "step-00000001/w.safetensors", 5000)
    with Checkpointer(tmp_path) as ckpt, pytest.raises(NoValidCheckpointError):
        ckpt.resume({"w": {"t": torch.zeros(2000)}})
