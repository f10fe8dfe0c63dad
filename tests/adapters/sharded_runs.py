"""Trainers of a tiny model that Transformers shards when it loads it, on gloo ranks.

Accelerate offers tensor parallelism on accelerators only: it is told that these are some. All else is real.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer
from transformers.distributed import DistributedConfig
from transformers_runs import SafeTrainer, model, trainer

TP = {"tp_size": 2}
TP_FSDP = {"tp_size": 2, "fsdp_size": 2}
FSDP = {"fsdp_size": 2}
EP = {"fsdp_size": 2, "ep_size": 2}
WHOLE = {}


class OnCpus:
    def create_accelerator_and_postprocess(self):
        if dist.is_initialized():
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


class Safe(OnCpus, SafeTrainer):
    pass


class Stock(OnCpus, Trainer):
    """A stock Trainer that saves nothing: the only one that trains such a model to its end."""


def base(folder, *, experts=False, bias=False):
    """A tiny model's files, as if they had been downloaded; ``experts`` have two weights in one."""
    (mixture() if experts else model(bias=bias)).save_pretrained(folder)


def mixture():
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def loaded(source, layout):
    """The model of this rank, sharded as ``layout`` says while it is loaded."""
    if not layout:
        return AutoModelForCausalLM.from_pretrained(source)
    return AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**layout))


def made(rank, folder, source, layout, kind=Safe, *, model_init=None, of=None, **more):
    """A Trainer; its model is loaded from ``source``, if it is not ``of`` or what ``model_init`` makes."""
    size = os.environ["WORLD_SIZE"]
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=size)
    if model_init is None and of is None:
        of = loaded(source, layout)
    return trainer(folder, kind, of=of, model_init=model_init, **{"save_steps": 1, **more})


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def of_optimizer(run):
    """The optimizer's state by the names of parameters."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    inner = getattr(run.optimizer, "optimizer", run.optimizer)
    return {
        f"{names[id(parameter)]}.{key}": value
        for parameter, state in inner.state.items()
        for key, value in state.items()
    }


def digest(run):
    """Of weights, optimizer, schedule and generator of this rank."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    tensors = {**run.model.state_dict(), **of_optimizer(run)}
    for name in sorted(tensors):
        found.update(name.encode() + local(tensors[name]).contiguous().numpy().tobytes())
    found.update(repr(run.lr_scheduler.get_last_lr()).encode())
    return found.hexdigest()[:16]


def everything(run):
    """Whole tensors of weights and optimizer by name, on every rank."""
    return {name: whole(value).clone() for name, value in {**run.model.state_dict(), **of_optimizer(run)}.items()}
