"""Accelerators of two gloo ranks whose models FSDP 1 shards.

Accelerate offers it on accelerators only; here the state is told by hand that this is one of FSDP, and that its device is the
CPU without a number, as FSDP wants it. All else is real.
"""

import os

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from accelerate_runs import forget, make, seed


def hold_whole_tensors():
    """From now on whole tensors are not moved to the CPU, where they are: torch 2.13 dies of SIGSEGV there when it moves them.

    Accelerate and Lightning ask for that at each save.
    """
    FullStateDictConfig.offload_to_cpu = property(lambda _: False, lambda *_: None)


def on_cpus():
    """From now on Accelerate takes the CPU for an accelerator."""
    PartialState._shared_state.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))


def accelerator(rank, folder, kind="SHARDED_STATE_DICT", *, orig=True, strategy="FULL_SHARD", **more):
    forget()
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], ACCELERATE_USE_FSDP="true")
    made = make(folder, **more)
    on_cpus()
    made.state.distributed_type, made.state.device = DistributedType.FSDP, torch.device("cpu")
    made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
        use_orig_params=orig,
        sharding_strategy=strategy,
    )
    if kind == "FULL_STATE_DICT":
        hold_whole_tensors()
    return made


def training(made, number=0):
    """A model, its optimizer and a schedule: prepared, nothing trained yet."""
    seed(number)
    model = made.prepare(torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 2)))
    optimizer = made.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
    return model, optimizer, made.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5))


def local_state(parts):
    """All that this rank has of weights, moments and learning rate, as it is in memory."""
    model, optimizer, _ = parts
    tensors = [one.detach().clone() for one in model.parameters()]
    for group in optimizer.optimizer.param_groups:
        tensors.append(torch.tensor(group["lr"]))
        for one in group["params"]:
            tensors += [v.detach().clone() for _, v in sorted(optimizer.optimizer.state.get(one, {}).items())]
    return tensors


def everything(model, optimizer):
    """Whole weights and moments by name, on every rank."""
    forms = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *forms):
        tensors = {name: value.clone() for name, value in model.state_dict().items()}
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {**tensors, **{f"{name}.{key}": one for name, of in state.items() for key, one in of.items()}}


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))
