"""``safe-ckpt gc``: what is deleted, and above all what is not."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from kit.manifests import checkpoint
from safe_ckpt import Checkpointer
from safe_ckpt.testing import inline_saves
from safe_ckpt.tools.cli.app import app
from support import flip_bit, run_program


def run(*args):
    return CliRunner().invoke(app, ["gc", *map(str, args)])


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.fixture
def folder(tmp_path):
    with Checkpointer(tmp_path / "d") as ckpt:
        for step, loss in [(10, 0.5), (20, 0.1), (30, 0.9), (40, 0.4)]:
            ckpt.save(step, {"w": {"t": torch.ones(10)}}, metrics={"loss": loss}).result(timeout_s=20)
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([], [10, 20, 30, 40]),
        (["--keep-last", "2"], [30, 40]),
        (["--keep-best", "1", "--metric", "loss"], [20, 40]),
        (["--keep-best", "1", "--metric", "loss", "--mode", "max"], [30, 40]),
        (["--keep-every-steps", "20"], [20, 40]),
        (["--keep-every-steps", "7"], [40]),
    ],
    ids=str,
)
def test_gc_keeps_what_any_rule_keeps_and_the_newest(folder, rules, left):
    """What any rule keeps stays, and the newest always; --dry-run says the same and deletes nothing."""
    before = {path.name for path in folder.iterdir()}
    said = run(folder, *rules, "--dry-run", "--json")
    would = json.loads(said.stdout)
    assert (said.exit_code, would["dry_run"], would["kept"]) == (0, True, len(left))
    assert {path.name for path in folder.iterdir()} == before
    assert [row["step"] for row in would["checkpoints"]] == [step for step in (10, 20, 30, 40) if step not in left]
    assert not any(row["deleted"] for row in would["checkpoints"])
    done = run(folder, *rules, "--json")
    assert done.exit_code == 0
    assert all(row["deleted"] for row in json.loads(done.stdout)["checkpoints"])
    assert steps(folder) == left


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        (["--keep-last", "2"], [20, 40]),
        (["--keep-best", "1", "--metric", "loss"], [20, 40]),
        (["--keep-every-steps", "30"], [40]),
    ],
    ids=str,
)
def test_unhealthy_ones_take_no_place_of_a_healthy_one_and_stay(tmp_path, rules, left):
    """By any rule, although they are newer, or have the best metric; and they are not deleted either."""
    with inline_saves(), Checkpointer(tmp_path) as ckpt:
        for step, loss, value in [
            (10, 5, 1),
            (20, 2, 1),
            (30, 1, math.nan),
            (40, 4, 1),
            (50, 3, math.nan),
            (60, 0, math.nan),
        ]:
            saved = ckpt.save(step, {"w": {"t": torch.full((4,), value)}}, metrics={"loss": loss}).result()
            assert saved.marked is math.isnan(value)
    done = run(tmp_path, *rules, "--json")
    assert done.exit_code == 0
    assert steps(tmp_path) == sorted([*left, 30, 50, 60])


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--json", "--keep-last", "1", "--no-verify"]], ids=str)
def test_gc_by_a_metric_that_none_has_deletes_nothing_and_names_those_there_are(folder, more):
    """A typo is wrong usage, whatever other rules there are: status 2, nothing on stdout."""
    done = run(folder, "--keep-best", "3", "--metric", "los", *more)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--metric: no checkpoint that counts has a finite number as metric 'los'" in done.stderr
    assert "(metrics there: loss). Correct the name" in done.stderr
    assert steps(folder) == [10, 20, 30, 40]


def test_gc_by_a_metric_that_only_a_damaged_one_has_deletes_nothing(folder, tmp_path):
    """A damaged checkpoint does not count. A directory without checkpoints is nothing to refuse."""
    with Checkpointer(folder) as ckpt:
        damaged = ckpt.save(50, {"w": {"t": torch.ones(10)}}, metrics={"acc": 1}).result(timeout_s=20).path
    flip_bit(damaged / "w.safetensors", 100)
    done = run(folder, "--keep-best", "1", "--metric", "acc")
    assert done.exit_code == 2
    assert "metric 'acc'" in done.stderr
    assert "damaged, and not counted: step-00000050" in done.stderr
    assert steps(folder) == [10, 20, 30, 40, 50]
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--keep-best", "1", "--metric", "acc").exit_code == 0


def test_gc_prints_a_line_per_checkpoint_and_the_sum(folder):
    """A line per checkpoint on stdout, the sum on stderr."""
    done = run(folder, "--keep-last", "3")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"deleted {folder / 'step-00000010'} ")
    assert done.stderr.startswith("3 kept; ")


def test_a_live_job_keeps_its_directory(folder):
    """Refused with its host and process, and everything left as it is; --dry-run may look."""
    with Checkpointer(folder):
        done = run(folder, "--keep-last", "1", "--quarantine")
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"process {os.getpid()} on host {os.uname().nodename}" in done.stderr
        assert steps(folder) == [10, 20, 30, 40]
        assert run(folder, "--keep-last", "1", "--dry-run").exit_code == 0
    assert run(folder, "--keep-last", "1").exit_code == 0


def test_gc_deletes_nothing_that_others_wrote(folder):
    """Stock checkpoints, damaged ones and anything else in the directory are not gc's to delete."""
    torch.save({"w": 1}, folder / "epoch=1-step=1.ckpt")
    (folder / "checkpoint-5").mkdir()
    torch.save({"w": 1}, folder / "checkpoint-5/pytorch_model.bin")
    (folder / "notes.txt").write_text("mine")
    (folder / "step-00000010/manifest.json").write_text("{")
    assert run(folder, "--keep-last", "1").exit_code == 0
    assert {path.name for path in folder.iterdir()} >= {
        "epoch=1-step=1.ckpt",
        "checkpoint-5",
        "notes.txt",
        "step-00000010",
    }
    assert steps(folder) == [10, 40]


def test_a_directory_of_another_tool_is_left_without_a_trace(tmp_path):
    """Nothing of ours in it: no lock is taken there, no folder made."""
    (tmp_path / "checkpoint-5").mkdir()
    torch.save({"w": 1}, tmp_path / "checkpoint-5/pytorch_model.bin")
    assert run(tmp_path, "--keep-last", "1", "--quarantine").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_gc_deletes_the_quarantine_only_when_asked_to(folder):
    """What a resume found damaged is kept for people until they say otherwise."""
    bad = folder / ".safe_ckpt/quarantine/step-00000005"
    bad.mkdir(parents=True)
    (bad / "x").write_text("evidence")
    assert run(folder, "--keep-last", "4").exit_code == 0
    assert bad.exists()
    assert run(folder, "--quarantine", "--dry-run").stdout.startswith(f"would delete {bad}")
    assert bad.exists()
    assert run(folder, "--quarantine").exit_code == 0
    assert not bad.exists()
    assert steps(folder) == [10, 20, 30, 40]


def test_leftovers_of_a_killed_job_are_swept(folder):
    """A job that was killed while it saved: its pending goes, its lock is taken over, what it committed stays."""
    done = run_program("killed_with_a_save_pending", str(folder))
    assert (done.returncode, (folder / ".safe_ckpt/pending/half").exists()) == (-9, True), done.stderr
    assert run(folder).exit_code == 0
    assert not (folder / ".safe_ckpt/pending/half").exists()
    assert steps(folder) == [10, 20, 30, 40]


@pytest.mark.parametrize("name", ["trash", "pending", "staging", "quarantine", ""])
def test_a_link_in_the_hidden_folder_is_not_followed(folder, tmp_path, name):
    """Somebody's .safe_ckpt/trash that leads to a home directory does not empty it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    hidden = folder / ".safe_ckpt"
    place = hidden / name if name else hidden
    if place.exists():
        place.rename(tmp_path / "aside")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(home)
    if not name:
        for inner in ("trash", "pending", "quarantine"):
            (home / inner).mkdir()
            (home / inner / "precious").write_text("x")
    before = sorted(path.relative_to(home) for path in home.rglob("*"))
    done = run(folder, "--keep-last", "1", "--quarantine")
    assert done.exit_code == 1
    assert "is a link" in done.stderr
    assert sorted(path.relative_to(home) for path in home.rglob("*")) == before
    assert steps(folder) == [10, 20, 30, 40]


def test_a_directory_of_lightnings_counts_once(tmp_path):
    """A sharded checkpoint has the name of a file and a manifest in it: of three, two stay, and each is listed once."""
    names = [f"step={number}.ckpt" for number in (1, 2, 3)]
    for sequence, name in enumerate(names):
        made = checkpoint(tmp_path / name, {"a": b"x"})
        (tmp_path / name / "manifest.json").write_bytes(replace(made, sequence=sequence + 1).to_bytes())
    (tmp_path / ".safe_ckpt").mkdir()
    listed = json.loads(CliRunner().invoke(app, ["list", str(tmp_path), "--json"]).stdout)
    assert [row["name"] for row in listed] == names[::-1]
    done = run(tmp_path, "--keep-last", "2", "--json")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == names[1:]
