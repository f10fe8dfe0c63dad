"""What is saved by a program of the kind "states", and what has to come back: as torch.save and torch.load would have it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch

from programs_of.draw import Draw
from programs_of.modules import Objects
from programs_of.runner import Verdict
from programs_of.same import difference
from programs_of.trees import Stateful, Trees
from safe_ckpt import CheckpointConfig, PerRank, RngState, Timeouts
from safe_ckpt.errors import StateError

QUICK = Timeouts(barrier_s=20, peer_stall_s=10, lengthy_s=60)


def config_of(draw: Draw) -> CheckpointConfig:
    snapshot = draw.among("snapshot", "auto", "eager", "overlapped")
    return CheckpointConfig(
        timeouts=QUICK, snapshot=snapshot, max_host_bytes=draw.among("most bytes", None, None, 1 << 20)
    )


def state_of(draw: Draw, values: int) -> dict[str, Any]:
    """Items; with other values, the same kinds."""
    trees, objects = Trees(draw, values), Objects(draw, values)
    state: dict[str, Any] = {}
    for n in range(draw.number("items", 1, 4)):
        name = draw.among(f"{n}/name", f"item{n}", f"item{n}", f"my.{n}", f"ümlaut{n}", f"item-{n + 9}")
        kind = draw.among(
            f"{n}/item",
            "tree",
            "tree",
            "tensors",
            "tensors",
            "module",
            "optimizer",
            "scheduler",
            "stateful",
            "rng",
            "per rank",
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


def values_of(one: Any) -> Any:
    """What of an item is saved."""
    if isinstance(one, PerRank):
        return values_of(one.value)
    return one.state_dict() if hasattr(one, "state_dict") else one


def as_torch_has_it(value: Any) -> Any:
    """Through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def expected_of(state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Item by item, what stock gives; ``fresh`` are objects of its own to load into."""
    found = {}
    for name, one in state.items():
        kept = as_torch_has_it(values_of(one))
        if hasattr(one, "load_state_dict") and not isinstance(one, RngState):
            fresh[name].load_state_dict(kept)
            found[name] = as_torch_has_it(fresh[name].state_dict())
        else:
            found[name] = kept
    return found


@contextlib.contextmanager
def refusing(told: list[str], names: Any) -> Iterator[None]:
    """A refusal of a save, which names what cannot be saved."""
    try:
        yield
    except StateError as error:
        told.append(str(error))
        if not any(str(name) in str(error) for name in names):
            raise


def judge(
    expected: dict[str, Any], found: dict[str, Any], came_to: str, saved: dict[str, Any] | None = None
) -> Verdict:
    """Each item is as stock gives it, or as it was saved, which stock may not give."""
    for name, wanted in expected.items():
        how = difference(wanted, values_of(found[name]))
        if how and saved is not None and _is_as_saved(saved[name], values_of(found[name]), wanted):
            continue
        if how.startswith(("object: one object", "attribute")) and is_tensors_only(wanted):
            came_to = "as formats.md says"
        elif how:
            kind, _, rest = how.partition(":")
            return Verdict(
                came_to="differs",
                wrong=f"{kind}: {name}{rest}",
                detail=f"{expected[name]!r:.900}\n{values_of(found[name])!r:.900}",
            )
    return Verdict(came_to=came_to)


def _is_as_saved(saved: Any, found: Any, stock: Any) -> bool:
    """All of it; but names of one object may be two where stock makes them two as well."""
    how, others = difference(saved, found), difference(saved, stock)
    return not how or (how.startswith(("object:", "memory:")) and bool(others))


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
def warned_of() -> Iterator[Warned]:
    handler, logger = Warned(), logging.getLogger("safe_ckpt")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def likeness(draw: Draw) -> dict[str, Any]:
    """What is resumed into: likenesses with other values, or nothing where that is enough."""
    other = state_of(Draw(draw.seed, draw.made), 1)
    objects = {name: one for name, one in other.items() if hasattr(bare(one), "load_state_dict")}
    if draw.flag("into nothing"):
        other = {
            name: objects.get(name, PerRank(None) if isinstance(one, PerRank) else None) for name, one in other.items()
        }
    return other


def bare(one: Any) -> Any:
    return one.value if isinstance(one, PerRank) else one


def held_tensors(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Tensors that have to be the same objects afterwards: parameters and buffers of modules."""
    return {
        name: [*one.parameters(), *one.buffers()] for name, one in state.items() if isinstance(one, torch.nn.Module)
    }
