"""A Trainer whose model FSDP2 shards, on two gloo ranks.

Accelerate offers FSDP2 on accelerators only: it is told that these are some. All else is real.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaForCausalLM, Trainer
from transformers_runs import Die, SafeTrainer, names, trainer

from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import ConfigError, SafeCheckpointError

pytestmark = pytest.mark.timeout(240)


class OnCpus:
    def create_accelerator_and_postprocess(self):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


class Stock(OnCpus, Trainer):
    pass


class Safe(OnCpus, SafeTrainer):
    pass


def made(rank, folder, layout, kind=Safe, **more):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    config = {"version": 2, "state_dict_type": layout, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return trainer(folder, kind, fsdp=True, fsdp_config=config, **more)


def state_of(run):
    """A digest of weights, optimizer and generator of this rank."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    tensors = [*run.model.state_dict().values()]
    tensors += [value for state in run.optimizer.optimizer.state.values() for value in state.values()]
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def _train_and_die(rank, folder, layout):
    stock = made(rank, folder / "stock", layout, Stock)
    stock.train()
    (folder / f"want{rank}").write_text(state_of(stock))
    made(rank, folder / "ours", layout, save_steps=1, save_total_limit=3, callbacks=[Die()]).train()


def _go_on(rank, folder, layout):
    killed_at = max(int(name.removeprefix("checkpoint-")) for name in names(folder / "ours"))
    resumed = made(rank, folder / "ours", layout, save_steps=1, save_total_limit=3)
    resumed.train(resume_from_checkpoint=True)
    found = [state_of(resumed)]
    for kind, run in ((Stock, "ours"), (Safe, "stock")):
        again = made(rank, folder / run, layout, kind, save_strategy="no")
        again.train(resume_from_checkpoint=str(folder / run / "checkpoint-4"))
        found.append(state_of(again))
    return killed_at, found == [(folder / f"want{rank}").read_text()] * 3, None


def _go_on_and_more(rank, folder, layout):
    return *_go_on(rank, folder, layout)[:2], _variants(rank, folder)


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def train_kill_and_go_on(tmp_path, layout, job):
    """Compared with an uninterrupted stock run. Returns what ``job`` found besides."""
    dead = spawn_ranks(_train_and_die, 2, tmp_path, layout, init=False, timeout_s=90)
    assert [outcome.exit_code for outcome in dead] == [-9, -9]
    found = values(spawn_ranks(job, 2, tmp_path, layout, init=False, timeout_s=120))
    assert all(killed_at >= 3 and same for killed_at, same, _ in found), found
    assert names(tmp_path / "ours") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    for name in ("checkpoint-4", "checkpoint-6"):
        ours = tmp_path / "ours" / name
        assert files(ours) == files(tmp_path / "stock" / name) | {
            "manifest.json",
            "train_loader_0.pth",
            "train_loader_1.pth",
        }
        verify_files(ours, read_manifest(ours))
    return found[0][2]


@pytest.mark.thorough
def test_a_killed_trainer_goes_on_bit_for_bit_with_whole_files(tmp_path):
    """As below, with FULL_STATE_DICT."""
    train_kill_and_go_on(tmp_path, "FULL_STATE_DICT", _go_on)


class Scored(Safe):
    def evaluate(self, *args, **kwargs):
        return {"eval_loss": {2: 3.0, 4: 1.0}.get(self.state.global_step, 2.0)}


class Failing(Safe):
    def save_model(self, *args, **kwargs):
        if self.args.process_index == 1:
            raise RuntimeError("mine")
        super().save_model(*args, **kwargs)


def _variants(rank, folder):
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    run = made(rank, folder / "best", "FULL_STATE_DICT", Scored, max_steps=8, save_total_limit=1,
               load_best_model_at_end=True, **best)  # fmt: skip
    run.train()
    whole = {name: value.full_tensor() for name, value in run.model.state_dict().items()}
    run = made(rank, folder / "weights", "FULL_STATE_DICT", save_only_model=True, max_steps=2)
    run.train()
    begun = time.monotonic()
    with pytest.raises(RuntimeError if rank == 1 else SafeCheckpointError, match="mine"):
        made(rank, folder / "failed", "FULL_STATE_DICT", Failing).train()
    assert time.monotonic() - begun < 20, "the others waited in a collective"
    old = made(rank, folder / "old", "FULL_STATE_DICT")
    old.accelerator.state.fsdp_plugin.fsdp_version = 1  # to make one takes an accelerator
    with pytest.raises(ConfigError, match="state_dict_type"):
        old.train()
    return whole


def test_a_trainer_with_fsdp2_is_as_a_stock_one(tmp_path):
    """Killed, it goes on bit for bit, with stock's files, and from and to stock. Limits, the best, weights alone; an error of
    one process is raised on all at once; whole files of FSDP 1 are refused."""
    whole = train_kill_and_go_on(tmp_path, "SHARDED_STATE_DICT", _go_on_and_more)
    assert names(tmp_path / "best") == ["checkpoint-4", "checkpoint-8"]
    state = json.loads((tmp_path / "best/checkpoint-8/trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-4"
    best = LlamaForCausalLM.from_pretrained(tmp_path / "best/checkpoint-4").state_dict()
    assert all(best[name].equal(value) for name, value in whole.items())
    assert "model.safetensors" in files(tmp_path / "weights/checkpoint-2")
    assert not [name for name in files(tmp_path / "weights/checkpoint-2") if "optimizer" in name or "rng" in name]
    assert names(tmp_path / "failed") == []


class Half:
    """A Trainer that trains no attention."""

    def __init__(self, *, model, **more):
        for layer in model.model.layers:
            layer.self_attn.requires_grad_(requires_grad=False)
        super().__init__(model=model, **more)


class SafeHalf(Half, Safe):
    pass


class StockHalf(Half, Stock):
    pass


def _trains_a_part(rank, folder):
    sharded, size = "SHARDED_STATE_DICT", {"hidden": 640}
    first = made(rank, folder, sharded, SafeHalf, save_steps=1, max_steps=3, **size)
    first.train()
    again = made(rank, folder, sharded, SafeHalf, save_strategy="no", max_steps=3, **size)
    again.train(resume_from_checkpoint=True)
    stock = made(rank, folder, sharded, StockHalf, save_strategy="no", max_steps=3, **size)
    stock.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return {state_of(one) for one in (first, again, stock)}


def test_frozen_parts_of_each_rank_are_written_once(tmp_path):
    """A Trainer that trains no attention: each rank's part of it has one name in each of three checkpoints; stock reads it."""
    found = values(spawn_ranks(_trains_a_part, 2, tmp_path, init=False, timeout_s=200))
    assert [len(one) for one in found] == [1, 1]
    assert [path.stat().st_nlink for path in tmp_path.glob("checkpoint-*/pytorch_model_fsdp_0/__*_1.distcp")] == [3] * 6
