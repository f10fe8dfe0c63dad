"""State dicts with objects in them that have a state of their own, as ``torch.distributed.checkpoint`` treats them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from safe_ckpt.core.sharding.dtensor import keeping_types, load_optimizer, refuse_local_state, warn_of_rounded

__all__ = ["give_back", "keeping_types", "states_of", "versions_of_buffers"]


def states_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Names to states: of a Stateful its ``state_dict()``, of anything else what it is."""
    for one in state_dict.values():
        if isinstance(one, torch.optim.Optimizer):
            refuse_local_state(one)
    return {name: one.state_dict() if isinstance(one, Stateful) else one for name, one in state_dict.items()}


def give_back(states: Mapping[str, Any], state_dict: MutableMapping[str, Any]) -> None:
    """Give every Stateful its state, and put everything else in its place; a name that is not there is left out."""
    warn_of_rounded(states)
    for name, loaded in states.items():
        if name not in state_dict:
            continue
        one = state_dict[name]
        if isinstance(one, torch.optim.Optimizer):
            load_optimizer(one, loaded)
        elif isinstance(one, Stateful):
            one.load_state_dict(loaded)
        else:
            state_dict[name] = loaded


def versions_of_buffers(module: torch.nn.Module) -> list[int]:
    """How often each was changed, as torch counts it: other numbers than before say that a forward pass has changed some."""
    return [one._version for one in module.buffers() if not one.is_inference()]
