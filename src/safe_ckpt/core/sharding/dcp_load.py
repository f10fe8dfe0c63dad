"""Reading sharded items into any world size and mesh: each rank reads the parts that it needs, planned by DCP's own planner.

The bytes are verified before, by all ranks together (``verify``). Nothing here is a collective. No pickle is run that could do
more than build DCP's own records.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from safe_ckpt.core.formats import torch_archive
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dcp_plan import METADATA
from safe_ckpt.core.sharding.dcp_read import StraightReader
from safe_ckpt.errors import CorruptCheckpointError, RestoreError, StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

_HOMES_OF_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_RECORDS = {
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}


_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class _Unpickler(pickle.Unpickler):
    """Builds DCP's records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _RECORDS.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if known:
            return super().find_class(module, name)
        if module in _HOMES_OF_RECORDS and _is_record(found := super().find_class(module, name), module):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _is_record(found: object, module: str) -> bool:
    """Whether it is a dataclass or an enumeration of that module: to build one runs nothing but the module's own code."""
    if not isinstance(found, type) or found.__module__ != module:
        return False
    return dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch_archive.load_plain(value)  # raises where the next line would run code
        value.seek(0)
        super().load_bytes(read_item, value)


def read_metadata(folder: Path) -> Metadata:
    """What DCP wrote down about a directory of its own.

    Raises:
        CorruptCheckpointError: it cannot be read as that.
        OSError: it could not be read.
    """
    try:
        with (folder / METADATA).open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except OSError:
        raise
    except Exception as error:  # whatever a pickle machine makes of bytes that are none
        raise CorruptCheckpointError(path=str(folder), file=METADATA, message=str(error)) from error
    if not isinstance(metadata, Metadata):
        raise CorruptCheckpointError(path=str(folder), file=METADATA, message="is no metadata of DCP")
    return metadata


def load_into(folder: Path, state: dict[str, Any], metadata: Metadata | None = None) -> None:
    """Read into the tensors of a state dict, in place; what is no tensor is replaced in it. On this rank alone.

    Args:
        folder: with ``.metadata`` and ``*.distcp``, verified.
        state: nested names to DTensors, tensors and objects, all of them in the checkpoint.
        metadata: what ``read_metadata`` returned for it, if it was read already.

    Raises:
        RestoreError: names, shapes or types do not fit; nothing was changed.
        OSError: the files could not be read.
    """
    reader, planner = StraightReader(folder), _Planner()
    metadata = metadata or read_metadata(folder)
    try:
        planner.set_up_planner(state, metadata, is_coordinator=True)
        for name, value in planner.state_dict.items():
            _check_type(name, value, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise RestoreError(path=str(folder), message=str(error)) from error
    reader.read_data(plan, planner).wait()


def _check_type(name: str, value: object, metadata: Metadata) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if dtensor.is_partial(value):
        raise ValueError(f"{name} is a DTensor whose parts are still to be reduced: redistribute it first")
    saved = metadata.state_dict_metadata.get(name)
    if isinstance(saved, TensorStorageMetadata) and saved.properties.dtype != value.dtype:
        raise ValueError(f"{name} is {value.dtype}, the checkpoint has {saved.properties.dtype}")


def load_all_into(folder: Path, state: dict[str, Any]) -> None:
    """As ``load_into``; what the checkpoint has besides is added to ``state``, whole."""
    metadata = read_metadata(folder)
    for path, saved in _saved(metadata):
        if not _has(state, path):
            set_element(state, path, _room(saved, None))
    load_into(folder, state, metadata)


def _saved(metadata: Metadata) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Where every entry belongs in the nested state, and what is known of it."""
    paths = metadata.planner_data or {}
    for name, saved in metadata.state_dict_metadata.items():
        yield tuple(paths.get(name, (name,))), saved


def _has(state: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _room(saved: Any, like: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor to read an entry into: spread as ``like`` where it has its shape; None for what is no tensor."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if like is not None and tuple(saved.size) == tuple(like.shape):
        return torch.zeros_like(like, dtype=saved.properties.dtype, requires_grad=False)
    return torch.zeros(tuple(saved.size), dtype=saved.properties.dtype)


def owner_of(optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """The module whose parameters an optimizer steps: its names make the optimizer's state independent of the mesh.

    Between a forward without backward and its next use FSDP2 shows other parameters: ask for its state dict first.

    Raises:
        StateError: none of them has all of its parameters.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules.values():
        if stepped <= {id(parameter) for parameter in module.parameters()}:
            return module
    message = (
        "an optimizer of sharded parameters is saved by their names: give the module that has all of them in the same "
        "state, or a state dict from torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
    )
    raise StateError(key=type(optimizer).__name__, message=message)


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by the names of its module's parameters, as ``get_optimizer_state_dict`` has it.

    That function takes a step of an optimizer that has no state yet, with a learning rate of 0; this changes nothing.
    """
    names = _names(module)
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    state = {
        names[id(parameter)]: dict(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }
    return {"state": state, "param_groups": groups}


def restore_module(module: torch.nn.Module, folder: Path) -> None:
    """Read a sharded item into a module, sharded or not.

    Raises:
        RestoreError: the checkpoint has other names, shapes or types.
    """
    state = module.state_dict()
    metadata = read_metadata(folder)
    saved = {path[0] for path, _ in _saved(metadata)}
    if saved != state.keys():
        missing, besides = sorted(state.keys() - saved), sorted(map(str, saved - state.keys()))
        message = f"the checkpoint has nothing for {missing}, and the module has no place for {besides}"
        raise RestoreError(path=str(folder), message=message)
    load_into(folder, state, metadata)
    module.load_state_dict(state)


def restore_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read a sharded item into an optimizer, of sharded parameters or not. It gets state for what had some.

    Raises:
        RestoreError: the checkpoint is of other parameters, or of other groups of them.
    """
    names = _names(module)
    owned = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    metadata = read_metadata(folder)
    for path, saved in _saved(metadata):
        if path[0] == "state" and path[1] not in owned:
            raise RestoreError(
                path=str(folder), message=f"this optimizer does not step {path[1]}, which has state there"
            )
        set_element(state, path, _room(saved, owned.get(path[1]) if path[0] == "state" else None))
    load_into(folder, state, metadata)
    groups = state["param_groups"]
    order = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in order]:
        message = "its groups hold other parameters than those in the checkpoint"
        raise RestoreError(path=str(folder), message=message)
    numbers = {name: number for number, name in enumerate(name for group in order for name in group)}
    again = [{**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, order, strict=True)]
    state_by_number = {numbers[name]: kept for name, kept in state["state"].items()}
    optimizer.load_state_dict({"state": state_by_number, "param_groups": again})


def spread_optimizer(optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
    """Give this rank of a sharded optimizer its parts of a whole state, as ``Optimizer.state_dict`` has it.

    Raises:
        ValueError: it is of another number of parameters.
    """
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    if len(owned) != len(numbers):
        raise ValueError(f"it is the state of {len(numbers)} parameters, this optimizer steps {len(owned)}")
    parameters = dict(zip(numbers, owned, strict=True))
    state = {
        number: {key: _spread(value, parameters[number]) for key, value in kept.items()}
        for number, kept in whole["state"].items()
    }
    optimizer.load_state_dict({**whole, "state": state})


def _spread(value: Any, like: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or not dtensor.is_dtensor(like):
        return value
    tensor = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    dtensor.copy_part(tensor, value)
    return tensor


def _names(module: torch.nn.Module) -> dict[int, str]:
    """The names of parameters without what wrappers add to them, as DCP has them."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901
        names.setdefault(id(parameter), name)
    return names
