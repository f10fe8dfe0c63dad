"""Random states: what a resume, a load and an export give back is what torch.save and torch.load would, or the save refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import safe_ckpt
from programs_of.draw import Draw
from programs_of.modules import Objects
from programs_of.runner import Verdict
from programs_of.same import difference
from programs_of.state_oracle import (
    QUICK,
    config_of,
    expected_of,
    held_tensors,
    judge,
    likeness,
    refusing,
    state_of,
    values_of,
    warned_of,
)
from programs_of.state_published import published
from programs_of.trees import Trees
from safe_ckpt import CheckpointConfig, Checkpointer, dcp
from safe_ckpt.core.sharding import dcp_load
from safe_ckpt.errors import HostileCheckpointError, SafeCheckpointError
from safe_ckpt.testing import inline_saves

OF_FRAMEWORKS = 200
"""From this seed on the doors of frameworks are among those that are tried: to import them takes longer than 200 states do."""
FIXED = (207, 211, 212, 215)
"""Seeds at doors of frameworks."""


class States:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Save a state at a door, and take it back."""
        doors = [_resume, _resume, _load, _export, _dcp, published]
        if draw.seed >= OF_FRAMEWORKS:
            from programs_of.state_frameworks import DOORS

            doors += DOORS
        door = draw.among("door", *doors)
        with inline_saves(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return door(draw, folder)


def _save_and(draw: Draw, folder: Path, take: Any) -> Verdict:
    state, told = state_of(draw, 0), []
    config = config_of(draw)
    steps = draw.among("steps", [9], [9, 10], [9, 10, 11])
    into = likeness(draw)
    # What torch itself does not save or load is no matter of ours; but a save that is made is resumed from.
    try:
        expected = expected_of(state, state_of(Draw(draw.seed, draw.made), 2))
    except Exception:
        expected = {name: values_of(one) for name, one in state.items()}
    with Checkpointer(folder / "run", config) as ckpt:
        with refusing(told, state):
            for step in steps:
                ckpt.save(step, state).result(timeout_s=60)
        if told:
            return Verdict(came_to="refused at the save")
    held = held_tensors(into)
    take(folder, config, steps[-1], into)
    for name, tensors in held.items():
        now = [*into[name].parameters(), *into[name].buffers()]
        if any(one is not other for one, other in zip(tensors, now, strict=True)):
            return Verdict(came_to="differs", wrong=f"identity: {name}: tensors of a module were replaced")
    return judge(expected, into, "equal", {name: values_of(one) for name, one in state.items()})


def _resume(draw: Draw, folder: Path) -> Verdict:
    def take(folder: Path, config: CheckpointConfig, step: int, into: dict[str, Any]) -> None:
        with Checkpointer(folder / "run", config) as ckpt:
            info = ckpt.resume(into)
        if info is None or info.step != step:
            raise ValueError(f"resumed {info} instead of step {step}")

    return _save_and(draw, folder, take)


def _load(draw: Draw, folder: Path) -> Verdict:
    verify = draw.among("verify", True, False)

    def take(folder: Path, config: CheckpointConfig, step: int, into: dict[str, Any]) -> None:
        safe_ckpt.load(folder / "run", into, step=step, verify=verify)

    return _save_and(draw, folder, take)


def _export(draw: Draw, folder: Path) -> Verdict:
    """Tensors as safetensors; ``torch`` itself is the oracle of the values."""
    trees, objects = Trees(draw, 0), Objects(draw, 0)
    made = draw.among("exported", objects.module, trees.tensors)
    given = made("x") if made == objects.module else made("x", draw.number("tensors", 0, 5))
    told: list[str] = []
    tensors = given.state_dict() if isinstance(given, torch.nn.Module) else dict(given)
    most = draw.among("shard bytes", None, 1 << 10, "1MB")
    with Checkpointer(folder / "run", CheckpointConfig(timeouts=QUICK)) as ckpt:
        with refusing(told, [*tensors, "x"]):
            ckpt.export(given, folder / "weights", **({} if most is None else {"max_shard_size": most})).result(
                timeout_s=60
            )
        if told:
            return Verdict(came_to="refused at the export")
    found: dict[str, torch.Tensor] = {}
    for file in (folder / "weights").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    kept = {name: one for name, one in tensors.items() if isinstance(one, torch.Tensor)}
    missing = kept.keys() - found.keys()
    for name in missing:  # of several names of one tensor one may be kept
        if not any(_is_same_memory(kept[name], kept[other]) for other in kept.keys() - missing):
            return Verdict(came_to="differs", wrong=f"missing: {name} of {sorted(kept)}")
    for name, one in found.items():
        plain = kept[name].detach().as_subclass(torch.Tensor)
        plain = plain.to_dense() if plain.layout is not torch.strided else plain
        if how := difference({"x": plain.resolve_conj().resolve_neg().contiguous()}, {"x": one}):
            return Verdict(came_to="differs", wrong=f"{how} {name}")
    return Verdict(came_to="exported")


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    )


def _dcp(draw: Draw, folder: Path) -> Verdict:
    """In place, as stock dcp.load does: state dicts of modules and optimizers, and values of other kinds."""
    state = {name: values_of(one) for name, one in state_of(draw, 0).items()}
    into = {name: values_of(one) for name, one in state_of(Draw(draw.seed, draw.made), 1).items()}
    told: list[str] = []
    dcp_load._judged.clear()  # it warns once for each class
    with refusing(told, state), warned_of() as warned:
        dcp.save(state, checkpoint_id=folder / "saved", no_dist=True)
    if told:
        return Verdict(came_to="refused at the save")
    try:
        dcp.load(into, checkpoint_id=folder / "saved", no_dist=True)
    except SafeCheckpointError as error:
        if isinstance(error, HostileCheckpointError) and "a load will refuse" in warned.said:
            return Verdict(came_to="a warning at the save, and the load refuses it")
        if _stock_dcp(draw, folder) is None:
            return Verdict(came_to="no load takes it, nor that of stock")
        return Verdict(came_to="differs", wrong=f"load: {type(error).__name__}: {error}")
    expected = _stock_dcp(draw, folder)
    if expected is None:
        return Verdict(came_to="loaded where stock is not")
    return judge(expected, into, "equal", state)


def _stock_dcp(draw: Draw, folder: Path) -> dict[str, Any] | None:
    import torch.distributed.checkpoint as stock

    state = {name: values_of(one) for name, one in state_of(Draw(draw.seed, draw.made), 0).items()}
    into = {name: values_of(one) for name, one in state_of(Draw(draw.seed, draw.made), 1).items()}
    try:
        stock.save(state, checkpoint_id=folder / "stock", no_dist=True)
        stock.load(into, checkpoint_id=folder / "stock", no_dist=True)
    except (Exception, stock.CheckpointException):
        return None
    return into
