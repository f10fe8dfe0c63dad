"""Random states: what a resume, a load and an export give back is what torch.save and torch.load would, or the save refuses."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import safe_ckpt
from programs_of.draw import Draw
from programs_of.modules import Objects
from programs_of.runner import Verdict
from programs_of.same import difference
from programs_of.trees import Stateful, Trees
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, RngState, Timeouts, dcp
from safe_ckpt.core.sharding import dcp_load
from safe_ckpt.errors import HostileCheckpointError, SafeCheckpointError, StateError
from safe_ckpt.testing import inline_saves

_QUICK = Timeouts(barrier_s=20, peer_stall_s=10, lengthy_s=60)


class States:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Save a state at a door, and take it back."""
        door = draw.among("door", _resume, _resume, _load, _export, _dcp)
        with inline_saves(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return door(draw, folder)


def _config(draw: Draw) -> CheckpointConfig:
    snapshot = draw.among("snapshot", "auto", "eager", "overlapped")
    return CheckpointConfig(
        timeouts=_QUICK, snapshot=snapshot, max_host_bytes=draw.among("most bytes", None, None, 1 << 20)
    )


def _state(draw: Draw, values: int) -> dict[str, Any]:
    """Items; with other values, the same kinds."""
    trees, objects = Trees(draw, values), Objects(draw, values)
    state: dict[str, Any] = {}
    for n in range(draw.number("items", 1, 4)):
        name = draw.among(f"{n}/name", f"item{n}", f"item{n}", f"my.{n}", f"ümlaut{n}", f"item-{n + 9}")
        kind = draw.among(
            f"{n}/item", "tree", "tree", "tensors", "module", "optimizer", "scheduler", "stateful", "rng", "per rank"
        )
        state[name] = {
            "tree": lambda n=n: trees.tree(str(n), 3),
            "tensors": lambda n=n: trees.tensors(str(n), draw.number(f"{n}/tensors", 0, 5)),
            "module": lambda n=n: objects.module(str(n)),
            "optimizer": lambda n=n: objects.optimizer(str(n)),
            "scheduler": lambda n=n: objects.scheduler(str(n)),
            "stateful": lambda n=n: Stateful(trees.tree(str(n), 2)),
            "rng": RngState,
            "per rank": lambda n=n: PerRank(trees.tree(str(n), 2)),
        }[kind]()
    return state


def _values(one: Any) -> Any:
    """What of an item is saved."""
    if isinstance(one, PerRank):
        return _values(one.value)
    return one.state_dict() if hasattr(one, "state_dict") else one


def _as_torch_has_it(value: Any) -> Any:
    """Through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _expected(state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Item by item, what stock gives; ``fresh`` are objects of its own to load into."""
    found = {}
    for name, one in state.items():
        kept = _as_torch_has_it(_values(one))
        if hasattr(one, "load_state_dict") and not isinstance(one, RngState):
            fresh[name].load_state_dict(kept)
            found[name] = _as_torch_has_it(fresh[name].state_dict())
        else:
            found[name] = kept
    return found


@contextlib.contextmanager
def _refusing(told: list[str], names: Any) -> Iterator[None]:
    """A refusal of a save, which names what cannot be saved."""
    try:
        yield
    except StateError as error:
        told.append(str(error))
        if not any(str(name) in str(error) for name in names):
            raise


def _judge(
    expected: dict[str, Any], found: dict[str, Any], came_to: str, saved: dict[str, Any] | None = None
) -> Verdict:
    """Each item is as stock gives it, or as it was saved, which stock may not give."""
    for name, wanted in expected.items():
        how = difference(wanted, _values(found[name]))
        if how and saved is not None and not difference(saved[name], _values(found[name])):
            continue
        if how.startswith(("object: one object", "attribute")) and is_tensors_only(wanted):
            came_to = "as formats.md says"
        elif how:
            kind, _, rest = how.partition(":")
            return Verdict(
                came_to="differs",
                wrong=f"{kind}: {name}{rest}",
                detail=f"{expected[name]!r:.900}\n{_values(found[name])!r:.900}",
            )
    return Verdict(came_to=came_to)


def is_tensors_only(value: Any) -> bool:
    """Of a safetensors file: several names of one view are one tensor after it, and attributes of one's own are lost."""
    return isinstance(value, torch.Tensor) or (
        isinstance(value, dict) and all(isinstance(one, torch.Tensor) for one in value.values())
    )


class Warned(logging.Handler):
    """What a load will refuse is a warning of a dcp save, as stock saves it: its class may be allowed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        self.said += record.getMessage()


@contextlib.contextmanager
def _warned() -> Iterator[Warned]:
    handler, logger = Warned(), logging.getLogger("safe_ckpt")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def _into(draw: Draw) -> dict[str, Any]:
    """What is resumed into: likenesses with other values, or nothing where that is enough."""
    other = _state(Draw(draw.seed, draw.made), 1)
    objects = {name: one for name, one in other.items() if hasattr(_bare(one), "load_state_dict")}
    if draw.flag("into nothing"):
        other = {
            name: objects.get(name, PerRank(None) if isinstance(one, PerRank) else None) for name, one in other.items()
        }
    return other


def _bare(one: Any) -> Any:
    return one.value if isinstance(one, PerRank) else one


def _held(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Tensors that have to be the same objects afterwards: parameters and buffers of modules."""
    return {
        name: [*one.parameters(), *one.buffers()] for name, one in state.items() if isinstance(one, torch.nn.Module)
    }


def _save_and(draw: Draw, folder: Path, take: Any) -> Verdict:
    state, told = _state(draw, 0), []
    config = _config(draw)
    steps = draw.among("steps", [9], [9, 10], [9, 10, 11])
    into = _into(draw)
    # What torch itself does not save or load is no matter of ours; but a save that is made is resumed from.
    try:
        expected = _expected(state, _state(Draw(draw.seed, draw.made), 2))
    except Exception:
        expected = {name: _values(one) for name, one in state.items()}
    with Checkpointer(folder / "run", config) as ckpt:
        with _refusing(told, state):
            for step in steps:
                ckpt.save(step, state).result(timeout_s=60)
        if told:
            return Verdict(came_to="refused at the save")
    held = _held(into)
    take(folder, config, steps[-1], into)
    for name, tensors in held.items():
        now = [*into[name].parameters(), *into[name].buffers()]
        if any(one is not other for one, other in zip(tensors, now, strict=True)):
            return Verdict(came_to="differs", wrong=f"identity: {name}: tensors of a module were replaced")
    return _judge(expected, into, "equal", {name: _values(one) for name, one in state.items()})


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
    with Checkpointer(folder / "run", CheckpointConfig(timeouts=_QUICK)) as ckpt:
        with _refusing(told, [*tensors, "x"]):
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
    state = {name: _values(one) for name, one in _state(draw, 0).items()}
    into = {name: _values(one) for name, one in _state(Draw(draw.seed, draw.made), 1).items()}
    told: list[str] = []
    dcp_load._judged.clear()  # it warns once for each class
    with _refusing(told, state), _warned() as warned:
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
    return _judge(expected, into, "equal", state)


def _stock_dcp(draw: Draw, folder: Path) -> dict[str, Any] | None:
    import torch.distributed.checkpoint as stock

    state = {name: _values(one) for name, one in _state(Draw(draw.seed, draw.made), 0).items()}
    into = {name: _values(one) for name, one in _state(Draw(draw.seed, draw.made), 1).items()}
    try:
        stock.save(state, checkpoint_id=folder / "stock", no_dist=True)
        stock.load(into, checkpoint_id=folder / "stock", no_dist=True)
    except (Exception, stock.CheckpointException):
        return None
    return into
