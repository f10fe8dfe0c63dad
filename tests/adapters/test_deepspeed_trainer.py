"""The Trainer of Transformers with DeepSpeed, on two ranks on the CPU: killed, resumed and compared bit for bit.

Accelerate starts DeepSpeed on accelerators only: its processes are told their numbers. The Trainers and the engines are real.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
import deepspeed_runs as runs
from deepspeed_runs import has_nvme, spawn

from kit.ranks import values
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import SafeCheckpointError

WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
pytestmark = pytest.mark.timeout(240)


def made(rank, folder, stage, kind, *, swap=None, gather=True, **more):
    """A Trainer under ZeRO; ``kind`` names a class of ``kinds``."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", LOCAL_RANK=str(rank))
    runs._deepspeed()
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from transformers_runs import trainer

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState()
    PartialState._shared_state.update(num_processes=2, process_index=rank, local_process_index=rank)
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gather}
    if swap is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(swap)}
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(WARMUP, "auto")},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    plain = {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
    return trainer(folder, kinds()[kind], deepspeed=settings, hidden=16 if swap is None else 1024, **plain, **more)


def kinds():
    from transformers import Trainer
    from transformers_runs import SafeTrainer

    class Scored(SafeTrainer):
        def evaluate(self, *args, **kwargs):
            return {"eval_loss": {2: 3.0, 4: 1.0}.get(self.state.global_step, 2.0)}

    class Failing(SafeTrainer):
        def save_model(self, *args, **kwargs):
            if self.args.process_index == 1:
                raise RuntimeError("mine")
            super().save_model(*args, **kwargs)

    return {"stock": Trainer, "safe": SafeTrainer, "scored": Scored, "failing": Failing}


def state_of(run):
    return {"weights": runs.weights(run.model_wrapped), "random": torch.get_rng_state()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train_and_die(rank, folder, stage):
    folder = Path(folder)
    straight = made(rank, folder / "stock", stage, "stock")
    straight.train()
    torch.save(state_of(straight), folder / f"want{rank}.pt")
    from transformers_runs import Die

    made(rank, folder / "ours", stage, "safe", save_steps=1, save_total_limit=3, callbacks=[Die()]).train()


def go_on(rank, folder, stage):
    folder = Path(folder)
    want = torch.load(folder / f"want{rank}.pt")
    resumed = made(rank, folder / "ours", stage, "safe", save_steps=1, save_total_limit=3)
    resumed.train(resume_from_checkpoint=True)
    found = [same(state_of(resumed), want)]
    for kind, run in (("stock", "ours"), ("safe", "stock")):
        again = made(rank, folder / run, stage, kind, save_strategy="no")
        again.train(resume_from_checkpoint=str(folder / run / "checkpoint-4"))
        found.append(same(state_of(again), want))
    return found, None


def go_on_and_more(rank, folder, stage):
    return go_on(rank, folder, stage)[0], variants(rank, folder)


def names(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def train_kill_and_go_on(tmp_path, stage, job):
    """Compared with an uninterrupted stock run. Returns what ``job`` found besides."""
    dead = spawn(train_and_die, str(tmp_path), stage)
    assert [outcome.exit_code for outcome in dead] == [-9, -9], dead
    found = values(spawn(job, str(tmp_path), stage))
    assert all(all(same) for same, _ in found), found
    assert names(tmp_path / "ours") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    for name in ("checkpoint-4", "checkpoint-6"):
        ours = tmp_path / "ours" / name
        assert files(ours) == files(tmp_path / "stock" / name) | {
            "manifest.json",
            "train_loader_0.pth",
            "train_loader_1.pth",
        }
        verify_files(ours, read_manifest(ours))
    return found[0][1]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 2])
def test_a_killed_trainer_goes_on_bit_for_bit(tmp_path, stage):
    """As below, in ZeRO 1 and 2."""
    train_kill_and_go_on(tmp_path, stage, go_on)


def with_swap(rank, folder, swap, start):
    run = made(rank, Path(folder) / "ours", 3, "safe", swap=Path(folder) / swap)
    run.train(resume_from_checkpoint=start)
    return state_of(run)


@pytest.mark.thorough
@pytest.mark.skipif(not has_nvme(), reason="DeepSpeed's asynchronous I/O is not built: make test-deepspeed")
def test_optimizer_states_on_nvme_go_on_bit_for_bit(tmp_path):
    """Which DeepSpeed (0.19.8) by itself begins anew with after a resume: those that were saved come back."""
    want = values(spawn(with_swap, str(tmp_path), "swap", None))
    path = tmp_path / "ours/checkpoint-4"
    assert list(path.glob("global_step4/offloaded_tensors/rank01/*.swp"))
    verify_files(path, read_manifest(path))
    found = values(spawn(with_swap, str(tmp_path), "swap again", str(path)))
    assert all(map(same, found, want))


def variants(rank, folder):
    folder = Path(folder)
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    run = made(rank, folder / "best", 2, "scored", max_steps=8, save_total_limit=1, load_best_model_at_end=True, **best)
    run.train()
    weights = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    for stage, name in ((2, "weights"), (3, "sharded weights")):
        made(rank, folder / name, stage, "safe", save_only_model=True, max_steps=2, gather=False).train()
    begun = time.monotonic()
    with pytest.raises(RuntimeError if rank == 1 else SafeCheckpointError, match="mine"):
        made(rank, folder / "failed", 3, "failing").train()
    assert time.monotonic() - begun < 20, "the others waited in a collective"
    return weights


def test_a_trainer_with_deepspeed_is_as_a_stock_one(tmp_path):
    """Killed in ZeRO 3, it goes on bit for bit, with stock's files, and from and to stock. Limits, the best, weights alone; an
    error of one process is raised on all at once."""
    from transformers import LlamaForCausalLM

    weights = train_kill_and_go_on(tmp_path, 3, go_on_and_more)
    assert names(tmp_path / "best") == ["checkpoint-4", "checkpoint-8"]
    state = json.loads((tmp_path / "best/checkpoint-8/trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-4"
    best = LlamaForCausalLM.from_pretrained(tmp_path / "best/checkpoint-4").state_dict()
    assert all(best[name].equal(value) for name, value in weights.items())
    alone = files(tmp_path / "weights/checkpoint-2")
    assert "model.safetensors" in alone
    assert not [name for name in alone if "global_step" in name or "rng" in name]
    parts = files(tmp_path / "sharded weights/checkpoint-2")
    assert "model.safetensors" not in parts
    assert {"latest", "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"} <= parts
    assert names(tmp_path / "failed") == []
