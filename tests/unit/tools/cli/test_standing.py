"""What a resume takes, what is never deleted and who holds it: the commands say of a directory what its jobs do."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kit.manifests import checkpoint, rewrite
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.home import standing
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.holders import WholeDirectory
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.home.retention import delete_listed
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.request import Destination, Facts, OnCommit, SaveRequest, Snapshot
from safe_ckpt.tools.cli import verify
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.inspection.listing import read_listing


def run(*args):
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def listed(folder):
    return {row["name"]: row for row in json.loads(run("list", folder, "--json").stdout)}


def left(folder):
    return sorted(path.name for path in folder.iterdir() if (path / MANIFEST_NAME).exists())


def made(folder, sequence, adapter, **notes):
    """A checkpoint of an adapter, as its manifest says."""
    folder.mkdir(parents=True)
    checkpoint(folder, {"x.json": b"{}"})
    facts = {"sequence": sequence, "step": sequence, "op_id": f"op{sequence}", "notes": {"adapter": adapter, **notes}}
    rewrite(folder, lambda data: data.update(facts))


def save(folder, *steps, **settings):
    with Checkpointer(folder, CheckpointConfig(**settings)) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": {"t": torch.ones(10)}}).result(timeout_s=30)


@pytest.mark.parametrize("below", ["", "warmup"])
def test_the_tag_that_latest_names_is_not_deleted(tmp_path, below):
    """DeepSpeed loads it, so list and resume-path show it first; also where ``latest`` lies above, for "warmup/tag2"."""
    for number in range(1, 5):
        made(tmp_path / below / f"tag{number}", number, "deepspeed", latest=number != 4)
    (tmp_path / "latest").write_text(f"{below}/tag2".strip("/"))
    assert next(iter(listed(tmp_path))).endswith("tag2")
    assert run("resume-path", tmp_path).stdout.strip() == str(tmp_path / below / "tag2")
    done = run("gc", tmp_path / below, "--keep-last", 1, "--no-verify")
    assert (done.exit_code, left(tmp_path / below)) == (0, ["tag2", *(["tag3"] if below else []), "tag4"])
    assert "tag2 is kept: " in done.stderr


def test_a_damaged_tag_that_latest_names_is_listed(tmp_path):
    """Whatever its name; those before it follow, as DeepSpeed's load has it, and gc keeps what is loaded instead."""
    for number in range(1, 4):
        made(tmp_path / f"tag{number}", number, "deepspeed", latest=True)
    (tmp_path / "latest").write_text("tag3")
    (tmp_path / "tag3" / MANIFEST_NAME).write_text("{")
    assert [(name, row["state"]) for name, row in listed(tmp_path).items()] == [
        ("tag2", "valid"),
        ("tag1", "valid"),
        ("tag3", "damaged"),
    ]
    assert run("gc", tmp_path, "--keep-last", 1, "--no-verify").exit_code == 0
    assert left(tmp_path) == ["tag2", "tag3"]


def test_without_latest_the_newest_that_it_was_to_name_stays(tmp_path):
    """A tag that is loaded only by its name does not count as the one that a resume takes; tags below are seen, too."""
    for number in range(1, 4):
        made(tmp_path / f"tag{number}", number, "deepspeed", latest=number == 2)
    made(tmp_path / "warmup/late", 9, "deepspeed", latest=True, tag="warmup/late")
    (tmp_path / "warmup/.safe_ckpt").mkdir()
    order = list(listed(tmp_path))
    assert order[:2] == ["../warmup/late" if order[0].startswith("..") else "warmup/late", "tag2"]
    assert "loaded only by its name" in listed(tmp_path)["tag3"]["reason"]
    assert run("gc", tmp_path, "--keep-last", 1, "--no-verify").exit_code == 0
    assert left(tmp_path) == ["tag2", "tag3"]


def test_a_trainer_keeps_its_best_and_takes_its_own_names(tmp_path):
    """A copy under another name is none that it resumes from, and what the newest calls the best is needed in the end."""
    for number in (10, 20, 30):
        made(tmp_path / f"checkpoint-{number}", number, "transformers")
    shutil.copytree(tmp_path / "checkpoint-30", tmp_path / "keep-me")
    (tmp_path / "checkpoint-30").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    (tmp_path / "checkpoint-20/trainer_state.json").write_text('{"best_model_checkpoint": "/else/checkpoint-10"}')
    assert next(iter(listed(tmp_path))) == "checkpoint-20"
    assert run("resume-path", tmp_path, "--quick").stdout.strip() == str(tmp_path / "checkpoint-20")
    assert run("gc", tmp_path, "--keep-last", 1, "--no-verify").exit_code == 0
    assert left(tmp_path) == ["checkpoint-10", "checkpoint-20", "keep-me"]


def test_each_framework_keeps_the_one_it_resumes_from(tmp_path):
    """Where two save into one directory, the newest of both stays."""
    save(tmp_path, 1, 2)
    made(tmp_path / "checkpoint_0", 1, "accelerate")
    assert run("gc", tmp_path, "--keep-last", 1, "--no-verify").exit_code == 0
    assert left(tmp_path) == ["checkpoint_0", "step-00000002"]


def test_files_of_another_tool_are_listed_as_a_resume_tries_them(tmp_path):
    """By the step in them, whatever their names and times say; weights alone are not tried."""
    for name, step in (("last", 5), ("a-step=7", 1), ("model-v1", 9)):
        torch.save({"global_step": step, "loops": {}, "lr_schedulers": [], "state_dict": {}}, tmp_path / f"{name}.ckpt")
    torch.save({"global_step": 99, "state_dict": {}}, tmp_path / "weights.ckpt")
    rows = listed(tmp_path)
    assert list(rows) == ["model-v1.ckpt", "last.ckpt", "a-step=7.ckpt", "weights.ckpt"]
    assert "weights only" in rows["weights.ckpt"]["reason"]


def test_gc_keeps_a_checkpoint_that_a_link_leads_to(tmp_path):
    """``last`` or ``best`` of the user's, or of Lightning's."""
    save(tmp_path, 1, 2, 3)
    (tmp_path / "best").symlink_to("step-00000001")
    assert run("gc", tmp_path, "--keep-last", 1).exit_code == 0
    assert left(tmp_path) == ["best", "step-00000001", "step-00000003"]


def test_a_name_that_is_held_keeps_gc_out_and_is_not_free(tmp_path):
    """As Accelerate holds a directory that the user names; the folder called ``checkpoints`` has the project's lock as well."""
    save(tmp_path / "checkpoints", 1, 2)
    folder = tmp_path / "checkpoints"
    for hidden in (
        folder / ".safe_ckpt/names/step-00000002",
        tmp_path / ".safe_ckpt",
        tmp_path / ".safe_ckpt/names/checkpoints",
    ):
        held = FileHome(folder, lease_s=60.0, hidden=hidden)
        held.open()
        try:
            said, collected = run("unlock", folder), run("gc", folder, "--keep-last", 1)
        finally:
            held.close()
        assert (said.exit_code, collected.exit_code) == (1, 1)
        assert "is free" not in said.stdout
        assert "process" in said.stdout
        assert "process" in collected.stderr
        assert left(folder) == ["step-00000001", "step-00000002"]
    assert run("unlock", folder).stdout.strip() == f"{folder} is free"


def test_a_job_above_keeps_gc_out(tmp_path):
    """Lightning saves below the directory that it holds, where a ``filename`` has a slash; also where a link leads there."""
    save(tmp_path / "run/made", 1, 2)
    save(tmp_path / "elsewhere", 1, 2)
    for folder in ("run/made", "elsewhere"):
        shutil.rmtree(tmp_path / folder / ".safe_ckpt", ignore_errors=True)
    (tmp_path / "to made").symlink_to("run/made")
    (tmp_path / "run/out").symlink_to("../elsewhere")
    with Checkpointer(tmp_path / "run"):
        for folder in ("run/made", "to made", "run/out"):
            assert run("gc", tmp_path / folder, "--keep-last", 1).exit_code == 1
            assert left(tmp_path / folder) == ["step-00000001", "step-00000002"]


def test_a_deletion_spares_a_name_that_was_saved_again_or_is_held(tmp_path):
    """A path is not a checkpoint: another job may have saved under the name since; and one whose name is held stays."""
    save(tmp_path, 1, 2)
    first, second = sorted((c.info for c in read_listing(tmp_path).standing.usable), key=lambda info: info.step)
    rewrite(first.path, lambda data: data.update(op_id="another"))
    whole = WholeDirectory(tmp_path, lease_s=60.0)
    whole.open()
    try:
        assert not whole.delete([first])
        late = FileHome(tmp_path, lease_s=60.0, hidden=tmp_path / ".safe_ckpt/names/step-00000002")
        late.open()
        assert not whole.delete([second])
        late.close()
        assert whole.delete([second])
    finally:
        whole.close()
    assert left(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("fate", ["alive", "on another host", "being written", "gone"])
def test_a_checkpoint_in_which_a_job_may_be_alive_is_not_deleted(tmp_path, fate):
    """By ``gc`` or retention: whoever cannot be asked from here counts as alive. One that is known to be gone holds nothing."""
    save(tmp_path, 1, 2)
    hidden = tmp_path / "step-00000001/.safe_ckpt"
    hidden.mkdir()
    lease = own_lease(token="another", started_at="2026-01-01T00:00:00+00:00", lease_s=60.0)
    changes = {"on another host": {"host": "other", "kernel": "other"}, "gone": {"process_start": 1}}.get(fate, {})
    (hidden / "lock").write_bytes(b"" if fate == "being written" else replace(lease, **changes).to_bytes())
    if fate != "gone":
        run("gc", tmp_path, "--keep-last", 1)
        assert left(tmp_path) == ["step-00000001", "step-00000002"]
    save(tmp_path, 3, retention=Retention(keep_last=1))
    assert left(tmp_path) == (["step-00000003"] if fate == "gone" else ["step-00000001", "step-00000003"])


def test_verify_says_what_it_could_not_read_and_verifies_the_others(tmp_path, monkeypatch):
    """A newer format among them: exit status 1, each has its line; one that retention deletes meanwhile is no damage."""
    save(tmp_path, 1, 2, 3)
    places = sorted(tmp_path.glob("step-*"))
    rewrite(places[1], lambda data: data.update(format_version=99))
    done = run("verify", tmp_path, "--json")
    states = {row["path"]: row["state"] for row in json.loads(done.stdout)}
    assert done.exit_code == 1
    assert states == {str(places[0]): "valid", str(places[1]): "unreadable", str(places[2]): "valid"}
    (places[2] / "w.safetensors").unlink()
    (places[2] / "w.safetensors").symlink_to("w.safetensors")  # cannot be opened
    states = {row["path"]: row["state"] for row in json.loads(run("verify", tmp_path, "--json").stdout)}
    assert states[str(places[0])] == "valid"
    assert states[str(places[2])] in ("unreadable", "damaged")
    judge = verify.verify_tasks
    monkeypatch.setattr(verify, "verify_tasks", lambda tasks: shutil.rmtree(places[2]) or judge(tasks))
    states = {row["path"]: row["state"] for row in json.loads(run("verify", tmp_path, "--json").stdout)}
    assert states == {str(places[0]): "valid", str(places[1]): "unreadable", str(places[2]): "deleted"}


@pytest.mark.parametrize("retention", [Retention(keep_last=1), None], ids=["rules", "a list"])
def test_a_deletion_that_failed_is_tried_again_at_the_next_commit(tmp_path, monkeypatch, caplog, retention):
    """And said once. What has been saved under the name since is another one, and stays."""
    rename, refused = os.rename, []

    def refusing(source, target):
        if (
            "trash" in str(target)
            and Path(source).name in ("step-00000001", "a.ckpt", "b.ckpt")
            and refused is not None
        ):
            raise OSError(errno.EBUSY, "refused", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    if retention is not None:
        with Checkpointer(tmp_path, CheckpointConfig(retention=retention)) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, {"x": step}).result(timeout_s=30)
            ckpt.wait()
            assert left(tmp_path) == ["step-00000001", "step-00000003"]
            refused = None
            ckpt.save(4, {"x": 4}).result(timeout_s=30)
            ckpt.wait()
        assert left(tmp_path) == ["step-00000004"]
        gone = ["step-00000001"]
    else:
        engine = Engine(CheckpointConfig())
        home = engine.hold(tmp_path)

        def save_file(name, *paths):
            image = torch_archive.torch_plan(name, {"x": torch.ones(3)}, strict=False, key="checkpoint")
            engine.save(
                SaveRequest(
                    destination=Destination(home=home, path=tmp_path / name, kind="file"),
                    payload=Snapshot(files=[file_plan.single(image, name)]),
                    facts=Facts(step=1),
                    on_commit=OnCommit(retention=delete_listed(list(paths)) if paths else None),
                )
            ).result(timeout_s=30)
            engine.wait_until_over()

        save_file("a.ckpt")
        save_file("b.ckpt")
        save_file("c.ckpt", tmp_path / "a.ckpt", tmp_path / "b.ckpt")
        save_file("b.ckpt")
        refused = None
        save_file("d.ckpt")
        engine.close()
        assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["b.ckpt", "c.ckpt", "d.ckpt"]
        gone = ["a.ckpt", "b.ckpt"]
    said = [record.getMessage() for record in caplog.records if "could not be removed" in record.getMessage()]
    assert sorted(Path(text.split()[0]).name for text in said) == gone


def test_retention_reads_each_manifest_once(tmp_path, monkeypatch):
    """Not those of all checkpoints at each commit; one that another job has replaced is read again, and does not count."""
    save(tmp_path, *range(1, 6))
    read, original = [], standing.read_manifest
    monkeypatch.setattr(standing, "read_manifest", lambda path: read.append(path.name) or original(path))
    with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=9))) as ckpt:
        ckpt.resume({})
        for step in (6, 7, 8):
            ckpt.save(step, {"x": step}).result(timeout_s=30)
        ckpt.wait()
        assert sorted(set(read)) == sorted(read)
        assert set(read) <= {f"step-{step:08d}" for step in (6, 7, 8)}
        rewrite(tmp_path / "step-00000003", lambda data: data.update(op_id="another"))
        ckpt.save(9, {"x": 9}).result(timeout_s=30)
        ckpt.wait()
    assert read.count("step-00000003") == 1


def test_runs_below_a_directory_are_named_where_they_are_not_shown(tmp_path):
    """``list`` on the folder of all runs shows none of theirs, and must not look as if there were none."""
    for name in ("b", "a"):
        with Checkpointer(tmp_path / name) as ckpt:
            ckpt.save(1, {"n": 1}).result(timeout_s=20)
    done = run("list", tmp_path)
    assert "each is a run of its own: a, b. Name one" in done.stderr
    assert "run of its own" not in run("list", tmp_path / "a").stderr
    shutil.copytree(tmp_path / "a", tmp_path / "c/checkpoints")
    assert "run of its own" not in run("list", tmp_path / "c").stderr  # it is shown
