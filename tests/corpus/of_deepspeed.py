"""What the corpus holds of DeepSpeed: a tag of ZeRO-2 within an epoch, and one of ZeRO-3, each of two ranks."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed_runs as runs
import torch

from corpus.filled import value
from kit.limits import PATIENT
from safe_ckpt import CheckpointConfig
from safe_ckpt.deepspeed import install

STEP, STAGES = 2, (2, 3)
CONFIG = CheckpointConfig(timeouts=PATIENT)
STATES = ("exp_avg", "exp_avg_sq")


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, torch.full((8,), index / 24)


def engine_of(stage):
    deepspeed = runs._deepspeed()
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 6))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    made = deepspeed.initialize(model=net, model_parameters=net.parameters(), training_data=Numbered(), config=config)
    return made[0]


def train(engine):
    """To the end of an epoch; a generator of the batches."""
    for index, inputs in engine.training_dataloader:
        engine.backward(engine(inputs).square().mean())
        engine.step()
        yield index.tolist()


def fill(engine):
    """What the model computes with, what the optimizer steps, and what it keeps."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    for name, parameter in engine.module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        with runs._deepspeed().zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value(name, STEP, shape))
        safe_set_full_fp32_param(parameter, value(name, STEP, shape))
        for kind in STATES:
            safe_set_full_optimizer_state(parameter, value(f"{name}/{kind}", STEP, shape), kind)


def same(engine):
    """Raise with the names of what is not as ``fill`` made it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # DeepSpeed makes this link at the next step, not at a load
    wrong = []
    for name, parameter in engine.module.named_parameters():
        with runs._deepspeed().zero.GatheredParameters([parameter]):
            found = {name: parameter.detach().clone()}
        found[f"{name}/of the optimizer"] = safe_get_full_fp32_param(parameter)
        found |= {f"{name}/{kind}": safe_get_full_optimizer_state(parameter, kind) for kind in STATES}
        for full, tensor in found.items():
            if not torch.equal(tensor, value(full.removesuffix("/of the optimizer"), STEP, tensor.shape)):
                wrong.append(full)
    assert not wrong, wrong


def save(rank, folder):
    for stage in STAGES:
        engine = engine_of(stage)
        with install(engine, CONFIG, resume_data=True):
            for _ in train(engine):
                if engine.global_steps == STEP:
                    fill(engine)
                    engine.save_checkpoint(folder / f"deepspeed_zero{stage}", client_state={"epoch": 7})
                    break


def resume(rank, folder):
    """The batches that are left, for each stage."""
    return [resume_one(folder / f"deepspeed_zero{stage}", engine_of(stage)) for stage in STAGES]


def resume_one(folder, engine):
    with install(engine, CONFIG, resume_data=True):
        path, client = engine.load_checkpoint(folder)
        assert path is not None
        assert client["epoch"] == 7
        assert engine.global_steps == STEP
        same(engine)
        return list(train(engine))
