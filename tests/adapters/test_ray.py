"""Ray Train with two workers on this machine: kills, reports, and what it says of mistakes. For ``make test-ray``."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray_runs
from ray.train import CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext

from kit.patience import scaled, wait_until
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.ray import SafeRunConfig
from safe_ckpt.ray.run_config import SNAPSHOT
from support import kill_all, writer_processes

RUNS = Path(__file__).with_name("ray_runs.py")
FACTS = re.compile(r"^JOB (\S+) (\{.*\})$", re.MULTILINE)


def driver(storage, *jobs):
    """A driver of these jobs; what it prints goes to a file, as Ray's own processes may outlive it for a moment."""
    with (storage / "driver.log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RUNS), str(storage), json.dumps(jobs)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def ended(process, storage):
    """What the driver says of its jobs, by their names."""
    assert process.wait(scaled(200)) == 0, (storage / "driver.log").read_text()[-4000:]
    return {name: json.loads(facts) for name, facts in FACTS.findall((storage / "driver.log").read_text())}


def of_ranks(storage, name):
    """What the two workers tell of a job."""
    return [json.loads((storage / f"{name}-{rank}.txt").read_text()) for rank in range(2)]


def names(paths):
    return [Path(path).name for path in paths]


def is_committed(path):
    verify_files(Path(path), read_manifest(Path(path)))
    return True


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Several jobs of one driver, so that Ray starts once."""
    storage = tmp_path_factory.mktemp("runs")
    jobs = [
        {"run": "train", "name": "whole", "steps": 8, "mistakes": "misused"},
        {"run": "train", "name": "drained", "steps": 5000, "every": 20, "watched": True},
    ]
    if THOROUGH:
        jobs.insert(0, {"run": "misused", "name": "plain", "plain": True})
    return storage, ended(driver(storage, *jobs), storage)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_commit_is_reported_once_by_its_own_directory(told):
    """All commits in their order with their metrics, and the same directories; Ray's newest is ours. Nothing was uploaded."""
    storage, said = told
    whole, folder = said["whole"], storage / "whole/checkpoints"
    assert whole["error"] == ""
    assert whole["listed"] == [str(folder / f"step-{step:08}") for step in range(1, 9)]
    assert whole["latest"] == whole["listed"][-1]
    assert (whole["metrics"]["step"], set(whole["metrics"])) == (8, {"step", "loss"})
    assert all(is_committed(path) for path in whole["listed"])
    assert sorted(path.name for path in (storage / "whole").glob("check*")) == [SNAPSHOT, "checkpoints"]
    assert [one["asked"] for one in of_ranks(storage, "whole")] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mistakes_are_said_on_both_workers(told):
    """Too few that are kept, settings that differ, signals, and with ``--all`` a run without SafeRunConfig: the same words on
    each rank.
    """
    storage, _ = told
    errors, other = of_ranks(storage, "misused")
    assert set(errors) == {"few", "differ", "signals", "good"}
    assert errors["few"].startswith("ConfigError: retention.keep_last: 2 is the least")
    assert errors["differ"].startswith("DesyncError")
    assert "main thread" in errors["signals"]
    assert errors["good"] == other["good"] == ""
    assert other["few"] == errors["few"]
    for errors in of_ranks(storage, "plain") if THOROUGH else []:
        assert all("run_config=SafeRunConfig(...)" in text for text in errors.values()), errors


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_when_a_node_is_about_to_go_both_workers_save_once_at_the_same_step(told):
    """Ray says that its node is drained: ``save_requested`` is True once, at one step; that is saved, and training goes on."""
    storage, said = told
    asked, other = (one["asked"] for one in of_ranks(storage, "drained"))
    assert asked == other
    assert len(asked) == 1
    assert f"step-{asked[0]:08}" in names(said["drained"]["listed"])
    assert int(names(said["drained"]["listed"])[-1].removeprefix("step-")) > asked[0]


def commits(storage):
    events = storage / "killed/checkpoints/.safe_ckpt/events.jsonl"
    return events.read_text(encoding="utf-8").count('"committed"') if events.exists() else 0


def kill_one(storage, chance, process):
    """SIGKILL to a worker at a random moment behind its next commit. Ray starts both again."""
    before = commits(storage)
    wait_until(lambda: process.poll() is not None or commits(storage) >= before + 2, 200, "a commit")
    time.sleep(chance.random() * 0.1)
    assert process.poll() is None, (storage / "driver.log").read_text()[-4000:]
    os.kill(int((storage / f"pid-{chance.randrange(2)}").read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray about pydantic
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.thorough)])
def test_a_run_whose_workers_and_driver_are_killed_ends_as_one_that_was_not(tmp_path, kills):
    """SIGKILL to a worker, then to the driver and what it started, at random moments: weights and draws are those of a training
    without Ray, bit for bit.

    Of many kills every third one is of the driver. What has a name is whole, and of what is listed for the next start Ray's
    newest is ours, and all exists.
    """
    steps = 6 * kills + 12
    job = {"run": "train", "name": "killed", "steps": steps, "keep_last": 3, "failures": -1}
    seed = int.from_bytes(os.urandom(2))
    chance = random.Random(seed)
    process = driver(tmp_path, job)
    for number in range(kills):
        if number % 3 != 1:
            kill_one(tmp_path, chance, process)
            continue
        before = commits(tmp_path)
        wait_until(lambda before=before: commits(tmp_path) >= before + 2, 200, "a commit")
        time.sleep(chance.random() * 0.1)
        kill_all()
        process.wait()
        process = driver(tmp_path, job)
    ended(process, tmp_path)
    whole = values(spawn_ranks(ray_runs.alone, 2, steps, timeout_s=300))
    assert [one["digest"] for one in of_ranks(tmp_path, "killed")] == whole, f"random seed {seed}"
    folder = tmp_path / "killed/checkpoints"
    left = sorted(path.name for path in folder.glob("step-*"))
    assert left == [f"step-{step:08}" for step in range(steps - 2, steps + 1)]
    assert all(is_committed(folder / name) for name in left)
    SafeRunConfig(name="killed", storage_path=str(tmp_path))  # as the next start begins
    found = CheckpointManager(CheckpointConfig(), StorageContext(str(tmp_path), "killed"))
    assert Path(found.latest_checkpoint_result.checkpoint.path).name == left[-1]
    assert set(names(one.checkpoint.path for one in found._checkpoint_results)) <= set(left)
    assert (tmp_path / "killed" / SNAPSHOT).exists()
    assert writer_processes() == []
