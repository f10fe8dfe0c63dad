"""Lightning's ModelParallelStrategy (FSDP2) on two ranks: sharded directories and full files, kills, and what others read."""

import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning_scripts import fingerprints, killed, run
from safetensors.torch import load_file

from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.lightning import strategies
from safe_ckpt.lightning.checkpoint_io import SafeCheckpointIO
from safe_ckpt.lightning.saver import TrainerSaver
from support import flip_bit, kill_group, program_path, start_script, writer_processes


def test_killed_runs_go_on_bit_for_bit_and_shapes_of_checkpoints_change(tmp_path):
    """A sharded run that is killed ends as an uninterrupted full one; a full file and a sharded directory replace each other.

    Top-k and ``last`` are directories then, verified, with nothing left in pending; a full run goes on from a sharded one.
    """
    program = "trains_sharded_or_full"
    exp, over = tmp_path / "exp", tmp_path / "over" / "it.ckpt"
    reference = run(program, tmp_path / "reference", "full", 14, over)
    assert reference.returncode == 0, reference.stderr[-3000:]
    assert over.is_file()
    seed = int.from_bytes(os.urandom(2))
    killed(program, exp, "sharded", 14, over, commits=5, chance=random.Random(seed))
    done = run(program, exp, "sharded", 14, over)
    assert done.returncode == 0, done.stderr[-3000:]
    assert fingerprints(done.stdout) == fingerprints(reference.stdout), f"random seed {seed}"
    assert len(fingerprints(done.stdout)) == 1
    assert over.is_dir()
    kept = sorted(path for path in exp.iterdir() if path.suffix == ".ckpt")
    assert [path.name for path in kept] == ["epoch=13-step=27.ckpt", "epoch=13-step=28.ckpt", "last.ckpt"]
    for path in [*kept, over]:
        assert path.is_dir()
        verify_files(path, read_manifest(path))
    assert list((exp / ".safe_ckpt/pending").rglob("*")) == []
    more = run(program, exp, "full", 15, over)  # resumes from the sharded directory, writes files
    assert more.returncode == 0, more.stderr[-3000:]
    assert over.is_file()
    assert (exp / "last.ckpt").is_file()
    assert (exp / "epoch=14-step=30.ckpt").is_file()
    assert torch.load(exp / "last.ckpt", weights_only=True)["global_step"] == 30
    assert writer_processes() == []


@pytest.mark.thorough
def test_stock_tools_read_ours_and_ours_resumes_stocks_directories(tmp_path):
    """Stock strategy, Lightning's consolidation, an unsharded Trainer; its directories are resumed; damage is refused."""
    done = run("reads_as_other_tools_do", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("CorruptCheckpointError") == 2, done.stdout
    expected = torch.load(tmp_path / "expected.pt")
    exported = load_file(tmp_path / "explicit/weights/model.safetensors")  # at the end of fit
    assert exported.keys() == expected.keys()
    last_weights = torch.load(tmp_path / "explicit/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(exported[name], last_weights[name]) for name in exported)
    last = tmp_path / "sharded/last.ckpt"
    command = [sys.executable, "-W", "ignore", "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(last)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    merged = torch.load(f"{last}.consolidated", weights_only=False)
    for name, value in expected.items():
        assert torch.equal(merged["state_dict"][name], value), name
    full = torch.load(tmp_path / "explicit/last.ckpt", weights_only=True)
    after = torch.load(tmp_path / "explicit/after.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(after[name], exported[name]) for name in exported)
    assert full["state_dict"].keys() == expected.keys()
    assert sorted(full["optimizer_states"][0]["state"]) == list(range(len(expected)))
    moment = full["optimizer_states"][0]["state"][0]["exp_avg"]
    assert moment.shape == expected["net.0.weight"].shape
    names = {entry.path for entry in read_manifest(last).files}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}
    json.loads((last / "manifest.json").read_text())
    flip_bit(last / "meta.pt", 100)
    with pytest.raises(ValueError, match=r"meta\.pt"):
        verify_files(last, read_manifest(last))


def test_a_rank_that_stops_within_a_full_save_is_named(tmp_path):
    """Lightning's own gather would wait for the group's timeout of half an hour; rank 0 raises within seconds."""
    (tmp_path / "exp").mkdir()
    process = start_script(program_path("stops_within_a_gather"), str(tmp_path / "exp"))
    try:
        said = _read_until(process, "NAMED", 60)
        assert "NAMED PeerLostError (1,)" in said, said
    finally:
        kill_group(process)
        process.stdout.close()


def _read_until(process, word, seconds):
    deadline, lines = time.monotonic() + seconds, []
    for line in process.stdout:
        lines.append(line)
        if word in line or time.monotonic() > deadline:
            break
    return "".join(lines)


class DeepSpeedStrategy:
    """One that says what it was asked to load: the name alone makes it one that loads directories in collectives."""

    def load_checkpoint(self, path):
        return f"loaded {path}"


def _load_what_one_rank_sees(rank, folder):
    strategy = DeepSpeedStrategy()
    trainer = SimpleNamespace(strategy=strategy, fit=lambda: None)
    saver = TrainerSaver(trainer, CheckpointConfig(timeouts=Timeouts(barrier_s=20)), SafeCheckpointIO(None))
    strategies.guard(trainer, saver)
    os.chdir(folder / str(rank))  # one name is another folder on each rank
    try:
        return strategy.load_checkpoint("runs/step-00000001")
    except SafeCheckpointError as error:
        return repr(error)
    finally:
        saver.close(quiet=True)


def test_rank_0_decides_for_all_whether_a_load_is_verified_together(tmp_path):
    """A checkpoint that rank 1 alone sees: whether all verify it together is what rank 0 says, not each for itself."""
    (tmp_path / "0").mkdir()
    with Checkpointer(tmp_path / "1/runs") as ckpt:
        ckpt.save(1, {"x": 1}).result()
    ends = values(spawn_ranks(_load_what_one_rank_sees, 2, tmp_path))
    assert ends == ["loaded runs/step-00000001"] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_frozen_parts_of_each_rank_are_written_once(tmp_path):
    """Each rank's frozen part has one name in each checkpoint, through a resume; ``dcp.load`` reads the directory."""
    exp = tmp_path / "exp"
    done = run("trains_with_a_frozen_layer", exp, 4)
    assert done.returncode == 0, done.stderr[-3000:]
    frozen = [path.stat().st_nlink for path in exp.glob("*.ckpt/__*_1.distcp")]
    assert len(frozen) >= 4
    assert set(frozen) == {len(frozen) // 2}
    done = run("trains_with_a_frozen_layer", exp, 6)
    assert done.returncode == 0, done.stderr[-3000:]
    last = exp / "last.ckpt"
    verify_files(last, read_manifest(last))
    assert os.stat(last / "__0_1.distcp").st_nlink > 1, "sharing goes on after the resume"
    read = {"state_dict": {"net.1.weight": torch.zeros(800, 800)}}
    dcp.load(read, checkpoint_id=last, no_dist=True)
    assert read["state_dict"]["net.1.weight"].abs().sum() > 0
