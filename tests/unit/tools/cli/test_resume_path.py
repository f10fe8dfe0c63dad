"""What ``safe-ckpt resume-path`` says against what a job really takes."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.tools.cli.app import app
from support import flip_bit


def run(*args):
    return CliRunner().invoke(app, ["resume-path", *map(str, args)])


def taken(folder, copy):
    """The name of the checkpoint that a Checkpointer resumes from, tried on a copy: resuming moves damaged ones away."""
    shutil.copytree(folder, copy)
    state = {"w": {"t": torch.zeros(10)}}
    with Checkpointer(copy, CheckpointConfig(timeouts=Timeouts(barrier_s=4))) as ckpt:
        info = ckpt.resume(state)
    return None if info is None else info.path.name


def save(folder, *steps):
    with Checkpointer(folder) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": {"t": torch.ones(10) * step}}).result(timeout_s=20)


def test_the_newest_is_by_order_of_commits(tmp_path):
    """Not by step: after a rewind to step 5 the abandoned step 9 does not win. The path alone is on stdout."""
    save(tmp_path / "d", 9, 5)
    done = run(tmp_path / "d")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{tmp_path / 'd/step-00000005'}\n", "")
    assert taken(tmp_path / "d", tmp_path / "copy") == "step-00000005"
    assert json.loads(run(tmp_path / "d", "--json").stdout) == {
        "path": str(tmp_path / "d/step-00000005"),
        "verified": True,
        "rejected": [],
    }


@pytest.mark.parametrize("damage", ["payload", "manifest", "file", "cut", "both"])
def test_a_damaged_newest_is_passed_over(tmp_path, damage):
    """As a resume does, with the reason on stderr; nothing is moved. When all are damaged: status 1, no path."""
    save(tmp_path / "d", 1, 2, 3)
    newest = tmp_path / "d/step-00000003"
    if damage in ("payload", "both"):
        flip_bit(newest / "w.safetensors", 4100)
    if damage == "both":
        flip_bit(tmp_path / "d/step-00000002/manifest.json", 40)
    if damage == "manifest":
        flip_bit(newest / "manifest.json", 40)
    if damage == "file":
        (newest / "w.safetensors").unlink()
    if damage == "cut":
        (newest / "w.safetensors").write_bytes(b"x")
    done = run(tmp_path / "d")
    chosen = taken(tmp_path / "d", tmp_path / "copy")
    assert done.stdout == f"{tmp_path / 'd' / chosen}\n"
    assert (done.exit_code, chosen) == (0, "step-00000001" if damage == "both" else "step-00000002")
    assert done.stderr.startswith("not ")
    assert str(newest) in done.stderr
    assert newest.exists()
    rejected = json.loads(run(tmp_path / "d", "--json").stdout)["rejected"]
    assert len(rejected) == (2 if damage == "both" else 1)
    assert all(set(row) == {"path", "reason"} and row["reason"] for row in rejected)


def test_resume_path_without_a_usable_checkpoint_ends_with_status_1(tmp_path):
    """All damaged: status 1 and why, where a job raises; nothing there at all: status 1, where a job starts afresh."""
    save(tmp_path / "d", 1)
    flip_bit(tmp_path / "d/step-00000001/w.safetensors", 4100)
    done = run(tmp_path / "d")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no usable checkpoint" in done.stderr
    with pytest.raises(NoValidCheckpointError):
        taken(tmp_path / "d", tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "start afresh" in done.stderr
    (tmp_path / "d/.safe_ckpt/quarantine").mkdir(parents=True, exist_ok=True)
    (tmp_path / "d/step-00000001").rename(tmp_path / "d/.safe_ckpt/quarantine/step-00000001")
    assert "in quarantine" in run(tmp_path / "d").stderr


def test_resume_path_quick_reads_no_payload(tmp_path):
    """--quick reads no payload, and the JSON does not claim that anything was verified."""
    save(tmp_path, 1, 2)
    flip_bit(tmp_path / "step-00000002/w.safetensors", 4100)
    assert run(tmp_path, "--quick").stdout == f"{tmp_path / 'step-00000002'}\n"
    assert json.loads(run(tmp_path, "--quick", "--json").stdout)["verified"] is False


def test_resume_path_takes_ours_before_those_of_other_tools(tmp_path):
    """A stock file of a later step is taken only when none of ours is left; status 3 where it carries no checksums."""
    stock = {"state_dict": {"w": torch.ones(1)}, "loops": {}, "lr_schedulers": [], "global_step": 50}
    save_archive(stock, tmp_path / "ours.ckpt", sequence=1, step=10)
    torch.save(stock, tmp_path / "a.ckpt")
    torch.save({**stock, "global_step": 70}, tmp_path / "b.ckpt")
    torch.save({"state_dict": {}, "global_step": 90}, tmp_path / "weights.ckpt")
    assert run(tmp_path).stdout == f"{tmp_path / 'ours.ckpt'}\n"
    flip_bit(tmp_path / "ours.ckpt", 600)
    done = run(tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'b.ckpt'}\n")
    assert "weights only" in done.stderr
    flip_bit(tmp_path / "b.ckpt", (tmp_path / "b.ckpt").stat().st_size // 2)
    assert run(tmp_path).stdout == f"{tmp_path / 'a.ckpt'}\n"
    torch.save({**stock, "global_step": 80}, tmp_path / "c.ckpt", _use_new_zipfile_serialization=False)
    done = run(tmp_path)
    assert (done.exit_code, done.stdout) == (3, f"{tmp_path / 'c.ckpt'}\n")
    assert "cannot be verified" in done.stderr


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer_resumes_from_what_resume_path_says(tmp_path):
    """A Trainer with resume="auto" goes on from what resume-path said, with the newest one damaged."""
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    from safe_ckpt.lightning import SafeCheckpointCallback

    def fit(epochs):
        callback = SafeCheckpointCallback(dirpath=tmp_path / "d", save_top_k=-1, resume="auto")
        settings = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
        limits = {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": epochs}
        pl.Trainer(callbacks=[callback], default_root_dir=tmp_path, **settings, **limits).fit(BoringModel())
        return callback

    fit(2)
    newest = tmp_path / "d/epoch=1-step=4.ckpt"
    flip_bit(newest, newest.stat().st_size // 2)
    done = run(tmp_path / "d")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'd/epoch=0-step=2.ckpt'}\n")
    assert str(newest) in done.stderr
    assert str(fit(3)._came_from) == done.stdout.strip()
