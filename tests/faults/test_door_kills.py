"""SIGKILL of jobs that save by way of Fabric's plugin, of jobs beside which others load, and of models in parts."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kills import killed
from safetensors.torch import load_file

import safe_ckpt
from corpus.filled import value
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import NoValidCheckpointError

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_lose_nothing_that_fabric_saved(tmp_path):
    """One file that ``fabric.save`` replaces again and again is whole after each of 6 SIGKILLs (20), and never an older one."""
    path = tmp_path / "run/last.ckpt"
    for which, announced in killed("kills_fabric", path):
        found = torch.load(path) if path.exists() else {"step": 0, "w": torch.zeros(1)}
        assert found["step"] >= announced, which
        assert found["w"].unique().tolist() == [float(found["step"])], which


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_killed_jobs_leave_is_loaded_whole(tmp_path):
    """``safe_ckpt.load`` after each of 6 SIGKILLs (20), before any job has cleaned up: the newest announced one, or a newer."""
    for which, announced in killed("kills_checkpointer", tmp_path / "run"):
        state = {"step": 0, "w": {"w": torch.zeros(1 << 18)}}
        try:
            info = safe_ckpt.load(tmp_path / "run", state)
        except NoValidCheckpointError as error:
            if announced or error.rejected:
                raise
        else:
            assert info.step == state["step"] >= announced, which
            assert state["w"]["w"].unique().tolist() == [float(info.step)], which


@pytest.mark.thorough  # minutes: each start is one of the framework
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's own, which reads what ours saved
def test_kills_lose_nothing_of_a_model_that_is_sharded_at_load(tmp_path, monkeypatch):
    """Tensor parallel on two ranks, 20 SIGKILLs of both: whole weights and parts of what has a name are of one step.

    Each start goes on from what was announced or newer, with its weights and optimizer.
    """
    folders = [Path(__file__).parent, TESTS, TESTS / "adapters"]
    monkeypatch.syspath_prepend(folders[2])
    importlib.import_module("sharded_runs").base(tmp_path / "base")
    for which, announced in killed("kills_sharded", tmp_path, *folders):
        steps = {int(path.name.removeprefix("checkpoint-")): path for path in (tmp_path / "run").glob("checkpoint-*")}
        assert max(steps, default=0) >= announced, which
        for step, path in steps.items():
            verify_files(path, read_manifest(path))
            assert json.loads((path / "trainer_state.json").read_text())["global_step"] == step, which
            whole = load_file(path / "model.safetensors")
            parts = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
            dcp.load({"model": parts}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
            for name, tensor in whole.items():
                assert tensor.equal(parts[name]), (which, name)
                assert tensor.equal(value(name, step, tensor.shape)), (which, name)
