"""Where ``save_state`` puts checkpoints: automatic names, names of one's own, and directories that several jobs use."""

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from accelerate_runs import CONFIG, Training, checkpoints, forget, fresh, make, names, registered
from kit.inside import upload_at_once
from kit.memory_store import MemoryStore
from safe_ckpt import CheckpointConfig, Mirror, Retention, StorageConfig, WriterConfig
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import (
    ClosedError,
    ConfigError,
    DirectoryError,
    NoValidCheckpointError,
    UnsupportedFormatError,
)
from safe_ckpt.testing import inline_saves
from safe_ckpt.tools.cli.app import app
from support import run_program, writers_of


@pytest.fixture(autouse=True)
def _alone():
    with fresh():
        yield


def test_a_named_path_is_created_or_replaced_and_a_foreign_one_is_refused(tmp_path):
    """Absent: it appears at the commit. Ours: replaced, foreign files carried over. Somebody else's: refused."""
    with registered(None) as (accelerator, handle):
        training = Training(accelerator)
        path = accelerator.save_state(tmp_path / "mine")
        handle.wait()
        (path / "notes.txt").write_text("keep me")
        (path / "more").mkdir()
        (path / "more/notes.txt").write_text("me too")
        (path / "optimizer_7.bin").write_bytes(b"")
        training.epoch()
        expected = training.fingerprint()
        accelerator.save_state(tmp_path / "mine", async_save=False)
        assert (path / "notes.txt").read_text() == "keep me"
        assert (path / "more/notes.txt").read_text() == "me too"
        verify_files(path, read_manifest(path))
        assert "notes.txt" not in [entry.path for entry in read_manifest(path).files]
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        (tmp_path / "empty").mkdir()
        accelerator.save_state(tmp_path / "empty", async_save=False)
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs/model.safetensors").write_bytes(b"theirs")
        with pytest.raises(DirectoryError, match="another name"):
            accelerator.save_state(tmp_path / "theirs")
        assert names(tmp_path / "theirs") == ["model.safetensors"]
        (tmp_path / "file").write_text("theirs")
        with pytest.raises(DirectoryError, match="another name"):
            accelerator.save_state(tmp_path / "file")


@pytest.mark.parametrize("safe", [True, False])
def test_a_stock_checkpoint_at_a_fixed_path_is_loaded_and_then_replaced(tmp_path, safe):
    """Nothing of it stays beside ours; all else is kept, and a log goes on that somebody has open."""
    path = tmp_path / "state"
    stock = Training(make(None))
    stock.accelerator.save_state(path, safe_serialization=safe)
    expected = stock.fingerprint()
    (path / "optimizer_7.bin").write_bytes(b"of an earlier program")
    (path / "pytorch_model_fsdp_0").mkdir()
    (path / "pytorch_model_fsdp_0/__0_0.distcp").write_bytes(b"too")
    (path / "model").mkdir()
    (path / "model/card.md").write_text("keep me")
    forget()
    with registered(None) as (accelerator, _), (path / "run.log").open("w") as log:
        training = Training(accelerator)
        training.scramble()
        accelerator.load_state(path)
        assert training.fingerprint() == expected
        training.epoch()
        expected = training.fingerprint()
        accelerator.save_state(path, safe_serialization=not safe, async_save=False)
        log.write("goes on")
        training.scramble()
        accelerator.load_state(path)
        assert training.fingerprint() == expected
    assert (path / "run.log").read_text() == "goes on"
    ours = [entry.path for entry in read_manifest(path).files]
    assert names(path) == sorted([*ours, "manifest.json", "model", "run.log"])
    assert (path / "model/card.md").read_text() == "keep me"


def test_a_project_may_be_saved_into_and_nothing_in_it_is_lost(tmp_path):
    """Settings and logs are kept. Weights, checkpoints of other tools and folders of checkpoints are not replaced."""
    project = tmp_path / "project"
    (project / "logs").mkdir(parents=True)
    with registered(project, automatic=False) as (accelerator, _):
        Training(accelerator)
        with (project / "logs/events").open("w") as log:
            for number in (1, 2):
                accelerator.save_state(project, async_save=False)
                log.write(str(number))
        assert (project / "logs/events").read_text() == "12"
        for name in ("model.safetensors", "optimizer_0/.metadata", "trainer_state.json", "checkpoints/.safe_ckpt/lock"):
            file = tmp_path / name.replace("/", "-") / name
            file.parent.mkdir(parents=True)
            file.write_text("theirs")
            with pytest.raises(DirectoryError, match="another name"):
                accelerator.save_state(tmp_path / name.replace("/", "-"))
            assert file.read_text() == "theirs"


def test_jobs_may_keep_their_checkpoints_side_by_side(tmp_path):
    """A path of one's own is held by itself: another live job saves beside it; retention never reaches what others wrote."""
    config = CheckpointConfig(timeouts=CONFIG.timeouts, retention=Retention(keep_last=1))
    with registered(None, config) as (accelerator, handle):
        Training(accelerator)
        accelerator.save_state(tmp_path / "job_a", async_save=False)
        shutil.copytree(tmp_path / "job_a", tmp_path / "kept")
        done = run_program("saves_beside_another_job", str(tmp_path), *sys.path)
        assert done.returncode == 0, done.stderr
        for number in range(4):
            last = accelerator.save_state(tmp_path / f"step_{number}")
        handle.wait()
        assert [p.name for p in sorted(tmp_path.iterdir())] == [".safe_ckpt", "job_b", "kept", "step_3"]
        accelerator.load_state()
        assert len(list((tmp_path / ".safe_ckpt/names").iterdir())) <= 2
        assert last.name == "step_3"
    with registered(None, config) as (accelerator, handle), pytest.raises(DirectoryError, match="another name"):
        Training(accelerator)
        handle.save_model(accelerator._models[0], tmp_path / "step_3")


@pytest.mark.parametrize("first", ["link", "real"])
def test_a_directory_that_is_named_through_a_link_is_the_same_one(tmp_path, first):
    """Saved to, loaded from and saved to again by another spelling: this process's own lock is no other job's."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    second = {"link": "real", "real": "link"}[first]
    with registered(None) as (accelerator, handle):
        Training(accelerator)
        accelerator.save_state(tmp_path / first / "ck")
        accelerator.load_state(tmp_path / second / "ck")
        accelerator.save_state(tmp_path / second / "ck")
        accelerator.save_state(tmp_path / first / "ck")
        handle.wait()
    assert verify_files(tmp_path / "real/ck", read_manifest(tmp_path / "real/ck"))


def test_a_checkpoint_saved_after_weights_in_one_folder_is_the_newest(tmp_path, monkeypatch):
    """Weights that were saved first in a folder do not hide the checkpoints of earlier jobs there."""
    monkeypatch.setattr(
        "safe_ckpt.core.home.home.sequence_after", lambda last: last + 1
    )  # as with a clock that went back
    with registered(None) as (accelerator, _):
        for name in ("step_1", "step_2", "step_3"):
            accelerator.save_state(tmp_path / name)
    forget()
    with registered(None) as (accelerator, _):
        accelerator.save_model(torch.nn.Linear(2, 2), tmp_path / "weights")
        accelerator.save_state(tmp_path / "step_4")
    assert [read_manifest(tmp_path / f"step_{number}").sequence for number in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_a_name_waits_for_no_save_under_another_one(tmp_path):
    """As many saves are in flight as the settings allow, each under a name of its own."""
    config = replace(CONFIG, max_in_flight=3, writer=WriterConfig(inline_bytes=0))
    paths = [tmp_path / f"step_{number}" for number in range(4)]
    with registered(None, config) as (accelerator, handle):
        accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.save_state(paths[0], async_save=False)
        (writer,) = writers_of(os.getpid())
        os.kill(writer, signal.SIGSTOP)
        for path in paths[1:]:
            accelerator.save_state(path)
        assert not any(path.exists() for path in paths[1:])
        os.kill(writer, signal.SIGCONT)
        handle.wait()
    assert all((path / "manifest.json").exists() for path in paths)


@pytest.mark.parametrize("automatic", [False, True])
def test_a_directory_that_could_not_be_looked_at_is_not_held(tmp_path, monkeypatch, automatic):
    """Nor is anything saved there in a wrong order: the next attempt looks again."""

    def broken(*args, **kwargs):
        raise DirectoryError(path=str(tmp_path), message="cannot be read", rank=0)

    monkeypatch.setattr(
        "safe_ckpt.core.home.home.sequence_after", lambda last: last + 1
    )  # as with a clock that went back
    target = None if automatic else tmp_path / "one"
    with registered(tmp_path, automatic=automatic) as (accelerator, _):
        accelerator.save_state(target)
        accelerator.save_state(target)
    forget()
    accelerator = make(tmp_path, automatic=False)
    with register(accelerator, CONFIG) as handle:
        accelerator.project_configuration.automatic_checkpoint_naming = automatic  # as a script may do later
        with monkeypatch.context() as patch:
            patch.setattr("safe_ckpt.adapters.saver.list_patiently", broken)
            patch.setattr("safe_ckpt.core.saving.names._sequence_of", broken)
            with pytest.raises(DirectoryError, match="cannot be read"):
                accelerator.save_state(target)
        assert not list(tmp_path.rglob("lock"))
        path = accelerator.save_state(target, async_save=False)
        handle.wait()
    assert read_manifest(path).sequence == 3


def test_a_checkpoint_of_another_job_under_our_name_is_not_deleted_or_loaded(tmp_path):
    """Retention does not delete it, nor does it count; ``load_state()`` does not take it."""
    config = CheckpointConfig(timeouts=CONFIG.timeouts, retention=Retention(keep_last=2))
    with registered(None) as (accelerator, _):  # of the other job
        theirs = accelerator.save_state(tmp_path / "other/step_2")
    forget()
    with registered(None, config) as (accelerator, handle):
        for number in (1, 2, 3):
            accelerator.save_state(tmp_path / f"step_{number}", async_save=False)
        shutil.rmtree(tmp_path / "step_2")
        shutil.copytree(theirs, tmp_path / "step_2")
        accelerator.save_state(tmp_path / "step_4", async_save=False)
        accelerator.save_state(tmp_path / "step_5", async_save=False)
        assert names(tmp_path) == [".safe_ckpt", "other", "step_2", "step_4", "step_5"]
        for number in (4, 5):
            shutil.rmtree(tmp_path / f"step_{number}")
        shutil.copytree(theirs, tmp_path / "step_5")
        with pytest.raises(NoValidCheckpointError):
            accelerator.load_state()
        assert read_manifest(tmp_path / "step_2").op_id == read_manifest(theirs).op_id


def test_names_of_ones_own_are_recorded_swept_and_in_order(tmp_path):
    """The next job sweeps what a killed one left under another name; what it saves is the newest, whatever its step; list,
    resume-path and report speak of both jobs.
    """
    assert run_program("killed_in_a_save_of_accelerate", str(tmp_path), *sys.path).returncode == -signal.SIGKILL
    left = tmp_path / ".safe_ckpt/names/step_60"
    assert names(left / "pending")
    before = json.loads(command("list", tmp_path, "--json"))
    assert [row["name"] for row in before if row["state"] == "partial"] == [
        f".safe_ckpt/names/step_60/pending/{name}" for name in names(left / "pending")
    ]
    with registered(None) as (accelerator, handle):
        Training(accelerator, width=100_000)
        accelerator.load_state(tmp_path / "step_40")
        accelerator.save_state(tmp_path / "step_45")
        accelerator.save_state(tmp_path / "last", async_save=False)
        assert not [path for path in left.rglob("*") if path.is_file()]
    rows = json.loads(command("list", tmp_path, "--json"))
    assert [(row["name"], row["step"]) for row in rows] == [
        ("last", 3),
        ("step_45", 45),
        ("step_50", 50),
        ("step_40", 40),
        ("step_30", 30),
    ]
    assert command("resume-path", tmp_path).strip() == str(tmp_path / "last")
    for asked in (tmp_path, tmp_path / "step_45"):
        told = json.loads(command("report", asked, "--json"))
        assert [save["step"] for save in told["saves"] if save["outcome"] == "committed"] == [30, 40, 50, 45, 3]
        assert [save["step"] for save in told["saves"] if save["outcome"] == "interrupted"] == [60]
        assert len(told["runs"]) == 2
    assert names(tmp_path / ".safe_ckpt")[0] == "events.jsonl"


@pytest.mark.parametrize("automatic", [False, True])
def test_a_directory_of_checkpoints_is_not_loaded_and_they_are_named(tmp_path, automatic, caplog):
    """Given in place of one of them. They are also named where the project is given."""
    with registered(tmp_path, automatic=automatic) as (accelerator, handle):
        Training(accelerator)
        for name in ("step_10", "step_20"):
            accelerator.save_state(tmp_path / name)
        handle.wait()
        there = "checkpoints/checkpoint_1, checkpoints/checkpoint_0" if automatic else "step_20, step_10"
        with pytest.raises(UnsupportedFormatError, match=f"name one of them: {there}"):
            accelerator.load_state(tmp_path)
    assert "without verification" not in caplog.text


def test_without_a_path_a_new_process_says_how_names_of_ones_own_are_loaded(tmp_path):
    """The checkpoints of an earlier process are there, and are loaded by their paths."""
    with registered(tmp_path, automatic=False) as (accelerator, _):
        Training(accelerator)
        accelerator.save_state(tmp_path / "step_10")
    forget()
    with registered(tmp_path, automatic=False) as (accelerator, _):
        Training(accelerator)
        with pytest.raises(ConfigError, match=r"name yourself are loaded by their path: load_state\(path\)"):
            accelerator.load_state()
        accelerator.load_state(tmp_path / "step_10")


def test_a_sweep_keeps_no_other_job_from_its_name(tmp_path, monkeypatch):
    """What a killed job left there is deleted when its lock has been given back; whoever comes at that moment waits for it."""
    left, held, remove_tree = tmp_path / ".safe_ckpt/names/other", [], durable.remove_tree
    (left / "pending/half").mkdir(parents=True)
    (left / "pending/half/file").write_text("half")
    (left / "trash/old").mkdir(parents=True)
    dead = replace(own_lease(token="t", started_at="", lease_s=60.0), pid=2**22 + 1, process_start=1)
    (left / "lock").write_bytes(dead.to_bytes())

    def remove(path):
        lock = left / "lock"
        held.append(lock.exists() and json.loads(lock.read_bytes())["pid"] == os.getpid())
        remove_tree(path)

    monkeypatch.setattr(durable, "remove_tree", remove)
    with registered(None) as (accelerator, handle):
        accelerator.save_state(tmp_path / "mine", async_save=False)
        assert held
        assert not any(held)
        assert not left.exists()
        assert names(tmp_path / ".safe_ckpt/names/mine/trash") == []
        sweep = FileHome(tmp_path, lease_s=60.0, hidden=left)
        sweep.open()
        ends = threading.Timer(0.1, sweep.close)
        ends.start()
        accelerator.save_state(tmp_path / "other", async_save=False)
        ends.join()


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_hidden_folder_is_not_where_accelerate_lists(tmp_path):
    """A stock load_state takes whatever sorts last in ``checkpoints``: nothing but checkpoints is ever in there."""
    seen = set()
    with registered(tmp_path) as (accelerator, handle):
        Training(accelerator)
        for _ in range(3):
            accelerator.save_state()
            seen |= set(checkpoints(tmp_path))
        handle.wait()
        seen |= set(checkpoints(tmp_path))
    assert seen == {"checkpoint_0", "checkpoint_1", "checkpoint_2"}


def test_a_relative_project_stays_where_it_was_registered(tmp_path, monkeypatch):
    """A program that changes its working directory, as with Hydra, saves and loads in one place."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with registered("project") as (accelerator, handle):
        training = Training(accelerator)
        accelerator.save_state(async_save=False)
        monkeypatch.chdir(tmp_path / "second")
        training.epoch()
        accelerator.save_state(async_save=False)
        accelerator.load_state()
        handle.wait()
    assert len(list((tmp_path / "first/project/checkpoints").glob("checkpoint_*"))) == 2
    assert list((tmp_path / "second").iterdir()) == []


SPELLINGS = {"link": "link", "relative": "project", "link above": "above/project", "the same": None}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.quick
def test_another_accelerator_for_one_project_takes_over(tmp_path, monkeypatch, caplog, spelling, again):
    """As when a cell of a notebook is run again, however the project is spelt; the earlier one is closed, and that is said."""
    (tmp_path / "project").mkdir()
    (tmp_path / "link").symlink_to("project")
    (tmp_path / "above").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    spelt = [tmp_path / "project", SPELLINGS[spelling] or tmp_path / "project"]
    for number, project in enumerate(reversed(spelt) if again else spelt):
        accelerator = make(project, iteration=number)
        handle = register(accelerator, CONFIG)
        Training(accelerator)
        accelerator.save_state(async_save=False)
        if not number:
            first, before = accelerator, handle
    assert before.closed
    assert caplog.text.count("ends: this one takes its place") == 1
    with pytest.raises(ClosedError):
        first.save_state()
    accelerator.load_state()
    handle.remove()
    assert checkpoints(tmp_path / "project") == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.quick
def test_what_a_limit_deletes_goes_from_the_store_too(tmp_path, monkeypatch):
    """Where ``project_dir`` is an address: the checkpoints there are those that are here, whatever the user's mirror says."""
    upload_at_once(monkeypatch)
    store = MemoryStore(monkeypatch)
    for number in (0, 1):
        address = store.url(f"run{number}")
        mirror = Mirror(url=address, keep_every_steps=1) if number else Mirror()
        config = replace(CONFIG, storage=StorageConfig(cache_dir=str(tmp_path)), mirror=mirror)
        with inline_saves(), registered(address, config, limit=2) as (accelerator, _):
            Training(accelerator)
            for _ in range(4):
                accelerator.save_state(async_save=False)
            here = checkpoints(Path(accelerator.project_dir))
        forget()
        assert here == ["checkpoint_2", "checkpoint_3"]
        assert sorted(one["name"] for one in store.manifests(f"run{number}").values()) == here


@pytest.mark.quick
def test_a_limit_counts_only_what_is_named_automatically(tmp_path):
    """``total_limit`` deletes no checkpoint that the user has named: neither with automatic names nor without them."""
    own = ["best", "step_10", "step_20", "step_30"]
    for automatic in (False, True):
        with registered(tmp_path, automatic=automatic, limit=1) as (accelerator, handle):
            Training(accelerator)
            for name in own:
                accelerator.save_state(tmp_path / name, async_save=False)
                if automatic:
                    accelerator.save_state(async_save=False)
        forget()
        assert set(own) <= set(names(tmp_path))
    assert len(checkpoints(tmp_path)) == 1


# The tool that saved before, with which ``iteration`` the new process begins, and whether a number below is free again.
BEFORE = [("ours", 0, False), ("ours", 1, True), ("ours", 7, False), ("stock", 0, False), ("stock", 2, True)]


@pytest.mark.parametrize(("tool", "iteration", "gap"), BEFORE)
@pytest.mark.quick
def test_a_process_that_has_loaded_nothing_replaces_no_checkpoint_of_the_run_before(tmp_path, tool, iteration, gap):
    """Its saves get the numbers behind the highest that is in use, or those of ``iteration`` if that is higher."""

    def start(count, *, ours, **more):
        accelerator = make(tmp_path, **more)
        handle = register(accelerator, CONFIG) if ours else None
        accelerator.prepare(torch.nn.Linear(2, 2))
        for _ in range(count):
            accelerator.save_state()
        if handle is not None:
            handle.remove()
        forget()

    start(3, ours=tool == "ours")
    if gap:
        shutil.rmtree(tmp_path / "checkpoints/checkpoint_0")
    folders = checkpoints(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    start(2, ours=True, iteration=iteration)
    assert {path: path.read_bytes() for path in before} == before
    first = max(3, iteration)
    assert checkpoints(tmp_path) == sorted([*folders, f"checkpoint_{first}", f"checkpoint_{first + 1}"])
