"""What a state consists of: names to objects, and objects to files."""

from __future__ import annotations

import mmap
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from safe_ckpt.core.formats import file_plan, hugging_face, safetensors, torch_archive, torch_reading
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, FileEntry, Manifest
from safe_ckpt.core.names import plain_name, plain_names
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.staging import overlap
from safe_ckpt.core.storage.inside import checked_name
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.reader import read_whole
from safe_ckpt.core.storage.source import file_in, size_of, sizes_in
from safe_ckpt.errors import (
    CorruptCheckpointError,
    HostileCheckpointError,
    IncompleteCheckpointError,
    RestoreError,
    StateError,
)

_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}\Z")
_SMALL_PARTS = 4 << 20
_OF_A_RANK = re.compile(r"\.rank\d{5,}\Z")
_FILE = re.compile(r"(\.rank\d{5,})?\.(json|pt|safetensors|safetensors\.index\.json)")  # behind the name of its item
_OF_SHARDS = re.compile(r"^(.+?)(-\d{5}-of-\d{5}|\.safetensors\.index)\Z")
SHARDED = "sharded"


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimizers, schedulers, loaders: anything with these two methods."""

    def state_dict(self) -> Any:
        """The state to save."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state back."""


@dataclass(frozen=True)
class PerRank:
    """Marks an item of the state of which every rank saves its own, such as a random generator's state.

    Attributes:
        value: what this rank saves: a Stateful, a state dict, a tensor or JSON-able data.
    """

    value: Any


@dataclass(frozen=True, kw_only=True)
class Item:
    """One name of a state, planned on one rank. The first of its files is the one that leads to the others."""

    name: str
    images: tuple[FilePlan, ...]
    per_rank: bool
    form: str

    def to_json(self) -> dict[str, Any]:
        """How it is described in the manifest."""
        return {"file": self.images[0].path, "per_rank": self.per_rank, "form": self.form}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this rank writes of a state.

    Attributes:
        items: names that become one file.
        sharded: names of which every rank has a part; the same on all ranks.
        views: the fingerprints of those that will be known next time.
        held: what this rank holds of the items that rank 0 saves for all; see ``held.held``.
    """

    items: Sequence[Item] = ()
    sharded: Mapping[str, Any] = field(default_factory=dict)
    views: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def described(self, rank: int) -> dict[str, dict[str, Any]]:
        """What the manifest says of them."""
        items = {item.name: item.to_json() for item in self.items}
        if rank == 0:
            items.update({name: {"file": name, "per_rank": False, "form": SHARDED} for name in self.sharded})
        return items


def optimizers_last(state: Mapping[str, Any]) -> list[str]:
    """The names, those of optimizers behind the others.

    After a forward without backward FSDP2 has replaced the parameters of its modules. Asking for their state undoes that.
    """
    return sorted(state, key=lambda name: isinstance(state[name], torch.optim.Optimizer))


def modules_of(state: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """The modules of a state by name."""
    return {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}


def check_step(step: object) -> None:
    """Refuse what is no training step.

    Raises:
        StateError: naming it.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateError(key="step", message=f"expected a whole number from 0 up, got {step!r}")


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers.

    Raises:
        StateError: one is none; names it.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise StateError(key=f"metrics[{name!r}]", message=f"expected a number, got {value!r}") from error
    return numbers


def expected_bytes(state: Mapping[str, Any], *, rank: int) -> int:
    """About how much this rank will save of ``state``, optimizers counted as they will be after their first step."""
    try:
        values = [v for v in state.values() if rank == 0 or isinstance(v, PerRank) or dtensor.has_sharded(v)]
        total = sum(_expected_bytes(value.value if isinstance(value, PerRank) else value) for value in values)
    except Exception:  # this is an estimate: parameters may have no size yet, and ``save`` reports what is wrong
        return 0
    # Headers, and payloads begin at page boundaries.
    return total + min(total // 64, 48 << 20) + min(total, _SMALL_PARTS)


def _expected_bytes(value: Any) -> int:
    if isinstance(value, torch.optim.Optimizer):
        return overlap.expected_state_bytes(value)
    if isinstance(value, torch.nn.Module):
        tensors = {id(tensor): tensor for tensor in (*value.parameters(), *value.buffers())}
        return sum(_expected_bytes(tensor) for tensor in tensors.values())
    if isinstance(value, torch.Tensor):
        return dtensor.local_of(value).numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_expected_bytes(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(_expected_bytes(inner) for inner in value)
    return 0


def check_names(state: Mapping[str, Any]) -> None:
    """Refuse names that cannot become file names, or that could stand for another item's file.

    Raises:
        StateError: naming the name.
    """
    for name in state:
        fits = isinstance(name, str) and _NAME.match(name) and not _OF_A_RANK.search(name)
        if not fits or name == Path(MANIFEST_NAME).stem:
            message = (
                "a name becomes a file name: use letters, digits and _ . + = - "
                "(but neither 'manifest' nor an end like '.rank00000')"
            )
            raise StateError(key=f"state[{name!r}]", message=message)
        shard = _OF_SHARDS.match(name)
        if shard is not None and shard.group(1) in state:
            message = f"state[{shard.group(1)!r}] may need a file of this name: take another name"
            raise StateError(key=f"state[{name!r}]", message=message)
    folded = [name.casefold() for name in state]
    if len(set(folded)) != len(folded):
        raise StateError(key="state", message="two names differ only in case: some file systems cannot tell them apart")


def check_folders(sharded: Iterable[str], names: Iterable[str]) -> None:
    """Refuse names of sharded items whose folder could have the name of a file.

    Args:
        sharded: the names of sharded items: each is that of a folder.
        names: of all items.

    Raises:
        StateError: naming the name.
    """
    others = [name.casefold() for name in names]
    for name in sharded:
        folded = name.casefold()
        of = next((o for o in others if folded.startswith(o) and _FILE.fullmatch(folded, len(o))), None)
        if of is not None or folded == MANIFEST_NAME:
            what = "the manifest's name" if of is None else f"the name of a file of state[{of!r}]"
            raise StateError(key=f"state[{name!r}]", message=f"its folder would have {what}: take another name")


def resolve(name: str, value: Any, state: Mapping[str, Any]) -> tuple[Any, str]:
    """What is saved of a value, and whether it is a single tensor."""
    inner = value.value if isinstance(value, PerRank) else value
    if isinstance(inner, torch.optim.Optimizer) and dtensor.has_sharded(inner):
        from safe_ckpt.core.sharding import dcp_load  # DCP takes a while to import

        return dcp_load.optimizer_state(dcp_load.owner_of(inner, modules_of(state)), inner), "value"
    if isinstance(inner, torch.nn.Module):
        dtensor.refuse_partitioned(inner)
    if isinstance(inner, Stateful):
        return inner.state_dict(), "value"
    if type(inner) in (torch.Tensor, torch.nn.Parameter) or dtensor.is_sharded(inner):
        return {name: inner}, "tensor"
    return inner, "value"


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """The names of its parameters that are not trained; see ``hugging_face.is_named``."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sides: tuple[set[str], set[str]] = set(), set()
    for name, plain in plain_names(parameters, module).items():
        sides[parameters[name].requires_grad].update((name, plain_name(name), plain))
    frozen, trained = sides
    return frozenset(frozen - trained)


def plan_item(
    name: str,
    inner: Any,
    form: str,
    rank: int | None,
    *,
    floats: bool = False,
    frozen: frozenset[str] = frozenset(),
) -> Item:
    """Plan one item: one file, or several with an index if much of it is not trained.

    Args:
        name: of the item.
        inner: what is saved of it.
        form: as ``resolve`` has it.
        rank: of an item of which every rank has its own; else None.
        floats: see ``torch_image``.
        frozen: what ``frozen_names`` returned.

    Raises:
        StateError: it cannot be saved; names where.
    """
    stem = name if rank is None else f"{name}.rank{rank:05d}"
    key = f"state[{name!r}]"
    try:
        images = _images(stem, inner, key, floats=floats, frozen=frozen)
    except (RecursionError, ValueError) as error:  # a cycle; a number of more digits than Python prints
        raise StateError(key=key, message=f"{type(error).__name__}: {error}") from error
    return Item(name=name, images=tuple(images), per_rank=rank is not None, form=form)


def _images(stem: str, inner: Any, key: str, *, floats: bool, frozen: frozenset[str]) -> list[FilePlan]:
    if safetensors.fits_safetensors(inner):
        named = {name for name in inner if hugging_face.is_named(name, frozen)} if frozen else frozen
        apart = hugging_face.frozen_apart(stem, inner, named, file_plan.LEAST_SHARED_BYTES) if named else []
        if apart:
            return apart
        image = safetensors.safetensors_image(f"{stem}.safetensors", inner)
        return [replace(image, frozen=named.issuperset(inner))]
    if file_plan.is_exact_json(inner):
        return [file_plan.json_image(f"{stem}.json", inner)]
    return [torch_archive.torch_image(f"{stem}.pt", inner, strict=True, key=key, floats=floats)]


def files_for(manifest: Manifest, state: Mapping[str, Any], *, rank: int, path: Path) -> dict[str, str]:
    """Which file of the checkpoint this rank needs for each name of ``state``.

    Raises:
        RestoreError: the checkpoint has no such item, or none for this rank.
        HostileCheckpointError: the manifest names a file that it does not list.
    """
    needed = {}
    names = {entry.path for entry in manifest.files}
    for name, value in state.items():
        item = manifest.items.get(name)
        if item is None:
            message = f"the checkpoint has no such item; it has: {', '.join(manifest.items) or 'nothing'}"
            raise RestoreError(path=str(path), key=f"state[{name!r}]", message=message)
        if bool(item["per_rank"]) != isinstance(value, PerRank):
            saved = "PerRank" if item["per_rank"] else "not PerRank"
            raise RestoreError(path=str(path), key=f"state[{name!r}]", message=f"it was saved {saved}")
        files = item["files"]
        file = files.get(str(rank) if item["per_rank"] else "0")
        if file is None:
            message = (
                f"it was saved by {manifest.world_size} ranks, each its own, and this is rank {rank}: "
                "leave it out of the state, or resume with as many ranks"
            )
            raise RestoreError(path=str(path), key=f"state[{name!r}]", message=message)
        listed = files_in([checked_name(file, path)], manifest) if item["form"] == SHARDED else names & {file}
        if not listed:
            message = f"item {name!r} is to be in {file!r:.200}, which is not among its files"
            raise HostileCheckpointError(path=str(path), file=MANIFEST_NAME, message=message)
        needed[name] = file
    return needed


def files_of(file: str, manifest: Manifest) -> list[str]:
    """All files of an item: the one that its manifest names, and the shards if that is an index."""
    return [file, *hugging_face.shards_of(file, (entry.path for entry in manifest.files))]


def files_in(folders: Iterable[str], manifest: Manifest) -> list[str]:
    """The files of sharded items, the largest first."""
    chosen = set(folders)
    entries = [entry for entry in manifest.files if entry.path.rpartition("/")[0] in chosen]
    return [entry.path for entry in sorted(entries, key=lambda entry: (-entry.size_bytes, entry.path))]


def check_there(path: Place, entries: Iterable[FileEntry]) -> None:
    """Check that files which nobody reads are there, with the size that they should have. Their bytes are not read.

    Raises:
        CorruptCheckpointError: one has another size.
        IncompleteCheckpointError: one is not there.
        OSError: the store gave no answer.
    """
    entries = list(entries)
    there = sizes_in(path, [entry.path for entry in entries])
    for entry in entries:
        size = there.get(entry.path)
        if size is None:
            raise IncompleteCheckpointError(path=str(path), file=entry.path, message="is missing")
        if size != entry.size_bytes:
            message = f"has {size} bytes instead of {entry.size_bytes}"
            raise CorruptCheckpointError(path=str(path), file=entry.path, message=message)


def load_item(
    folders: Callable[[str], Place], manifest: Manifest, file: str, name: str, *, shared: bool = False
) -> Any:
    """Read an item, check its files against the manifest, and return what they hold.

    Args:
        folders: where the checkpoint is from which a file is read.
        manifest: of the checkpoint.
        file: the one that the manifest names for the item.
        name: of the item.
        shared: see ``load_file``.

    Raises:
        CorruptCheckpointError: bytes are not those that were written.
        IncompleteCheckpointError: a file is not there.
        OSError: one could not be read; it is not treated as corrupt.
    """
    entries = {entry.path: entry for entry in manifest.files}
    item = manifest.items[name]
    parts = [
        load_file(folders(path), entries[path], item, name, shared=shared)
        for path in (files_of(file, manifest)[1:] or [file])
    ]
    if len(parts) == 1:
        return parts[0]
    load_file(folders(file), entries[file], {"form": "index"}, name, shared=shared)  # other tools need it to be right
    whole = OrderedDict((key, tensor) for part in parts for key, tensor in part.items())
    whole._metadata = next((m for part in parts if (m := getattr(part, "_metadata", None)) is not None), OrderedDict())  # type: ignore[attr-defined]
    return whole


def load_file(folder: Place, entry: FileEntry, item: Mapping[str, Any], name: str, *, shared: bool = False) -> Any:
    """Read one file, check it against the manifest while it is in memory, and return what it holds.

    Args:
        folder: the checkpoint.
        entry: the file, as the manifest has it.
        item: what it is of, as the manifest has it.
        name: of the item.
        shared: other ranks of this host read it at the same time: the storage is read once, for all of them.

    Raises:
        CorruptCheckpointError: its bytes are not those that were written.
        HostileCheckpointError: they are, and to read them would run code.
        IncompleteCheckpointError: it is not there.
        OSError: it could not be read; it is not treated as corrupt.
    """
    file = file_in(folder, entry.path)
    try:
        size_bytes = size_of(file)
        memory, digest = read_whole(file, entry.size_bytes, cached=shared)
    except IsADirectoryError:
        raise CorruptCheckpointError(path=str(folder), file=entry.path, message="is a directory") from None
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteCheckpointError(path=str(folder), file=entry.path, message="is missing") from None
    if size_bytes != entry.size_bytes or digest != entry.xxh3_128:
        message = f"its {size_bytes} bytes are not the {entry.size_bytes} that were written"
        raise CorruptCheckpointError(path=str(folder), file=entry.path, message=message)
    if file.suffix == ".json":
        parse: Callable[[mmap.mmap, int], Any] = file_plan.parse_json
    else:
        parse = safetensors.parse_safetensors if file.suffix == ".safetensors" else torch_reading.parse_archive
    with torch_reading.refusing(folder, entry.path):
        loaded = parse(memory, entry.size_bytes)
        return loaded[name] if item["form"] == "tensor" else loaded
