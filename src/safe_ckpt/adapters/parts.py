"""A model and its optimizer of which every rank may have parts: what is saved of them, and how it comes back.

The layout is that of Accelerate's FSDP2: a directory of ``torch.distributed.checkpoint`` for each, with all of it below one
key. It comes back on any mesh and any number of ranks, also where every rank has the whole. Every rank reads what it needs;
nothing here is a collective of the framework's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.formats.names import plain_names
from safe_ckpt.core.resuming import one_resume
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import Fitted
from safe_ckpt.core.storage import presence
from safe_ckpt.errors import RestoreError

if TYPE_CHECKING:
    import torch

    from safe_ckpt.core.saving.engine import Engine

MODEL = "model"
OPTIMIZER = "optimizer"
"""The keys below which the states lie."""


@dataclass(frozen=True, kw_only=True)
class WholeTensor:
    """A whole tensor in a checkpoint.

    Attributes:
        shape: its shape.
        fetch: reads it.
    """

    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]


def is_saved(folder: Path) -> bool:
    """Whether a directory is one of ``torch.distributed.checkpoint``."""
    return presence.is_there(folder / DCP_METADATA)


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return what is saved of a model. On every rank."""
    state = model.state_dict()
    return {MODEL: {plain: state[name] for name, plain in plain_names(state, model).items()}}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what is saved of the optimizer that steps a model's parameters, by their names. On every rank."""
    from safe_ckpt.core.sharding import dcp_read  # DCP takes a while to import

    return {OPTIMIZER: dcp_read.optimizer_state(dcp_read.module_stepped_by(optimizer, {MODEL: model}), optimizer)}


def load_model(engine: Engine, folder: Path, model: torch.nn.Module) -> None:
    """Give a model what ``model_state`` was. Every rank calls this, for a directory that was verified.

    Raises:
        RestoreError: it does not fit, on any rank; on every rank, and nothing was applied.
    """
    from safe_ckpt.core.sharding import dcp_read

    _load(engine, folder, MODEL, lambda: dcp_read.fit_module(dcp_read.Stored(folder, MODEL), model))


def load_optimizer(engine: Engine, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer what ``optimizer_state`` was. Every rank calls this, for a directory that was verified.

    Raises:
        RestoreError: it does not fit, on any rank; on every rank, and nothing was applied.
    """
    from safe_ckpt.core.sharding import dcp_read

    def fit() -> Fitted:
        return dcp_read.fit_optimizer(dcp_read.Stored(folder, OPTIMIZER), model, optimizer)

    _load(engine, folder, OPTIMIZER, fit)


def load_whole(
    engine: Engine, path: Path, model: torch.nn.Module, tensors: Callable[[], Mapping[str, WholeTensor]]
) -> None:
    """Give a model of parts whole weights: every rank reads all of them, one after the other, and keeps its parts.

    Args:
        engine: where the ranks meet.
        path: of the checkpoint.
        model: that gets them.
        tensors: returns them by name. A tied one may be there under one of its names.

    Raises:
        RestoreError: they do not fit, on any rank; on every rank, and nothing was applied.
    """
    _load(engine, path, MODEL, lambda: _fit_whole(model, tensors()))


def _fit_whole(model: torch.nn.Module, tensors: Mapping[str, WholeTensor]) -> Fitted:
    own = model.state_dict()
    tied: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), set()).add(name)
    there = {name for names in tied.values() if names & tensors.keys() for name in names} | tensors.keys()
    if missing := sorted(own.keys() - there):
        raise RestoreError(message=f"the checkpoint has nothing for {missing}")
    fitting = own.keys() & tensors.keys()
    for name in sorted(fitting):
        if tuple(own[name].shape) != tensors[name].shape:
            message = f"{name} is {tuple(own[name].shape)}, the checkpoint has {tensors[name].shape}"
            raise RestoreError(message=message)

    def apply(_: Collection[str]) -> torch.nn.Module:
        for name in sorted(fitting):
            dtensor.copy_part(own[name], tensors[name].fetch())
        return model

    return Fitted(apply=apply, besides=sorted(tensors.keys() - own.keys()), refusal="the model has no place for")


def _load(engine: Engine, path: Path, what: str, fit: Callable[[], Fitted]) -> None:
    fitted: list[Fitted] = []

    def compare() -> dict[str, Any]:
        fitted.append(fit())
        return fitted[0].said

    def decide(answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
        return dtensor.without_place([answers[rank] for rank in sorted(answers)], path=str(path), key=what)

    nowhere = engine.agree(f"{what} fits", must_match={"path": path}, local=compare, decide=decide, phase="restore")
    one_resume.apply(engine, lambda: fitted[0].apply(nowhere))
