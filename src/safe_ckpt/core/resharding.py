"""Reading sharded items into any world size and mesh: each rank reads the parts that it needs, planned by DCP's own planner.

The bytes are verified before, by all ranks together (``verify``). Nothing here is a collective, but for what torch itself does
when an optimizer's state is set from whole tensors. No pickle is run that could do more than build DCP's own records.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from safe_ckpt.core.sharded import METADATA
from safe_ckpt.errors import CorruptCheckpointError, RestoreError, StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}


class _Unpickler(pickle.Unpickler):
    """Builds DCP's records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _RECORDS.get(module, ()) or (module == "torch" and isinstance(_dtype(name), torch.dtype))
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
        return super().find_class(module, name)


def _dtype(name: str) -> object:
    return getattr(torch, name, None)


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, map_location="cpu", weights_only=True)  # raises where the next line would run code
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
            found = _Unpickler(stream).load()
    except OSError:
        raise
    except Exception as error:  # whatever a pickle machine makes of bytes that are none
        raise CorruptCheckpointError(path=str(folder), file=METADATA, message=str(error)) from error
    if not isinstance(found, Metadata):
        raise CorruptCheckpointError(path=str(folder), file=METADATA, message="is no metadata of DCP")
    return found


def load_into(folder: Path, state: dict[str, Any]) -> None:
    """Read into the tensors of a state dict, in place; what is no tensor is replaced in it. On this rank alone.

    Args:
        folder: with ``.metadata`` and ``*.distcp``, verified.
        state: nested names to DTensors, tensors and objects.

    Raises:
        RestoreError: names or shapes do not fit; nothing was changed.
        OSError: the files could not be read.
    """
    reader, planner = _Reader(folder), _Planner()
    metadata = reader.read_metadata()
    try:
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise RestoreError(path=str(folder), message=str(error)) from error
    reader.read_data(plan, planner).wait()


def owner_of(optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """The module whose parameters an optimizer steps: its names make the optimizer's state independent of the mesh.

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
    """An optimizer's state by the names of its module's parameters. One that has none yet gets it, without a step."""
    return dict(get_optimizer_state_dict(module, optimizer))


def restore_module(module: torch.nn.Module, folder: Path) -> None:
    """Read a sharded item into a module, sharded or not."""
    state = dict(module.state_dict())
    load_into(folder, state)
    module.load_state_dict(state)


def restore_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read a sharded item into an optimizer, of sharded parameters or not."""
    state = optimizer_state(module, optimizer)
    load_into(folder, state)
    set_optimizer_state(module, optimizer, state)


def named(optimizer: torch.optim.Optimizer, module: torch.nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as ``Optimizer.state_dict`` has it, by the names of the parameters instead of their numbers.

    Raises:
        ValueError: it is of another number of parameters.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    if len(order) != len(numbers):
        raise ValueError(f"it is the state of {len(numbers)} parameters, this optimizer steps {len(order)}")
    name_of = dict(zip(numbers, order, strict=True))
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in whole["param_groups"]]
    return {"state": {name_of[number]: dict(kept) for number, kept in whole["state"].items()}, "param_groups": groups}


def set_optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take back what ``optimizer_state`` gave."""
    set_optimizer_state_dict(module, optimizer, state)
