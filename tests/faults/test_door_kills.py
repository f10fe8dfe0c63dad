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
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.errors import NoValidCheckpointError

TESTS = Path(__file__).parents[1]
FABRIC = """
import sys, os, torch
from lightning.fabric import Fabric
from safe_ckpt.lightning import SafeCheckpointIO
fabric = Fabric(accelerator="cpu", devices=1, plugins=[SafeCheckpointIO()])
fabric.launch()
path, state = sys.argv[1], {"step": 0, "w": torch.zeros(1 << 18)}
if os.path.exists(path):
    fabric.load(path, state)
assert state["w"].unique().tolist() == [float(state["step"])]
print("BEGUN", state["step"], flush=True)
while True:
    state["step"] += 1
    state["w"].fill_(state["step"])
    fabric.save(path, state)
    print("DONE", state["step"], flush=True)
"""
CHECKPOINTER = """
import sys, torch
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
state = {"step": 0, "w": {"w": torch.zeros(1 << 18)}}
with Checkpointer(sys.argv[1], CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
    ckpt.resume(state)
    print("BEGUN", state["step"], flush=True)
    while True:
        state["step"] += 1
        state["w"]["w"].fill_(state["step"])
        ckpt.save(state["step"], state).result()
        print("DONE", state["step"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_lose_nothing_that_fabric_saved(tmp_path):
    """One file that ``fabric.save`` replaces again and again is whole after each of 6 SIGKILLs (20), and never an older one."""
    path = tmp_path / "run/last.ckpt"
    for which, announced in killed(FABRIC, path):
        found = torch.load(path) if path.exists() else {"step": 0, "w": torch.zeros(1)}
        assert found["step"] >= announced, which
        assert found["w"].unique().tolist() == [float(found["step"])], which


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_killed_jobs_leave_is_loaded_whole(tmp_path):
    """``safe_ckpt.load`` after each of 6 SIGKILLs (20), before any job has cleaned up: the newest announced one, or a newer."""
    for which, announced in killed(CHECKPOINTER, tmp_path / "run"):
        state = {"step": 0, "w": {"w": torch.zeros(1 << 18)}}
        try:
            info = safe_ckpt.load(tmp_path / "run", state)
        except NoValidCheckpointError as error:
            if announced or error.rejected:
                raise
        else:
            assert info.step == state["step"] >= announced, which
            assert state["w"]["w"].unique().tolist() == [float(info.step)], which


SHARDED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import two_ranks
rank = two_ranks.fork()
from sharded_runs import TP, made
from transformers import TrainerCallback
from corpus.filled import fill, same
from safe_ckpt.errors import NoValidCheckpointError

class Tells(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step:
            same(state.global_step, model, optimizer)
        two_ranks.tell(rank, f"BEGUN {state.global_step}")
        self.begun = state.global_step

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        fill(state.global_step, model, optimizer)
        if state.global_step > self.begun + 2:  # each save waits for the one before
            two_ranks.tell(rank, f"DONE {state.global_step - 2}")

folder = Path(sys.argv[1])
run = made(rank, folder / "run", folder / "base", TP, callbacks=[Tells()], max_steps=100000, save_total_limit=2,
           lr_scheduler_type="constant_with_warmup", disable_tqdm=True, learning_rate=1e-3)
for group in run.create_optimizer().param_groups:
    group["lr"] = 1e-3
try:
    run.train(resume_from_checkpoint=True)
except NoValidCheckpointError as error:
    if error.rejected:
        raise
    run.train()
"""


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
    for which, announced in killed(SHARDED, tmp_path, *folders):
        steps = {int(path.name.removeprefix("checkpoint-")): path for path in (tmp_path / "run").glob("checkpoint-*")}
        assert max(steps, default=0) >= announced, which
        for step, path in steps.items():
            verify(path, read_manifest(path))
            assert json.loads((path / "trainer_state.json").read_text())["global_step"] == step, which
            whole = load_file(path / "model.safetensors")
            parts = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
            dcp.load({"model": parts}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
            for name, tensor in whole.items():
                assert tensor.equal(parts[name]), (which, name)
                assert tensor.equal(value(name, step, tensor.shape)), (which, name)
