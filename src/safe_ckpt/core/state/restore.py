"""Putting what was loaded back where it belongs, in place as far as types allow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from safe_ckpt.core.names import as_named
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import Fitted, is_extra_state
from safe_ckpt.core.staging.overlap import KNOWN
from safe_ckpt.core.state.plan import PerRank, Stateful, modules_of, optimizers_last
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.tensors import is_short, refuse_short
from safe_ckpt.errors import RestoreError, StateError


class Restoring:
    """The last step of a resume on one rank: what was loaded is compared with where it goes, and then applied.

    Between the two all ranks agree: nothing is applied on any of them where something does not fit on one. That holds for
    names, shapes and types; an object of the user's own may still refuse what it is given.

    Args:
        state: where it goes. Values that cannot change in place are replaced in it.
        loaded: what was loaded, by item.
        path: of the checkpoint, for errors.
    """

    def __init__(self, state: Mapping[str, Any], loaded: Mapping[str, Any], path: Place) -> None:
        self._state = state
        self._loaded = loaded
        self._path = path
        self._fitted: dict[str, Fitted] = {}

    def compare(self) -> dict[str, Any]:
        """Compare all items, on every rank.

        Returns:
            What this rank has no place for, for ``agree``.

        Raises:
            RestoreError: something does not fit; names it.
        """
        for name in self._state:
            try:
                _refuse_short(_key(name), _target(self._state, name))
            except StateError as error:
                raise RestoreError(path=str(self._path), key=error.key, message=error.message) from error
        for name in optimizers_last(self._state):
            with self._named(name):
                target = _target(self._state, name)
                if not isinstance(self._state, MutableMapping) and not _changes_in_place(target):
                    raise ValueError("its value cannot change in place and the state is read-only: pass a dict")
                self._fitted[name] = _fit(name, target, self._loaded[name], self._state)
        return {
            name: {"besides": list(one.besides), "refusal": one.refusal}
            for name, one in self._fitted.items()
            if one.besides
        }

    def agree(self, answers: Mapping[int, Mapping[str, Any]]) -> dict[str, list[str]]:
        """On rank 0: what no rank has a place for, by item.

        Raises:
            RestoreError: that cannot be added; names it.
        """
        nowhere = {}
        for name, said in answers[0].items():
            of_all = [answer.get(name, {}).get("besides", ()) for answer in answers.values()]
            nowhere[name] = [one for one in said["besides"] if all(one in others for others in map(frozenset, of_all))]
            if nowhere[name] and said["refusal"]:
                message = f"{said['refusal']} {nowhere[name]}, which the checkpoint has"
                raise RestoreError(path=str(self._path), key=_key(name), message=message)
        return nowhere

    def apply(self, nowhere: Mapping[str, Collection[str]]) -> None:
        """Apply all items, after ``compare``.

        Raises:
            RestoreError: an object refused its state; says what was applied before.
        """
        done: list[str] = []
        for name, fitted in self._fitted.items():
            with self._named(name, done):
                target = _target(self._state, name)
                result = fitted.apply(nowhere.get(name, ()))
                if result is not target and isinstance(self._state, MutableMapping):
                    self._state[name] = PerRank(result) if isinstance(self._state[name], PerRank) else result
            done.append(name)
        self._fitted.clear()

    @contextlib.contextmanager
    def _named(self, name: str, done: Sequence[str] = ()) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = (
                error.message if isinstance(error, RestoreError | StateError) else f"{type(error).__name__}: {error}"
            )
            if done:
                message += f". Applied before: {', '.join(done)}. Build the state again before another resume"
            raise RestoreError(path=str(self._path), key=_key(name), message=message) from error


def _key(name: str) -> str:
    return f"state[{name!r}]"


def _target(state: Mapping[str, Any], name: str) -> Any:
    value = state[name]
    return value.value if isinstance(value, PerRank) else value


def _changes_in_place(target: Any) -> bool:
    return isinstance(target, Stateful | torch.Tensor | MutableMapping | MutableSequence)


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


@dataclass(frozen=True)
class Shards:
    """A sharded item, verified and not read yet."""

    folder: Path

    def refuse_code(self) -> Self:
        """Before anything is restored: raise ``HostileCheckpointError`` where it would run code. Returns itself."""
        from safe_ckpt.core.sharding import dcp_load as resharding

        resharding.refuse_code(self.folder)
        return self

    def fit(self, name: str, target: Any, modules: Mapping[str, torch.nn.Module]) -> Fitted:
        """Compare it with ``target``: see ``Restoring.compare``. This rank's parts are read when it is applied."""
        from safe_ckpt.core.sharding import dcp_load as resharding

        if isinstance(target, torch.nn.Module):
            return resharding.fit_module(self.folder, target)
        if isinstance(target, torch.optim.Optimizer):
            return resharding.fit_optimizer(self.folder, resharding.owner_of(target, modules), target)
        if isinstance(target, Stateful):
            own = target.state_dict()
            take = _giving(target, lambda saved: target.load_state_dict(resharding.with_types_of(own, saved)))
            return resharding.fit_value(self.folder, own, lambda _: None, take)
        if isinstance(target, torch.Tensor | dict):
            value = {name: target} if isinstance(target, torch.Tensor) else target
            take = _giving(target, lambda saved: restore_into(value, saved))
            return resharding.fit_value(self.folder, value, lambda saved: check_into(value, saved), take)
        message = f"it was saved in parts; give an object or a dict of tensors to read it into, not {target!r:.50}"
        raise RestoreError(message=message)


def _giving(target: Any, action: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that does the action and returns ``target``."""

    def apply(given: Any) -> Any:
        action(given)
        return target

    return apply


def _fit(name: str, target: Any, loaded: Any, state: Mapping[str, Any]) -> Fitted:
    if isinstance(loaded, Shards):
        return loaded.fit(name, target, modules_of(state))
    if isinstance(target, torch.optim.Optimizer):
        _check_optimizer(target, loaded)
        if dtensor.has_sharded(target):
            from safe_ckpt.core.sharding import dcp_load as resharding

            return Fitted(apply=_giving(target, lambda _: resharding.spread_optimizer(target, loaded)))
    elif isinstance(target, torch.nn.Module):
        own = target.state_dict()
        loaded = as_named(target, loaded)
        if dtensor.has_sharded(own):
            check_into(own, loaded)
            _check_names(own, loaded)
            return Fitted(apply=_giving(target, lambda _: target.load_state_dict(restore_into(own, loaded))))
        if _loads_as_torch_does(target):
            _check_module(own, loaded)
    if isinstance(target, Stateful):
        return Fitted(apply=_giving(target, lambda _: target.load_state_dict(loaded)))
    check_into(target, loaded)
    return Fitted(apply=lambda _: restore_into(target, loaded))


def _check_names(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    missing, besides = sorted(own.keys() - loaded.keys()), sorted(map(str, loaded.keys() - own.keys()))
    told = [f"the checkpoint has nothing for {missing} (Missing key(s), as torch says it)"] if missing else []
    told += [f"the module has no place for {besides} (Unexpected key(s), as torch says it)"] if besides else []
    if told:
        raise ValueError(", and ".join(told))


def _check_module(own: Mapping[str, Any], loaded: Any) -> None:
    """What ``Module.load_state_dict`` would refuse after it has copied what fits."""
    if not isinstance(loaded, Mapping):
        raise TypeError(f"expected a module's state, the checkpoint has {type(loaded).__name__}")
    then, now = (getattr(state, "_metadata", None) or {} for state in (loaded, own))
    if any(then[part] != now[part] for part in then.keys() & now.keys()):
        return  # of other versions of its classes: they know what has changed
    _check_names(own, loaded)
    for name, tensor in own.items():
        saved = loaded[name]
        if isinstance(tensor, torch.Tensor) and not is_extra_state(name):
            if not isinstance(saved, torch.Tensor):
                raise TypeError(f"{name} is a tensor, the checkpoint has {type(saved).__name__}")
            if saved.shape != tensor.shape and (tensor.dim(), saved.dim()) != (0, 1):
                raise ValueError(
                    f"size mismatch for {name}: {_described(tensor)}, the checkpoint has {_described(saved)}"
                )


_LOADING = ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
_LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")


def _loads_as_torch_does(module: torch.nn.Module) -> bool:
    """Whether the names in its state are those that it loads: no class and no hook has ways of its own."""
    for part in module.modules():
        ways = (getattr(part, way) for way in _LOADING)
        if any(getattr(part, hooks) for hooks in _LOADING_HOOKS) or not all(map(_is_torchs, ways)):
            return False
    return True


def _is_torchs(way: Any) -> bool:
    return str(getattr(way, "__module__", "")).partition(".")[0] == "torch"


def _check_optimizer(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """What ``Optimizer.load_state_dict`` would refuse, and state of other shapes, which only a step would."""
    if not _is_torchs(optimizer.load_state_dict) or optimizer._optimizer_load_state_dict_pre_hooks:
        return
    saved, own = (
        [len(group["params"]) for group in groups] for groups in (loaded["param_groups"], optimizer.param_groups)
    )
    if saved != own:
        raise ValueError(f"it steps groups of {own} parameters, the checkpoint has groups of {saved}")
    if type(optimizer) not in KNOWN or isinstance(optimizer, torch.optim.Adafactor):
        return
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in loaded["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of parameter {number} is {_described(value)} there, it is {_described(parameter)}"
                )


def check_into(target: Any, loaded: Any) -> None:
    """Whether ``restore_into`` can make ``target`` equal to ``loaded``. Of the tensors there only shapes and types count.

    Raises:
        ValueError: a tensor of the target has another shape or type in ``loaded``, or is not in it.
    """
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if target.shape != loaded.shape or target.dtype != loaded.dtype:
            # Replacing it in the dict would leave the parameter that it belongs to as it is.
            raise ValueError(
                f"it is {_described(target)}, the checkpoint has {_described(loaded)}; "
                "give a tensor of that shape and type, or None to get it as it was saved"
            )
        if dtensor.is_partial(target):
            raise ValueError("it is a DTensor whose parts are still to be reduced: redistribute it first")
    elif isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
        lost = [key for key in target if key not in loaded and isinstance(target[key], torch.Tensor)]
        if lost:
            raise ValueError(f"the checkpoint has nothing for the tensors {lost}")
        for key in target:
            if key in loaded and not is_extra_state(str(key)):
                check_into(target[key], loaded[key])
    elif isinstance(target, MutableSequence) and isinstance(loaded, list):
        for own, saved in zip(target, loaded, strict=False):
            check_into(own, saved)


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def restore_into(target: Any, loaded: Any) -> Any:
    """Make ``target`` equal to ``loaded`` in place as far as its type allows. Returns the object that now has the value.

    Ask ``check_into`` first.
    """
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return target if target is loaded else _copied(target, loaded)
    if isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
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


def _copied(target: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    if target.shape != loaded.shape or target.dtype != loaded.dtype:  # an extra state
        return loaded
    if dtensor.is_dtensor(target) and not dtensor.is_dtensor(loaded):
        dtensor.copy_part(target, loaded)
        return target
    with torch.no_grad():
        return target.copy_(loaded)
