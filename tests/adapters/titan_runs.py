"""torchtitan's own Trainer on the CPU, with gloo: what it asks of an accelerator, and a CPU does not have, is given to it here.

As a program (one of several ranks): ``titan_runs.py FOLDER STEPS JSON``, where JSON has options of the checkpoint Config and,
as ``"manager"``, whether it is ``"safe"`` or ``"stock"``.
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed.fsdp
from torch.distributed.checkpoint.api import CheckpointException

SEQ_LEN = 16
_VOCABULARY = 2048


def on_cpu():
    """Before anything of torchtitan is imported: it runs on whatever accelerator torch finds, else it asks for CUDA."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0  # of torch.cpu it is a name
    torch.cpu.get_device_name = lambda device=None: "CPU"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    if not hasattr(
        torch.distributed, "set_timeout"
    ):  # newer than torch 2.13; torchtitan is made for torch's nightly builds
        torch.distributed.set_timeout = lambda timeout, group: None
    if find_spec("triton") is None:  # kernels for experts on GPUs, which every model imports
        kernels = ModuleType("torchtitan.distributed.minimal_async_ep")
        kernels.combine_op = kernels.dispatch_op = kernels.init_buffer = kernels.MinimalAsyncEPDispatchMetadata = None
        kernels.maybe_update_minimal_async_ep_config = lambda *_: None
        sys.modules[kernels.__name__] = sys.modules[f"{kernels.__name__}.api"] = kernels


def ready():
    """From now on the ranks that this process starts are forked from one that has imported torchtitan."""
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    os.environ["RANKS_PRELOAD"] = f"{os.environ.get('RANKS_PRELOAD', '')},titan_ready"


def parts():
    """What the Trainer builds from its Config besides the model: a tokenizer that knows no words, and data that are counted."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path=None):
            super().__init__()

        def encode(self, *args, **kwargs):
            return []

        def decode(self, *args, **kwargs):
            return ""

        def get_vocab_size(self):
            return _VOCABULARY

    class Numbers(torch.utils.data.IterableDataset):
        """Sequences that depend on their number alone; each rank takes its own, and knows where it is."""

        def __init__(self, rank, size):
            self.rank, self.size, self.next = rank, size, 0

        def __iter__(self):
            while True:
                generator = torch.Generator().manual_seed(self.next * self.size + self.rank)
                self.next += 1
                tokens = torch.randint(_VOCABULARY, (SEQ_LEN + 1,), generator=generator)
                yield {"input": tokens[:-1], "positions": torch.arange(SEQ_LEN)}, tokens[1:]

        def state_dict(self):
            return {"next": self.next}

        def load_state_dict(self, state):
            self.next = state["next"]

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, snapshot_every_n_steps, **_):
            options = {"batch_size": local_batch_size, "snapshot_every_n_steps": snapshot_every_n_steps}
            super().__init__(Numbers(dp_rank, dp_world_size), dp_rank, dp_world_size, **options)

    return Tokenizer, Loader


def config(folder, steps, manager="safe", **checkpoint):
    """The Config of a small Llama 3: attention without masks, as those of torchtitan need a compiler or a GPU."""
    import torchtitan.trainer
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    torchtitan.trainer.time = SimpleNamespace(
        sleep=lambda _: None, perf_counter=time.perf_counter
    )  # it sleeps at the end
    if manager == "safe":
        from safe_ckpt.torchtitan import SafeCheckpointManager as CheckpointManager
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    tokenizer, loader = parts()
    options = {"enable": True, "interval": 2, "last_save_model_only": False, "keep_latest_k": 3, **checkpoint}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(),
        tokenizer=tokenizer.Config(),
        dataloader=loader.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=2, seq_len=SEQ_LEN, steps=steps, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(**options),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )


def whole(value):
    """A tensor as all ranks together have it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def fingerprint(trainer):
    """Of everything that training goes on with, the same on all ranks: weights, optimizer, schedule, steps."""
    found = hashlib.sha256()
    states = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    for name in sorted(states):
        value = states[name]
        data = whole(value).detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        found.update(name.encode() + data)
    found.update(repr((trainer.lr_schedulers.state_dict(), trainer.state_dict())).encode())
    return found.hexdigest()[:16]


def train(folder, steps, **options):
    """A whole training, as torchtitan's ``train.py`` runs it. Returns its Trainer, closed."""
    trainer = config(folder, steps, **options).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale while it adds
    try:
        if options.get("create_seed_checkpoint"):
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()
    return trainer


def on_rank(rank, folder, jobs):
    """Trainings one after the other, in a process of ``spawn_ranks``; of each its fingerprint, or what it raised."""
    on_cpu()
    os.environ["LOCAL_RANK"] = str(rank)
    told = []
    for steps, given in jobs:
        options = {"dump": folder, **given}
        try:
            told.append(fingerprint(train(options.pop("dump"), steps, **options)))
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            told.append(error)
    return told


if __name__ == "__main__":
    on_cpu()
    made = train(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
    os.write(1, f"RANK {os.environ['RANK']} {fingerprint(made)}\n".encode())
    torch.distributed.destroy_process_group()
