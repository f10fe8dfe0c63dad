"""The source of a conversion: all of a checkpoint, or the weights of a model in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.errors import StateError, UnsupportedFormatError
from safe_ckpt.text import listed
from safe_ckpt.tools.inspection.content import tensors_in
from safe_ckpt.tools.inspection.listing import one_of
from safe_ckpt.tools.inspection.pickle_objects import Global, Opaque, Ordered
from safe_ckpt.tools.inspection.tensors import Entry, describe

_USUAL = ("state_dict", "model", "model_state_dict", "module", "pytorch_model", "weights")
Make = Callable[[Entry], Any]


def part_of(structure: Any, item: str, path: Path) -> Any:
    """The part of a structure that ``item`` names, keys joined by dots; the whole for "".

    Raises:
        UnsupportedFormatError: there is no such part; names those that there are.
    """
    at = structure
    for key in item.split(".") if item else ():
        parts = dict(enumerate(at)) if isinstance(at, list | tuple) else at
        named = {str(name): part for name, part in parts.items()} if isinstance(parts, dict) else {}
        if key not in named:
            raise UnsupportedFormatError(
                path=str(path), message=f"has no {item!r}; there is {listed(list(named)) or 'nothing'}"
            )
        at = named[key]
    return at


def weights_of(structure: Any, item: str, path: Path) -> dict[str, Entry]:
    """A model's weights by name: those under ``item``, or, where it is "", under the name that they usually have.

    Raises:
        UnsupportedFormatError: it is unknown which part is the weights, or there are none; or these are several checkpoints.
    """
    chosen = part_of(structure, item, path)
    if not item and isinstance(chosen, dict) and not all(isinstance(part, Entry) for part in chosen.values()):
        key = next((name for name in _USUAL if isinstance(chosen.get(name), dict)), None)
        if key is None:
            one_of(path)
            there = listed([str(name) for name in chosen]) or "nothing"
            message = f"--item must name the place of the weights; there is {there}"
            raise UnsupportedFormatError(path=str(path), message=message)
        chosen = chosen[key]
    weights = dict(tensors_in(chosen))
    if not weights:
        raise UnsupportedFormatError(path=str(path), message=f"{item or 'it'} holds no tensors")
    lost = [name for name, entry in weights.items() if not entry.pieces]
    if lost:
        message = f"the numbers of {listed(lost)} cannot be read without running the checkpoint"
        raise UnsupportedFormatError(path=str(path), message=message)
    return weights


def filled(structure: Any, make: Make, *, drop_objects: bool) -> Any:
    """The structure with real tensors, ready to be written.

    Args:
        structure: as ``read_structure`` returns it.
        make: from where a tensor's bytes are to the tensor.
        drop_objects: leave out what is of a class that only running the checkpoint would build.

    Raises:
        StateError: there are such objects, and they are not to be left out; names them.
    """
    objects: list[str] = []
    made = _filled(structure, make, "", objects)
    if objects and not drop_objects:
        message = f"{len(objects)} objects can only be built by running the checkpoint ({listed(objects)})"
        raise StateError(key="convert", message=f"{message}: --drop-objects leaves them out")
    return made


_GONE = object()


def _filled(value: Any, make: Make, name: str, objects: list[str]) -> Any:
    if isinstance(value, Mapping):
        return _mapping(value, make, name, objects)
    if isinstance(value, list | tuple):
        parts = [_filled(part, make, f"{name}.{index}".lstrip("."), objects) for index, part in enumerate(value)]
        return type(value)(None if part is _GONE else part for part in parts)  # the others keep their places
    if isinstance(value, Entry) and value.pieces:
        return make(value)
    if isinstance(value, Global) and value.module == "torch":
        return _torch_constant(value)
    if isinstance(value, Opaque | Global | Entry):
        odd = f"a {value.dtype} tensor that is not plain numbers" if isinstance(value, Entry) else describe(value)
        objects.append(f"{name}: {odd}")
        return _GONE
    return value


def _mapping(value: Mapping[Any, Any], make: Make, name: str, objects: list[str]) -> dict[Any, Any]:
    made = {key: _filled(part, make, f"{name}.{key}".lstrip("."), objects) for key, part in value.items()}
    kept = {key: part for key, part in made.items() if part is not _GONE}
    if not isinstance(value, Ordered):
        return kept
    ordered = OrderedDict(kept)
    state = value.state if isinstance(value.state, dict) else {}
    if isinstance(state.get("_metadata"), dict):  # the versions of a module's parts, which load_state_dict reads
        ordered._metadata = _filled(state["_metadata"], make, f"{name}._metadata", [])  # type: ignore[attr-defined]
    return ordered


def _torch_constant(value: Global) -> Any:
    import torch

    constant = getattr(torch, value.name, None)
    return constant if isinstance(constant, torch.dtype | torch.layout | torch.memory_format) else str(value)
