"""What a rank holds of an item that rank 0 saves alone: kind, and names, types and shapes of the tensors.

Values are rank 0's to say. A rank that holds other tensors than rank 0, such as a pipeline's next stage, would lose them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import is_extra_state
from safe_ckpt.core.state.items import SavedItem
from safe_ckpt.errors import DesyncError


def held(item: SavedItem, resolved: Any) -> list[str]:
    """What this rank holds: a kind, and a text for the tensors; empty texts where there is nothing.

    Args:
        item: of the state.
        resolved: what would be saved of it.
    """
    facts = list(_facts(resolved)) if any(isinstance(leaf, torch.Tensor) for leaf in dtensor.leaves(resolved)) else []
    if item.optimizer is not None:
        facts.append(f"groups of {[len(group['params']) for group in item.optimizer.param_groups]} parameters")
    if not facts:
        return [item.kind, ""]
    facts.sort()
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return [item.kind, f"{len(facts)} names, such as {facts[0]:.80} (digest {digest})"]


def refuse_differences(by_rank: Mapping[int, Mapping[str, list[str]]]) -> None:
    """Refuse what a rank holds and rank 0 does not.

    Args:
        by_rank: what ``held`` returned on every rank, by item.

    Raises:
        DesyncError: names the first such item, and what the ranks hold.
    """
    for name, (kind, tensors) in by_rank[0].items():
        for other in (holds[name] for rank, holds in sorted(by_rank.items()) if rank):
            if other[0] and (other[0] != kind or (other[1] and other[1] != tensors)):
                values = {str(rank): " with ".join(filter(None, holds[name])) for rank, holds in by_rank.items()}
                raise DesyncError(what=f"state[{name!r}]", values=values)


def _facts(state: Any) -> Iterator[str]:
    """Name, type and shape of every tensor. What lies in several places is walked once."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), state)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            of_any_size = bool(path) and is_extra_state(str(path[-1]))
            yield repr(path) if of_any_size else f"{path!r} {value.dtype} {_shape_of(value)}"
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            inner = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += [((*path, key), part) for key, part in inner]


def _shape_of(tensor: torch.Tensor) -> object:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # such as of a nested tensor
        return tensor.layout
