"""Putting what was loaded back where it belongs, in place as far as types allow."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from safe_ckpt.core.names import as_named
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.state.plan import PerRank, Stateful, modules_of, optimizers_last
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.tensors import is_short, refuse_short
from safe_ckpt.errors import RestoreError, StateError


def restore(state: Mapping[str, Any], loaded: Mapping[str, Any], path: Place) -> None:
    """Put what was loaded where it belongs, in place. Values that cannot change in place are replaced in ``state``.

    Raises:
        RestoreError: an object refused its state.
    """
    for name, value in state.items():
        key = f"state[{name!r}]"
        try:
            _refuse_short(key, value.value if isinstance(value, PerRank) else value)
        except StateError as error:
            raise RestoreError(path=str(path), key=error.key, message=error.message) from error
    for name in optimizers_last(state):
        value = state[name]
        target = value.value if isinstance(value, PerRank) else value
        try:
            result = _restore_one(name, target, loaded[name], state)
        except Exception as error:
            key = f"state[{name!r}]"
            message = (
                error.message if isinstance(error, RestoreError | StateError) else f"{type(error).__name__}: {error}"
            )
            raise RestoreError(path=str(path), key=key, message=message) from error
        if result is not target:
            if not isinstance(state, MutableMapping):
                message = "its value cannot change in place and the state is read-only: pass a dict"
                raise RestoreError(path=str(path), key=f"state[{name!r}]", message=message)
            state[name] = PerRank(result) if isinstance(value, PerRank) else result


def _refuse_short(key: str, target: Any) -> None:
    """Refuse to write to tensors whose memory was taken away: what lies there is somebody else's."""
    tensors: Mapping[Any, Any] = {}
    if isinstance(target, torch.nn.Module):
        tensors = dict(chain(target.named_parameters(), target.named_buffers()))
        if any(map(is_short, map(_part_of, tensors.values()))):
            tensors = target.state_dict()  # FSDP2 puts back what a forward pass has left
    elif isinstance(target, Mapping):
        tensors = target
    elif isinstance(target, list):
        tensors = dict(enumerate(target))
    elif isinstance(target, torch.Tensor):
        refuse_short(key, _part_of(target))
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor | Mapping | list):
            _refuse_short(f"{key}[{name!r}]", tensor)


def _part_of(tensor: torch.Tensor) -> torch.Tensor:
    return dtensor.local_of(tensor) if dtensor.is_dtensor(tensor) else tensor


def _restore_one(name: str, target: Any, loaded: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(loaded, Shards):
        return loaded.restore(name, target, modules_of(state))
    if isinstance(target, torch.optim.Optimizer) and dtensor.has_sharded(target):
        from safe_ckpt.core.sharding import dcp_load as resharding

        resharding.spread_optimizer(target, loaded)
        return target
    if isinstance(target, torch.nn.Module) and dtensor.has_sharded(own := target.state_dict()):
        target.load_state_dict(restore_into(own, as_named(target, loaded)))
        return target
    if isinstance(target, Stateful):
        target.load_state_dict(as_named(target, loaded) if isinstance(target, torch.nn.Module) else loaded)
        return target
    return restore_into(target, loaded)


@dataclass(frozen=True)
class Shards:
    """A sharded item, verified and not read yet."""

    folder: Path

    def restore(self, name: str, target: Any, modules: Mapping[str, torch.nn.Module]) -> Any:
        """Read this rank's parts into ``target``, in place as far as its type allows."""
        from safe_ckpt.core.sharding import dcp_load as resharding

        if isinstance(target, torch.nn.Module):
            resharding.restore_module(target, self.folder)
        elif isinstance(target, torch.optim.Optimizer):
            resharding.restore_optimizer(resharding.owner_of(target, modules), target, self.folder)
        elif isinstance(target, Stateful):
            own = target.state_dict()
            resharding.load_all_into(self.folder, own)
            target.load_state_dict(own)
        elif isinstance(target, torch.Tensor):
            resharding.load_into(self.folder, {name: target})
        elif isinstance(target, dict):
            resharding.load_all_into(self.folder, target)
        else:
            message = f"it was saved in parts; give an object or a dict of tensors to read it into, not {target!r:.50}"
            raise RestoreError(message=message)
        return target


def restore_into(target: Any, loaded: Any) -> Any:
    """Make ``target`` equal to ``loaded`` in place as far as its type allows. Returns the object that now has the value.

    Raises:
        ValueError: a tensor of the target has another shape or type in ``loaded``, or is not in it.
    """
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if target.shape != loaded.shape or target.dtype != loaded.dtype:
            # Replacing it in the dict would leave the parameter that it belongs to as it is.
            raise ValueError(
                f"it is {tuple(target.shape)} {target.dtype}, the checkpoint has {tuple(loaded.shape)} {loaded.dtype}; "
                "give a tensor of that shape and type, or None to get it as it was saved"
            )
        if dtensor.is_partial(target):
            raise ValueError("it is a DTensor whose parts are still to be reduced: redistribute it first")
        if dtensor.is_dtensor(target) and not dtensor.is_dtensor(loaded):
            dtensor.copy_part(target, loaded)
            return target
        with torch.no_grad():
            return target.copy_(loaded)
    if isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
        lost = [key for key in target if key not in loaded and isinstance(target[key], torch.Tensor)]
        if lost:
            raise ValueError(f"the checkpoint has nothing for the tensors {lost}")
        order = [*(key for key in target if key in loaded), *(key for key in loaded if key not in target)]
        fresh = {key: restore_into(target[key], loaded[key]) if key in target else loaded[key] for key in order}
        target.clear()
        target.update(fresh)
        return target
    if isinstance(target, MutableSequence) and isinstance(loaded, list):
        known = len(target)
        target[:] = [restore_into(target[i], v) if i < known else v for i, v in enumerate(loaded)]
        return target
    return loaded
