"""Reading sharded items into any world size and mesh: each rank reads the parts that it needs, planned by DCP's own planner.

The bytes are verified before, by all ranks together (``verify``). Nothing here is a collective. No pickle is run that could do
more than build DCP's own records.

Tensors are read straight to where they go: with one copy, from the page cache, where verifying has left them. That works for
entries that lie as we lay them out (``dcp_entries``), and for parts of them that are one run of bytes. DCP's own reader takes
everything else: it unpickles each entry to memory of its own first.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
import io
import math
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from safe_ckpt.core.formats import torch_reading
from safe_ckpt.core.formats.file_plan import lies_as_written
from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.formats.names import matched, plain_names
from safe_ckpt.core.formats.pickles import Odd, Records
from safe_ckpt.core.sharding import dcp_entries, dtensor
from safe_ckpt.core.sharding.dcp_ranks import name_of_empty
from safe_ckpt.core.sharding.dtensor import Fitted, is_extra_state
from safe_ckpt.core.storage.presence import ShortReadError, checked_name, inside, opened
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, RestoreError, StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.futures import Future

_NAMES = "names"
"""Where an optimizer's state says which parameters its groups had, beside the groups of rank 0."""


class _Boxes:
    """A tensor to read into whose part of this rank is no box of the whole: DCP takes it for as many tensors as there are.

    Args:
        tensor: a DTensor that is scattered.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._pieces = {piece.offsets: piece for piece in dtensor.pieces_of(tensor)}

    def size(self) -> torch.Size:
        """Return the size of the whole."""
        return self._tensor.size()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
            for piece in self._pieces.values()
        ]

    def at(self, offset: Sequence[int]) -> torch.Tensor:
        """Return one of its boxes, by where it lies in the whole."""
        piece = self._pieces[tuple(offset)]
        return dtensor.cut(dtensor.local_of(self._tensor), piece.begin, piece.sizes)


class _Planner(DefaultLoadPlanner):
    def set_up_planner(self, *args: Any, **options: Any) -> None:
        super().set_up_planner(*args, **options)
        self.state_dict = {name: _Boxes(v) if dtensor.is_scattered(v) else v for name, v in self.state_dict.items()}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        room = self.state_dict[index.fqn]
        if isinstance(room, _Boxes):
            return room.at(index.offset or ())
        found: torch.Tensor = super().lookup_tensor(index)
        return found

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch_reading.load_plain(value)  # raises where the next line would run code
        value.seek(0)
        super().load_bytes(read_item, value)


def read_metadata(folder: Path) -> Metadata:
    """Read what DCP wrote down about a directory of its own.

    Raises:
        CorruptCheckpointError: it cannot be read as that.
        HostileCheckpointError: it would run code, or names a file elsewhere.
        OSError: it could not be read.
    """
    try:
        with (folder / DCP_METADATA).open("rb") as stream:
            metadata = Records(stream).load()
    except OSError:
        raise
    except Odd as error:
        raise HostileCheckpointError(path=str(folder), file=DCP_METADATA, message=f"its pickle {error}") from None
    except Exception as error:  # whatever a pickle machine makes of bytes that are none
        raise CorruptCheckpointError(path=str(folder), file=DCP_METADATA, message=str(error)) from error
    if not isinstance(metadata, Metadata):
        raise CorruptCheckpointError(path=str(folder), file=DCP_METADATA, message="is no metadata of DCP")
    refuse_outside(folder, metadata)
    return metadata


class Stored:
    """A sharded item of a checkpoint, verified.

    Attributes:
        tensors: what is known of its tensors, by name.
        paths: where every entry belongs in the nested state.
        objects: what is no tensor, read.

    Args:
        folder: with ``.metadata`` and ``*.distcp``.
        within: the key of the saved state that has all of it that is wanted, below it or as its value; "" for the whole.
        metadata: what ``.metadata`` says, where it was read before.

    Raises:
        RestoreError: an object cannot be read. See also ``read_metadata``.
    """

    def __init__(self, folder: Path, within: str = "", metadata: Metadata | None = None) -> None:
        self._folder = folder
        self._metadata = read_metadata(folder) if metadata is None else metadata
        entries, paths = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
        self.paths = {name: tuple(paths.get(name, (name,))) for name in entries}
        if within:
            chosen = {name: path for name, path in self.paths.items() if path[0] == within}
            self.paths = {name: path[1:] or path for name, path in chosen.items() if name != name_of_empty((within,))}
            entries = {name: entries[name] for name in self.paths}
        self.tensors = {name: known for name, known in entries.items() if isinstance(known, TensorStorageMetadata)}
        self.objects: dict[str, Any] = self._read({name: None for name in entries if name not in self.tensors})

    def read(self, rooms: Mapping[str, torch.Tensor | None]) -> Any:
        """Read into tensors, and return the nested state of these names.

        Args:
            rooms: where each name goes; None for a new tensor, and for an object.

        Raises:
            OSError: the files could not be read.
        """
        tensors = {n: self.room(n) if room is None else room for n, room in rooms.items() if n in self.tensors}
        return self.nested({**{n: self.objects[n] for n in rooms if n in self.objects}, **self._read(tensors)})

    def nested(self, values: Mapping[str, Any]) -> Any:
        """The nested state, as far as ``values`` has it, in the order in which it was saved: a dict, or a list."""
        whole: dict[str, Any] = {}
        for name, path in self.paths.items():
            if name in values:
                set_element(whole, ("", *path), values[name])
        return whole.get("", {})

    def room(self, name: str, like: object = None) -> torch.Tensor:
        """A new tensor to read into: spread as ``like`` where that is a tensor of this shape."""
        known = self.tensors[name]
        return new_room(tuple(known.size), known.properties.dtype, like)

    def refuse(self, message: str) -> NoReturn:
        """Raise ``RestoreError``."""
        raise RestoreError(path=str(self._folder), message=message)

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is read into as it is.

        Raises:
            RestoreError: it cannot be.
        """
        if dtensor.is_partial(tensor):
            self.refuse(f"{name} is a DTensor whose parts are still to be reduced: redistribute it first")
        known = self.tensors.get(name)
        return known is not None and (tuple(known.size), known.properties.dtype) == (tuple(tensor.shape), tensor.dtype)

    def refuse_other(self, name: str, tensor: torch.Tensor) -> NoReturn:
        """Raise ``RestoreError`` for a tensor of another shape or type."""
        known = self.tensors.get(name)
        saved = f"{tuple(known.size)} {known.properties.dtype}" if known is not None else "no tensor"
        self.refuse(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the checkpoint has {saved}")

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        if not state:
            return state
        reader, planner = StraightReader(self._folder), _Planner()
        try:
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        except (RuntimeError, ValueError, KeyError, AssertionError) as error:
            raise RestoreError(path=str(self._folder), message=str(error)) from error
        reader.read_data(plan, planner).wait()
        return state


def new_room(shape: tuple[int, ...], dtype: torch.dtype, like: object = None) -> torch.Tensor:
    """A new tensor to read into: spread as ``like`` where that is a tensor of this shape."""
    if isinstance(like, torch.Tensor) and tuple(like.shape) == shape:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device="cpu")


_NOTHING = object()


def fit_value(
    stored: Stored, own: Any, check: Callable[[dict[str, Any]], None], take: Callable[[dict[str, Any]], Any]
) -> Fitted:
    """Compare a sharded item with a nested state. What is no DTensor comes back as it was saved, whatever the state has there.

    Args:
        stored: the item.
        own: the nested state; what of its tensors has the shape and type of the saved one is read into, in place.
        check: gets the saved state with tensors that have no data. It may raise.
        take: gets the saved state, to apply it.

    Raises:
        RestoreError: a DTensor has another shape or type, or the checkpoint has nothing for it.
    """
    rooms: dict[str, Any] = {}
    besides = []
    for name, path in stored.paths.items():
        like = _at(own, path)
        if like is _NOTHING and (name in stored.tensors or any(is_extra_state(str(key)) for key in path)):
            besides.append(name)
        fits = isinstance(like, torch.Tensor) and stored.fits(name, like)
        if dtensor.is_dtensor(like) and not fits:
            stored.refuse_other(name, like)
        rooms[name] = like if fits and dtensor.is_read_into(like) else None
    paths = set(stored.paths.values())
    missing = [(path, leaf) for path, leaf in dtensor.placed(own) if path not in paths]
    anew = _begun_anew(stored, missing) if missing else {}
    unread = [path for path, leaf in missing if dtensor.is_dtensor(leaf)]
    if lost := [path for path in unread if not any(path[: len(one)] == one for one in anew)]:
        stored.refuse(f"the checkpoint has nothing for {['.'.join(map(str, path)) for path in lost]}")
    shapes = {n: torch.empty(tuple(t.size), dtype=t.properties.dtype, device="meta") for n, t in stored.tensors.items()}
    others = frozenset(besides)
    saved = stored.nested({name: shapes.get(name, stored.objects.get(name)) for name in rooms if name not in others})
    check(_with(saved, {path: _at(own, path) for path in anew}))

    def apply(added: Collection[str]) -> Any:
        wanted = [name for name in rooms if name not in others or name in added]
        saved = _with(stored.read({name: rooms[name] for name in wanted}), anew)
        for path in anew:
            dtensor.begin_anew(_at(saved, path[:-1]), path[-1])
        return take(saved)

    return Fitted(apply=apply, besides=besides)


def _with(saved: dict[Any, Any], more: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    for path, value in more.items():
        holder = saved
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = value
    return saved


def _begun_anew(stored: Stored, missing: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[tuple[Any, ...], Any]:
    """Return what the state dict gets for parameters that had no state at the save: nothing, or if it is flattened room."""
    names = [".".join(map(str, path)) for name, path in stored.paths.items() if name in stored.tensors]
    groups = [".".join(map(str, path)) for path in stored.paths.values() if "param_groups" in str(path)]
    above = {part for name in (*names, *groups) for part in (name, *dtensor.names_above(name))}
    found = dict[tuple[Any, ...], Any]()
    for path, leaf in missing:
        for end, where, parameter in dtensor.stepped(path):
            group = f"{where}param_groups" if end < len(path) else f"{where}param_groups.{parameter}"
            if group in above and f"{where}state.{parameter}" not in above:
                zero = torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0
                found[tuple(path[:end])] = {} if end < len(path) else zero
    return found


def with_types_of(own: Any, saved: Any) -> Any:
    """Return what was saved, in mappings of the types that the state has today."""
    if isinstance(saved, dict):
        known = own if isinstance(own, Mapping) else {}
        inner = {key: with_types_of(known[key], part) if key in known else part for key, part in saved.items()}
        if type(own) is dict or not isinstance(own, MutableMapping):
            return inner
        state = copy.copy(own)
        state.clear()
        state.update(inner)
        return state
    if isinstance(saved, list) and isinstance(own, list):
        return [with_types_of(own[i], part) if i < len(own) else part for i, part in enumerate(saved)]
    return saved


def _at(state: Any, path: Sequence[Any]) -> Any:
    """Return what lies at a path, or on the way there and is no container; ``_NOTHING`` where a container ends before."""
    for key in path:
        if isinstance(state, Mapping):
            if key not in state:  # asking a Counter or a defaultdict for it would find something
                return _NOTHING
        elif not isinstance(state, list):
            return state
        elif not isinstance(key, int) or key >= len(state):
            return _NOTHING
        state = state[key]
    return state


def module_stepped_by(optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
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
    own = dtensor.stepping(optimizer).state
    stepped_here = [one for group in optimizer.param_groups for one in group["params"] if own.get(one)]
    parts, marks = dtensor.state_in_parts([(names[id(one)], one, own[one]) for one in stepped_here])
    state = {names[id(one)]: dict(part) for one, part in zip(stepped_here, parts, strict=True)}
    stepped = [group["params"] for group in groups]
    # Other ranks may step others, such as their experts: each kind of rank says it under a name of its own.
    key = hashlib.blake2b(repr(stepped).encode(), digest_size=8).hexdigest()
    marked = {dtensor.PLAIN: marks} if marks else {}
    return {"state": state, "param_groups": groups, _NAMES: {key: stepped}, **marked}


def fit_module(stored: Stored, module: torch.nn.Module) -> Fitted:
    """Compare a sharded item with a module, sharded or not.

    Args:
        stored: the item.
        module: that gets it.

    Raises:
        RestoreError: the checkpoint has nothing for a name, or a tensor of another shape or type.
    """
    own = module.state_dict()
    saved = {path[0] for path in stored.paths.values()}
    names = matched(own, saved, module)
    today = {then: now for now, then in names.items()}
    missing, besides = sorted(own.keys() - names.keys()), sorted(map(str, saved - today.keys()))
    if missing:
        stored.refuse(f"the checkpoint has nothing for {missing}, and the module has no place for {besides}")
    rooms: dict[str, Any] = {}
    for name, path in stored.paths.items():
        if path[0] in today:
            like = own[today[path[0]]]
            fixed = isinstance(like, torch.Tensor) and not is_extra_state(path[0])
            if fixed and not stored.fits(name, like):
                stored.refuse_other(name, like)
            rooms[name] = like if fixed and dtensor.is_read_into(like) else None

    def apply(_: Collection[str]) -> torch.nn.Module:
        values = stored.read(rooms)
        own.update((name, with_types_of(own[name], values[names[name]])) for name in own)
        dtensor.load_module(module, own)
        return module

    return Fitted(apply=apply, besides=besides, refusal="the module has no place for")


def fit_optimizer(stored: Stored, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Fitted:
    """Compare a sharded item with an optimizer, of sharded parameters or not. It gets state for what had some.

    Parameters may be in other groups than they were, as with one group for each mesh, where all that come to one group had
    the same settings.

    Args:
        stored: the item.
        module: whose parameters it steps.
        optimizer: that gets it.

    Raises:
        RestoreError: the checkpoint is of other parameters, or of groups with other settings.
    """
    names = _names(module)
    owned = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    order = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    objects = stored.nested(stored.objects)
    groups = objects.get("param_groups", [])
    grouped = [{*group["params"]} for group in groups]
    for lists in objects.get(_NAMES, {}).values():  # of the ranks that had others
        for known, more in zip(grouped, lists, strict=False):
            known.update(more)
    with_state = {path[1] for path in stored.paths.values() if path[0] == "state" and len(path) > 1}
    saved = with_state.union(*grouped)
    today = {then: now for now, then in matched(owned, saved).items()}
    places = [{today[name] for name in known if name in today} for known in grouped]
    sources = _sources(groups, places, order)
    if sources is None:
        stored.refuse("its groups hold other parameters than those in the checkpoint")
    rooms = _rooms_of_optimizer(stored, optimizer, {then: owned[now] for then, now in today.items()})

    def apply(_: Collection[str]) -> torch.optim.Optimizer:
        state = stored.read(rooms)
        numbers = {name: number for number, name in enumerate(name for own in order for name in own)}
        again = [
            {**(optimizer.param_groups[i] if source is None else state["param_groups"][source])}
            | {"params": [numbers[name] for name in order[i]]}
            for i, source in enumerate(sources)
        ]
        by_number = {numbers[today[name]]: kept for name, kept in state.get("state", {}).items()}
        marks = {dtensor.PLAIN: state[dtensor.PLAIN]} if dtensor.PLAIN in state else {}
        dtensor.load_keeping_types(optimizer, {"state": by_number, "param_groups": again, **marks})
        return optimizer

    return Fitted(apply=apply, besides=sorted(saved - today.keys()), refusal="this optimizer does not step")


def _rooms_of_optimizer(
    stored: Stored, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Any]:
    """Where each name goes that this rank needs: of what is divided, what belongs to its own parameters.

    Raises:
        RestoreError: nothing tells how a plain tensor is spread.
    """
    marks, rooms = dtensor.marks_of(stored.paths.values()), dict[str, Any]()
    own = {id(one) for group in dtensor.stepping(optimizer).param_groups for one in group["params"]}
    for name, path in stored.paths.items():
        if path[0] != "state" or len(path) == 1:
            if path[0] != _NAMES:
                rooms[name] = None
        elif path[1] in parameters and id(parameters[path[1]]) in own:
            rooms[name] = None
            if name in stored.tensors:
                parameter, size = parameters[path[1]], stored.tensors[name].size
                try:
                    like = dtensor.like_which(marks.get(str(path[-1]), ""), parameter, size)
                except ValueError as error:
                    stored.refuse(f"{name}: {error}")
                rooms[name] = stored.room(name, like)
    return rooms


def _sources(
    groups: Sequence[Mapping[str, Any]], places: Sequence[Collection[str]], order: Sequence[Collection[str]]
) -> list[int | None] | None:
    """Which saved group has the settings of each group of today.

    Args:
        groups: the saved ones.
        places: which of the parameters of today they have.
        order: the parameters of the groups of today.

    Returns:
        None for an empty group that has no counterpart, and None for all where there is no such assignment.
    """
    if len(groups) == len(order) and all(set(had).issuperset(own) for had, own in zip(places, order, strict=True)):
        return list(range(len(order)))
    found: list[int | None] = []
    for own in order:
        having = [number for number, had in enumerate(places) if any(name in had for name in own)]
        covered = {name for number in having for name in places[number]}
        alike = all(_same_settings(groups[having[0]], groups[number]) for number in having)
        if not covered.issuperset(own) or not alike:
            return None
        found.append(having[0] if having else None)
    return found


def _same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    absent = object()
    for key in (one.keys() | other.keys()) - {"params"}:
        here, there = one.get(key, absent), other.get(key, absent)
        if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
            equal = here.dtype == there.dtype and torch.equal(here, there)
        else:
            equal = type(here) is type(there) and bool(here == there)
        if not equal:
            return False
    return True


def spread_optimizer(optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
    """Give this rank of a sharded optimizer its parts of a whole state, as ``Optimizer.state_dict`` has it.

    Raises:
        ValueError: it is of another number of parameters.
    """
    parameters = dtensor.by_number(optimizer, whole)
    state = {
        number: {key: _spread(value, parameters[number]) for key, value in kept.items()}
        for number, kept in whole["state"].items()
    }
    dtensor.load_keeping_types(optimizer, {**whole, "state": state})


def _spread(value: Any, like: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or not dtensor.is_dtensor(like):
        return value
    tensor = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    dtensor.copy_part(tensor, value)
    return tensor


def _names(module: torch.nn.Module) -> dict[int, str]:
    """The plain names of parameters, as DCP has them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    for name, plain in plain_names(parameters, module).items():
        names.setdefault(id(parameters[name]), plain)
    return names


def refuse_outside(folder: Path, metadata: Metadata) -> None:
    """Refuse to read files that are not in ``folder``: a reader joins what ``.metadata`` says of their places.

    Raises:
        HostileCheckpointError: one would lie elsewhere.
    """
    for file in {getattr(place, "relative_path", "") for place in (metadata.storage_data or {}).values()}:
        checked_name(file, folder, DCP_METADATA)


class StraightReader(FileSystemReader):
    """Reads what it can straight to where it goes. Not a collective; used on the thread that trains."""

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **options: Any) -> None:
        """Take what ``.metadata`` says."""
        super().set_up_storage_reader(metadata, *args, **options)
        self._tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned.

        Raises:
            OSError: a file could not be read.
        """
        places = self.storage_data
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(places[item.storage_index].relative_path, []).append(item)
        rest: list[ReadItem] = []
        for name, items in by_file.items():
            with opened(inside(Path(self.path), name), os.O_RDONLY) as fd:
                in_order = sorted(items, key=lambda one: places[one.storage_index].offset)
                rest += [item for item in in_order if not self._read(fd, name, item, planner)]
        return super().read_data(dataclasses.replace(plan, items=rest), planner)

    def _read(self, fd: int, name: str, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read one tensor, or return False where it does not lie as ours do."""
        place, known = self.storage_data[item.storage_index], self._tensors.get(item.storage_index.fqn)
        if item.type != LoadItemType.TENSOR or not isinstance(known, TensorStorageMetadata):
            return False
        if getattr(place, "transform_descriptors", None):
            return False
        sizes, dtype = _sizes_of(item, known), known.properties.dtype
        if sizes is None or (first := _first_element(item, sizes)) is None:
            return False
        around = dcp_entries.envelope(dtype, sizes)
        if place.length != around.length or os.pread(fd, len(around.head), place.offset) != around.head:
            return False
        target = planner.resolve_tensor(item).detach()
        if target.dtype != dtype or target.shape != item.lengths:
            return False
        straight = target.is_cpu and lies_as_written(target)
        room = target if straight else torch.empty(tuple(item.lengths), dtype=dtype, device="cpu")
        _fill(fd, name, room, place.offset + len(around.head) + first * dtype.itemsize)
        if not straight:
            target.copy_(room)
        else:
            torch.autograd.graph.increment_version(target)
        planner.commit_tensor(item, target)
        return True


def _sizes_of(item: ReadItem, known: TensorStorageMetadata) -> tuple[int, ...] | None:
    """The shape of the entry that is read from."""
    wanted, hint = item.storage_index.offset, item.storage_index.index
    chunks = known.chunks
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == wanted:
        return tuple(chunks[hint].sizes)
    return next((tuple(chunk.sizes) for chunk in chunks if wanted in (None, chunk.offsets)), None)


def _first_element(item: ReadItem, sizes: tuple[int, ...]) -> int | None:
    """Which element of an entry the wanted part begins with; None if the part is not one run of elements."""
    begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if len(begin) != len(sizes) or lengths[1:] != sizes[1:] or any(begin[1:]):
        return None
    return begin[0] * math.prod(sizes[1:]) if begin else 0


def _fill(fd: int, name: str, tensor: torch.Tensor, offset: int) -> None:
    size, done = tensor.numel() * tensor.element_size(), 0
    if not size:
        return
    memory = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
    while done < size:
        count = os.preadv(fd, [memory[done:]], offset + done)
        if not count:
            raise ShortReadError(name, offset + done)
        done += count
