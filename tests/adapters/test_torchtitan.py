"""torchtitan's own Trainer with ``SafeCheckpointManager``, on two gloo ranks with FSDP2: kills, and stock beside ours."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
import titan_runs
import torch.distributed.checkpoint as dcp

from kit import warm
from kit.patience import scaled
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import NoValidCheckpointError, SafeCheckpointError
from support import flip_bit, kill_all, writer_processes

titan_runs.ready()
RUNS = Path(__file__).with_name("titan_runs.py")


def launch(folder, steps, **options):
    """torchrun with two ranks, as a user starts torchtitan."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RUNS)]
    return warm.Popen(
        [*command, str(folder), str(steps), json.dumps(options)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def ended(process):
    out, _ = process.communicate(timeout=scaled(200))
    told = {line[line.index("RANK") :].split()[2] for line in out.splitlines() if "RANK " in line}
    assert process.returncode == 0, out[-4000:]
    assert len(told) == 1, out[-4000:]
    return told.pop()


def trained(folder, *jobs):
    """Trainings one after the other on two ranks: of each what both ranks tell, which is the same."""
    outcomes = values(spawn_ranks(titan_runs.on_rank, 2, folder, jobs, timeout_s=240))
    both = []
    for number, one in enumerate(outcomes[0]):
        other = outcomes[1][number]
        assert (type(one), isinstance(one, str) and one) == (type(other), isinstance(other, str) and other), (
            one,
            other,
        )
        both.append(one)
    return both


def names(folder):
    return sorted((path.name for path in folder.glob("step-*")), key=lambda name: int(name[5:]))


@pytest.fixture
def uninterrupted(tmp_path):
    """What a training in one piece with stock's manager tells; made before the test, which kills all that it has started."""
    return trained(tmp_path / "reference", (24, {"manager": "stock", "interval": 100}))[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_that_is_killed_again_and_again_ends_as_an_uninterrupted_one(tmp_path, uninterrupted):
    """SIGKILL to all ranks at random moments, again and again: weights, optimizer, schedule and data are equal to the bit."""
    options = {"interval": 1, "async_mode": "async"}
    folder = tmp_path / "killed"
    events = folder / "checkpoint/.safe_ckpt/events.jsonl"
    seed = int.from_bytes(os.urandom(2))
    chance = random.Random(seed)
    for kill in range(3 if THOROUGH else 2):
        process = launch(folder, 24, **options)
        before = events.read_text().count('"committed"') if events.exists() else 0
        deadline = time.monotonic() + scaled(120)
        while time.monotonic() < deadline and process.poll() is None:
            if events.exists() and events.read_text().count('"committed"') >= before + 3:
                break
            time.sleep(0.005)
        time.sleep(chance.random() * 0.1)
        assert process.poll() is None, (
            f"kill {kill}: it ended before it could be killed: {process.communicate()[0][-3000:]}"
        )
        kill_all()
        process.communicate()
    assert ended(launch(folder, 24, **options)) == uninterrupted, f"random seed {seed}"
    assert names(folder / "checkpoint") == ["step-22", "step-23", "step-24"]
    for name in names(folder / "checkpoint"):
        verify_files(folder / "checkpoint" / name, read_manifest(folder / "checkpoint" / name))
    assert list((folder / "checkpoint/.safe_ckpt/pending").rglob("*")) == []
    assert writer_processes() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_manager_goes_on_from_the_others_checkpoints(tmp_path):
    """Stock goes on from ours and ours from stock's, in every mode, to the bits of a training in one piece."""
    mine, theirs = {"dump": tmp_path / "mine"}, {"dump": tmp_path / "theirs", "manager": "stock"}
    told = trained(
        tmp_path / "whole",
        (8, {"manager": "stock", "interval": 100}),
        (4, {**mine, "async_mode": "async"}),
        (6, {**mine, "async_mode": "async_with_pinned_mem"}),
        (8, {**mine, "manager": "stock"}),
        (4, theirs),
        (8, {"dump": tmp_path / "theirs"}),
    )
    assert told[0] == told[3] == told[5], told
    assert len(set(told)) == 3, told
    assert sorted(os.listdir(tmp_path / "theirs/checkpoint")) == [".safe_ckpt", "step-2", "step-4", "step-6", "step-8"]
    ours = tmp_path / "theirs/checkpoint/step-8"
    manifest = read_manifest(ours)
    verify_files(ours, manifest)
    assert (manifest.step, manifest.notes["adapter"]) == (8, "torchtitan")
    stock, own = (
        dcp.FileSystemReader(tmp_path / kind / "checkpoint/step-8").read_metadata() for kind in ("mine", "theirs")
    )
    assert set(stock.state_dict_metadata) == set(own.state_dict_metadata)
    assert stock.planner_data == own.planner_data


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_takes_the_newest_that_is_whole_and_one_that_is_named_must_be(tmp_path):
    """A damaged checkpoint is passed over and moved away by all ranks; asked for by ``load_step`` it is refused on all."""
    whole, broken = trained(tmp_path / "whole", (8, {"interval": 100}), (6, {"dump": tmp_path}))
    damaged = tmp_path / "checkpoint/step-6/__0_0.distcp"
    flip_bit(damaged, damaged.stat().st_size // 2)
    (tmp_path / "checkpoint/step-7").mkdir()  # as a save of stock that was killed leaves it
    refused, missing, again = trained(tmp_path, (8, {"load_step": 6}), (8, {"load_step": 5}), (8, {}))
    assert isinstance(refused, SafeCheckpointError), refused
    assert isinstance(missing, FileNotFoundError), missing
    assert again == whole != broken
    assert names(tmp_path / "checkpoint") == ["step-4", "step-6", "step-7", "step-8"]
    assert [path.name for path in (tmp_path / "checkpoint/.safe_ckpt/quarantine").iterdir()] != []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_model_alone_at_the_end_is_no_place_to_go_on_from(tmp_path):
    """With ``last_save_model_only`` a longer training goes on from the newest whole checkpoint, where stock ends in an error.

    That is so for one that stock has written, too. Where there is no other one, all ranks say so.
    """
    last = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    told = trained(
        tmp_path / "whole",
        (8, {"interval": 100}),
        (5, {**last, "dump": tmp_path / "mine"}),
        (8, {"dump": tmp_path / "mine", "manager": "stock"}),
        (8, {"dump": tmp_path / "mine"}),
        (5, {**last, "dump": tmp_path / "theirs", "manager": "stock"}),
        (8, {"dump": tmp_path / "theirs"}),
        (3, {**last, "dump": tmp_path / "alone", "interval": 100}),
        (8, {"dump": tmp_path / "alone"}),
    )
    assert "Missing key" in str(told[2]), told[2]
    assert told[3] == told[5] == told[0]
    assert isinstance(told[7], NoValidCheckpointError), told[7]
    assert "weights only" in str(told[7])
