"""A tiny randomly initialised model and its Trainer."""

import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig
from safe_ckpt.transformers import SafeCheckpointMixin

CONFIG = CheckpointConfig(timeouts=QUICK)


class SafeTrainer(SafeCheckpointMixin, Trainer):
    checkpoint_config = CONFIG


class Die(TrainerCallback):
    """SIGKILL, on every rank, while the newest checkpoint may still be written."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def model(hidden=16, *, bias=False):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=hidden, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32, tie_word_embeddings=True, attention_dropout=0.1,
            attention_bias=bias,
        )
    )  # fmt: skip


def data(count=24):
    rows = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    folder, kind=SafeTrainer, *, of=None, model_init=None, hidden=16, callbacks=(), arguments=TrainingArguments, **more
):
    settings = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "save_steps": 2, "use_cpu": True,
        "save_strategy": "steps", "report_to": [], "disable_tqdm": True, "logging_steps": 100, "learning_rate": 1e-2,
        **more,
    }  # fmt: skip
    known = {"model_init": model_init} if model_init is not None else {"model": model(hidden) if of is None else of}
    return kind(
        **known, args=arguments(**settings), train_dataset=data(), eval_dataset=data(4), callbacks=list(callbacks)
    )


def fingerprint(made):
    digest = hashlib.sha256()
    for tensor in made.model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    for state in made.optimizer.optimizer.state.values():
        for tensor in state.values():
            digest.update(tensor.numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()[:16]


def names(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            raise KeyboardInterrupt


class Leave(TrainerCallback):
    """Ends a run that is resumed before its first step."""

    def on_train_begin(self, *_, **__):
        raise KeyboardInterrupt
