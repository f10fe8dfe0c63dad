"""A nested state of parts, such as a model's beside its optimizers', as a whole one on the rank that writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.sharding import dtensor, gather

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def whole(state: Mapping[str, Any], timeout_s: float, group: ProcessGroup | None) -> dict[str, Any] | None:
    """A nested state with whole tensors in place of the parts, on rank 0; None elsewhere. Every rank calls this.

    Args:
        state: nested mappings and lists of parts and of anything else, of which rank 0's counts.
        timeout_s: as for ``iter_full_tensors``.
        group: the ranks.

    Raises:
        SafeCheckpointError: as for ``iter_full_tensors``.
    """
    parts: dict[tuple[str, ...], torch.Tensor] = {}

    def collect(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: collect(inner, (*path, str(key))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(collect(inner, (*path, str(number))) for number, inner in enumerate(value))
        if dtensor.is_dtensor(value):
            parts[path] = value
            return _Part(path)
        return value

    sketch = collect(state, ())
    flat = {"/".join(path): tensor for path, tensor in parts.items()}
    found = dict(zip(parts, (tensor for _, tensor in gather.iterate(flat, timeout_s, group, None)), strict=True))

    def fill(value: Any) -> Any:
        if isinstance(value, _Part):
            return found[value.path]
        if isinstance(value, dict):
            return {key: fill(inner) for key, inner in value.items()}
        return type(value)(map(fill, value)) if isinstance(value, list | tuple) else value

    return fill(sketch) if process_groups.group_of(group).rank == 0 else None


@dataclass(frozen=True)
class _Part:
    """Stands for a part until the whole has come."""

    path: tuple[str, ...]
