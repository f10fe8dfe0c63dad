"""Loading into a state dict as ``torch.distributed.checkpoint.load`` does it: in place, planned by its planners, by any ranks.

``dcp_read`` restores objects, and compares more. Here the checkpoint's own names count: what the state dict has must be there,
what the checkpoint has besides is left alone, and told. Optimizers are the exception. Before its first step one has no place
for its state: of an optimizer itself, all that the checkpoint has is asked for. And a parameter may have had no state. Nothing
here is a collective.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.formats.torch_reading import load_data
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dcp_ranks import name_of_empty
from safe_ckpt.core.sharding.dcp_read import StraightReader, new_room, read_metadata
from safe_ckpt.errors import HostileCheckpointError, RestoreError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

logger = logging.getLogger(__name__)
ADMITTED: tuple[type, ...] = (io.BytesIO,)
"""Besides what ``torch.load(weights_only=True)`` admits and arrays: classes of which making one runs their own code alone."""
_LEAVES = frozenset({int, float, str, bool, bytes, complex, type(None)})
_PLAIN = _LEAVES | {torch.Tensor, torch.nn.Parameter, dict, list, tuple}
NOWHERE = (
    "entries are not loaded, as the state dict has no place for them: %s. If they are an optimizer's: it has places from its "
    "first step on. Hand over the optimizer itself, which is restored whole, or call get_optimizer_state_dict while no "
    "gradient is there: optimizer.zero_grad()"
)
ANEW = "entries are not in it, as the optimizer had no state of these parameters: %s. It begins anew with them"
_judged: set[frozenset[type]] = set()
_told: set[tuple[str, ...]] = set()
_MISFITS = (RuntimeError, ValueError, KeyError, AssertionError)


class Loading:
    """A load of one checkpoint, compared with the state dict on this rank. Nothing was read into that yet.

    Args:
        folder: with ``.metadata`` and ``*.distcp``, verified where that was possible.
        state: names to tensors, nested state dicts and other values. Its meta tensors get memory here.
        planner: says what goes where; None for torch's own.
        is_coordinator: whether this rank is the first one.
        optimizers: those whose state dicts are in ``state``, by name: these are replaced by what the checkpoint has of them.

    Attributes:
        besides: names in the checkpoint, below those of ``state``, for which ``state`` has no place.
        anew: names in ``state`` of parameters that an optimizer stepped, and of which it had no state at the save; and where
            that lies which they have now.

    Raises:
        RestoreError: the checkpoint has nothing for a name, or a tensor of another shape.
        HostileCheckpointError: what is asked for cannot be read without running code.
        CorruptCheckpointError: ``.metadata`` cannot be read.
        OSError: a file could not be read.
    """

    def __init__(
        self,
        folder: Path,
        state: dict[str, Any],
        planner: LoadPlanner | None = None,
        *,
        is_coordinator: bool = False,
        optimizers: Mapping[str, torch.optim.Optimizer] = MappingProxyType({}),
    ) -> None:
        metadata = read_metadata(folder)
        paths = {name: tuple((metadata.planner_data or {}).get(name, (name,))) for name in metadata.state_dict_metadata}
        try:
            state.update({name: _all_of(one, name, metadata, paths) for name, one in optimizers.items()})
        except ValueError as error:  # nothing tells how a plain tensor is spread
            raise RestoreError(path=str(folder), message=str(error)) from error
        self._folder = folder
        self._state = state
        if planner is None:
            # Flattening nested ShardedTensors drops a list's empty dicts. So [1, {}] would be asked for by another name than
            # it has.
            older = any(dtensor.is_sharded(leaf) and not dtensor.is_dtensor(leaf) for _, leaf in dtensor.placed(state))
            planner = DefaultLoadPlanner(flatten_sharded_tensors=older)
        self._planner = cast("Any", planner)
        self._reader = StraightReader(folder)
        try:
            self._planner.set_up_planner(state, metadata, is_coordinator)
            self.anew = {} if self._planner.allow_partial_load else self._leave_out(paths)
            self._reader.set_up_storage_reader(metadata, is_coordinator)
            plan = self._reader.prepare_local_plan(self._planner.create_local_plan())
            self._plan: LoadPlan = self._planner.finish_plan(plan)
        except _MISFITS as error:
            raise RestoreError(path=str(folder), message=str(error)) from error
        self.besides = [
            name
            for name, path in paths.items()
            if path[0] in state and name not in self._planner.state_dict and name != name_of_empty(path)
        ]
        if objects := [item for item in self._plan.items if item.type == LoadItemType.BYTE_IO]:
            self._read(dataclasses.replace(self._plan, items=objects), _Checks(folder, state))

    def read(self) -> None:
        """Read what belongs to this rank, into place.

        Raises:
            OSError: a file could not be read.
            RestoreError: the planner refuses what was read.
        """
        try:
            self._read(self._plan, _Checks(self._folder, self._state, self._planner))
        except _MISFITS as error:
            raise RestoreError(path=str(self._folder), message=str(error)) from error
        for place in self.anew.values():
            dtensor.begin_anew(_at(self._state, place[:-1]), place[-1])

    def _leave_out(self, saved: Mapping[str, tuple[Any, ...]]) -> dict[str, Sequence[Any]]:
        """Ask for no state of parameters that were stepped and had none; see ``anew``."""
        asked, paths = self._planner.state_dict, self._planner.mappings
        missing = [name for name in paths if name not in saved]
        # A parameter that has begun anew has an empty state, which is none.
        kept = [name for name, path in saved.items() if name != name_of_empty(path)] if missing else ()
        above = {part for name in kept for part in (name, *dtensor.names_above(name))}
        anew: dict[str, Sequence[Any]] = {}
        for name in missing:
            path = _keys(self._state, paths[name])
            for end, where, parameter in dtensor.stepped(path):
                group = f"{where}param_groups" if end < len(path) else f"{where}param_groups.{parameter}"
                if group in above and f"{where}state.{parameter}" not in above:
                    anew[name] = path[:end]
                    asked.pop(name, None)
        return anew

    def _read(self, plan: LoadPlan, checks: _Checks) -> None:
        self._reader.read_data(plan, cast("LoadPlanner", checks)).wait()


def _all_of(
    optimizer: torch.optim.Optimizer, name: str, metadata: Metadata, paths: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """An optimizer's state dict with places for all that the checkpoint has of it, and for nothing else."""
    own = dtensor.own_state_dict(optimizer)
    kept = own.get("state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {fqn: path[1:] for fqn, path in paths.items() if path[0] == name and fqn != name_of_empty(path)}
    state = [path for path in found.values() if path[:1] in ((), ("state",))]
    if not isinstance(kept, Mapping) or not all(len(path) > 2 and str(path[1]).isdecimal() for path in state):
        return own  # its class has another kind of state dict, or it was saved by names, or it was none
    asked: dict[str, Any] = {**own, "state": {}, "param_groups": []}
    marks = dtensor.marks_of(found.values())
    stepped = {id(one) for group in dtensor.stepping(optimizer).param_groups for one in group["params"]}
    for fqn, path in found.items():
        known, room = metadata.state_dict_metadata[fqn], None
        if path[0] == "state" and int(path[1]) < len(parameters) and id(parameters[int(path[1])]) not in stepped:
            continue  # another rank has it
        if isinstance(known, TensorStorageMetadata):
            number = int(path[1]) if path[0] == "state" else len(parameters)
            room = kept.get(number, {}).get(path[2]) if path[0] == "state" else None
            kind = tuple(known.size), known.properties.dtype
            if not isinstance(room, torch.Tensor) or (tuple(room.shape), room.dtype) != kind:
                like = parameters[number] if number < len(parameters) else None
                if like is not None and str(path[-1]) in marks:
                    like = dtensor.like_which(marks[str(path[-1])], like, known.size)
                room = new_room(*kind, like=like)
        set_element(asked, path, room)
    return {**asked, "state": {int(number): one for number, one in asked["state"].items()}}


def _at(state: Any, path: Sequence[Any]) -> Any:
    for key in path:
        state = state[key]
    return state


def _keys(state: Any, path: Sequence[Any]) -> tuple[Any, ...]:
    """A path with the keys that mappings have: DCP makes text of them."""
    found: list[Any] = []
    for text in path:
        key = text
        if isinstance(state, Mapping) and key not in state:
            number = int(text) if text.isdecimal() else text
            key = number if number in state else next(own for own in state if str(own) == text)
        found.append(key)
        state = state[key]
    return tuple(found)


def _move(state: Any, path: Sequence[Any], keys: Sequence[Any]) -> None:
    """Move what was read from the path of texts, where DCP puts it, to the keys that were meant."""
    at = next(at for at, key in enumerate(keys) if path[at] != key)
    above = _at(state, path[:at])
    _at(above, keys[at:-1])[keys[-1]] = _at(above, path[at:])
    del above[path[at]]


def warn_of(folder: Path, text: str, names: Sequence[str]) -> None:
    """Log ``NOWHERE`` or ``ANEW``, once for the same names."""
    if text is ANEW and dtensor.begin_with_lr(names):
        text += f", {dtensor.RATES}"
    if names and (text, *names) not in _told:
        _told.add((text, *names))
        logger.warning("%s: %d %s", folder, len(names), text % ", ".join([*names[:5], *(["..."] if names[5:] else [])]))


def warn_of_refused(state: object) -> None:
    """Log, once for each mixture of classes, that ``Loading`` will refuse what is saved."""
    for one, kinds in _objects(state):
        if kinds <= _PLAIN or kinds in _judged:
            continue
        _judged.add(kinds)
        buffer = io.BytesIO()
        try:
            torch.save(one, buffer)
            buffer.seek(0)
            load_data(buffer, ADMITTED)
        except pickle.UnpicklingError:
            text = (
                "the state has a %s, which a load will refuse, as reading it runs code of its class. If that is yours, "
                "call torch.serialization.add_safe_globals([...]) with it at the start of the script, or leave it out"
            )
            logger.warning(
                text, " with a ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds - _PLAIN))
            )
        except Exception as error:  # the save itself says what is wrong
            logger.debug("%s was not looked at: %s", kinds, error)


def _objects(state: object) -> Iterator[tuple[object, frozenset[type]]]:
    """Yield the objects that DCP pickles, with the classes of all that is in each. They are no tensors, mappings or lists.

    A mapping of another class than dict that lies in a list may be pickled as it is.
    """
    waiting, seen = [(state, False)], set[int]()
    while waiting:
        inner, in_list = waiting.pop()
        if type(inner) in _LEAVES or isinstance(inner, torch.Tensor) or id(inner) in seen:
            continue
        seen.add(id(inner))
        if isinstance(inner, Mapping) and (not in_list or type(inner) is dict):
            waiting.extend((one, in_list) for one in inner.values())
        elif type(inner) is list:
            waiting.extend((one, True) for one in inner)
        else:
            yield inner, _classes_in(inner)


def _classes_in(value: object) -> frozenset[type]:
    found, waiting, seen = set[type](), [value], set[int]()
    while waiting:
        inner = waiting.pop()
        found.add(type(inner))
        if type(inner) not in _LEAVES and isinstance(inner, Mapping | list | tuple) and id(inner) not in seen:
            seen.add(id(inner))
            waiting.extend(inner.values() if isinstance(inner, Mapping) else inner)
    return frozenset(found)


class _Checks:
    """A planner before which each object is read once without running anything; without a planner that is all.

    Args:
        folder: of the checkpoint, for errors.
        state: what is loaded into.
        planner: gets what is in order.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any], planner: Any = None) -> None:
        self._folder = folder
        self._state = state
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See ``LoadPlanner``."""
        try:
            load_data(value, ADMITTED)
        except pickle.UnpicklingError as error:
            text = " ".join(str(error).split())[:600]
            message = (
                f"{read_item.storage_index.fqn} cannot be read without running code: {text}. Nothing of it was run. If its "
                "class is yours, call torch.serialization.add_safe_globals([...]) with it before you load"
            )
            raise HostileCheckpointError(path=str(self._folder), file=DCP_METADATA, message=message) from error
        value.seek(0)
        if self._planner is not None:
            path = self._planner.mappings.get(read_item.dest_index.fqn, ())
            keys = _keys(self._state, path)
            self._planner.load_bytes(read_item, value)
            if keys != path:
                _move(self._state, path, keys)
