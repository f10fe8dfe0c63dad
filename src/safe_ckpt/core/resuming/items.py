"""The items of a ``Checkpointer``: which files a rank needs, and reading them, verified on the way, wherever they lie."""

from __future__ import annotations

import dataclasses
import json
import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats import file_plan, hugging_face, safetensors, torch_reading
from safe_ckpt.core.formats.dtypes import ORDER_KEY
from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.home.host_home import HostHome
from safe_ckpt.core.resuming.candidate import FileReader, ObjectReader, Ranks, Reader
from safe_ckpt.core.resuming.host_cache import Host
from safe_ckpt.core.resuming.host_reader import HostReader
from safe_ckpt.core.state.items import PerRank, Shards, StartsAnew, read_once, started_anew
from safe_ckpt.core.state.planner import SHARDED
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.presence import checked_name
from safe_ckpt.core.storage.reader import read_whole
from safe_ckpt.core.storage.source import file_in, size_of, sizes_in
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, IncompleteCheckpointError, RestoreError

logger = logging.getLogger(__name__)


class StoredItems:
    """The items that ``resume`` asks for, as one rank reads them.

    Args:
        state: as given to ``resume``.
        rank: this rank.
        world_size: how many there are.
        whole: verify shards before they are read, and on rank 0 what nobody reads; else only what is read into memory.

    Attributes:
        verified: the manifest of what was read last, with the files that were verified, on any rank.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, world_size: int, *, whole: bool = True) -> None:
        self._state = state
        self._rank = rank
        self._world_size = world_size
        self._whole = whole
        self.verified: Manifest | None = None

    def reader(self, ranks: Ranks, home: Home, *, held: bool = True) -> Reader:
        """Make the reader of candidates: in a file system that is mounted, or in a store; see ``FileReader``."""
        if isinstance(home, HostHome):
            return HostReader(ranks, home, self.needed_on, self.load_here, lambda: self.verified)
        if home.is_mounted:
            return FileReader(ranks, self.load, held=held)
        return ObjectReader(ranks, self.wanted, self.load_fetched, lambda: self.verified)

    def load(self, path: Path) -> dict[str, Any]:
        """Read from a file system that all ranks share, each sharded file once. On rank 0 all is verified, on any by some rank.

        Raises:
            RestoreError: the checkpoint does not fit the state.
            CorruptCheckpointError: bytes are not those that were written.
            IncompleteCheckpointError: a file is not there.
            OSError: one could not be read.
        """
        manifest = read_manifest(path)
        everyone = Host(ranks=tuple(range(self._world_size)), place=self._rank)
        loaded, read = self._load(path, manifest, path, everyone, {entry.path for entry in manifest.files})
        if self._rank == 0 and self._whole:
            # Rank 0 verifies the files that no rank loads: a checkpoint is good as a whole or not at all.
            asked = {file for name in self._state for file in manifest.items[name]["files"].values()}
            elsewhere = {one.path for one in manifest.files if 0 < one.rank < self._world_size and one.path in asked}
            verify_files(path, manifest, only={entry.path for entry in manifest.files} - read - elsewhere)
        return loaded

    def wanted(self, manifest: Manifest, host: Host) -> list[FileEntry]:
        """The files that are fetched to a folder of the host: those of which several of its ranks need something.

        Raises:
            RestoreError: the checkpoint has no such item, or none for this rank.
        """
        entries = {entry.path: entry for entry in manifest.files}
        needed = files_for(manifest, self._state, rank=self._rank, path=manifest.name)
        chosen = self._sharded(manifest, needed)
        if len(host.ranks) > 1:
            items = {name: manifest.items[name] for name in needed}
            whole = [name for name, item in items.items() if item["form"] != SHARDED and not item["per_rank"]]
            chosen += [file for name in whole for file in files_of(needed[name], manifest)]
        return [entries[path] for path in chosen]

    def load_fetched(self, source: ObjectPath, manifest: Manifest, folder: Path, host: Host) -> dict[str, Any]:
        """Read, from the host's ``folder`` what was fetched, the rest from the store: straight into memory.

        Raises:
            RestoreError: the checkpoint does not fit the state.
            CorruptCheckpointError: bytes are not those that were written.
            IncompleteCheckpointError: a file is not there.
            OSError: the store gave no answer.
        """
        fetched = {entry.path for entry in self.wanted(manifest, host)}
        loaded, read = self._load(source, manifest, folder, host, fetched)
        self.verified = dataclasses.replace(manifest, files=tuple(one for one in manifest.files if one.path in read))
        if self._rank == 0:
            check_there(source, manifest.files)
        return loaded

    def needed_on(self, manifest: Manifest, ranks: Sequence[int]) -> set[str]:
        """The files that these ranks read, where each host has a directory of its own: of sharded items what they wrote.

        Where there are other ranks than at the save, each of them may need any shard.
        """
        needed: set[str] = set()
        own = {entry.path for entry in manifest.files if entry.rank in ranks or self._world_size != manifest.world_size}
        for rank in ranks:
            files = files_for(manifest, self._state, rank=rank, path=manifest.name)
            sharded = self._sharded(manifest, files)
            needed.update(file for file in sharded if file in own or file.endswith(DCP_METADATA))
            whole = [file for name, file in files.items() if manifest.items[name]["form"] != SHARDED]
            needed.update(part for file in whole for part in files_of(file, manifest))
        return needed

    def load_here(self, path: Path, host: Host) -> dict[str, Any]:
        """Read from this host's own directory, which has what its ranks need, verified.

        Raises:
            RestoreError: the checkpoint does not fit the state.
            CorruptCheckpointError: bytes are not those that were written.
            IncompleteCheckpointError: a file is not there.
            OSError: one could not be read.
        """
        manifest = read_manifest(path)
        here = self.needed_on(manifest, host.ranks)
        part = dataclasses.replace(manifest, files=tuple(one for one in manifest.files if one.path in here))
        loaded, _ = self._load(path, part, path, host, here)
        self.verified = part
        return loaded

    def _load(
        self, source: Place, manifest: Manifest, folder: Path, host: Host, local: set[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Read what this rank needs. Returns it, and the files that the ranks of the host have verified together.

        Args:
            source: the checkpoint.
            manifest: its manifest.
            folder: where the ``local`` files are.
            host: the ranks that share ``folder``.
            local: files that are there.
        """
        needed = files_for(manifest, self._state, rank=self._rank, path=source)
        sharded = self._sharded(manifest, needed)
        if sharded and self._whole:
            verify_files(folder, manifest, only=set(sharded[host.place :: len(host.ranks)]), cached=True)
        loaded: dict[str, Any] = {}
        metadata = read_once()
        for name, file in needed.items():
            item = manifest.items[name]
            if item["form"] == SHARDED:
                own = any(entry.path == f"{file}/{DCP_METADATA}" for entry in manifest.files)  # until 2026-11-26
                shards = Shards(folder / file, "", metadata) if own else Shards(folder, file, metadata)
                loaded[name] = shards.refuse_code() if self._rank == 0 else shards
            else:
                shared = len(host.ranks) > 1 and not item["per_rank"]
                loaded[name] = load_item(
                    lambda f: folder if f in local else source, manifest, file, name, shared=shared
                )
                if item["per_rank"] and str(self._rank) not in item["files"]:
                    loaded[name] = started_anew(self._state[name].value, loaded[name], self._rank)
        return loaded, {*sharded, *(part for file in needed.values() for part in files_of(file, manifest))}

    def _sharded(self, manifest: Manifest, needed: Mapping[str, str]) -> list[str]:
        folders = [file for name, file in needed.items() if manifest.items[name]["form"] == SHARDED]
        return files_of_items(folders, manifest, besides=DCP_METADATA)


def files_for(manifest: Manifest, state: Mapping[str, Any], *, rank: int, path: Place | str) -> dict[str, str]:
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
            if not manifest.items and (framework := saved_by(manifest)):
                message = f"it was not saved by Checkpointer, but by {framework}: load it with that"
            raise RestoreError(path=str(path), key=f"state[{name!r}]", message=message)
        if bool(item["per_rank"]) != isinstance(value, PerRank):
            saved = "PerRank" if item["per_rank"] else "not PerRank"
            raise RestoreError(path=str(path), key=f"state[{name!r}]", message=f"it was saved {saved}")
        files = item["files"]
        anew = isinstance(value, PerRank) and isinstance(value.value, StartsAnew)
        file = files.get(str(rank) if item["per_rank"] else "0", files.get("0") if anew else None)
        if file is None:
            message = (
                f"it was saved by {manifest.world_size} ranks, each its own, and this is rank {rank}: leave it out of the "
                "state, resume with as many ranks, or give its object a method start_anew(state, rank), which gets what "
                "rank 0 has saved"
            )
            raise RestoreError(path=str(path), key=f"state[{name!r}]", message=message)
        listed = files_of_items([checked_name(file, path)], manifest) if item["form"] == SHARDED else names & {file}
        if not listed:
            message = f"item {name!r} is to be in {file!r:.200}, which is not among its files"
            raise HostileCheckpointError(path=str(path), file=MANIFEST_NAME, message=message)
        needed[name] = file
    return needed


def warn_of_other_ranks(state: Mapping[str, Any], then: int, now: int) -> None:
    """Say on rank 0, after a resume, what became of items of which every rank saved its own, where it were others.

    Args:
        state: as given to ``resume``.
        then: how many ranks saved it.
        now: how many there are.
    """
    names = [name for name, value in state.items() if isinstance(value, PerRank)]
    if names and then != now:
        text = "%s: saved by %d ranks, each its own, and this job has %d: " + (
            "ranks %d to %d start anew from rank 0's" if then < now else "what ranks %d to %d saved is not restored"
        )
        logger.warning(text, ", ".join(names), then, now, min(then, now), max(then, now) - 1)


def saved_by(manifest: Manifest) -> str:
    """Which framework saved a checkpoint, and loads it; "" where it was ``Checkpointer``."""
    if manifest.items:
        return ""
    return str(manifest.notes.get("adapter") or ("Lightning" if manifest.name.endswith(".ckpt") else ""))


def files_of(file: str, manifest: Manifest) -> list[str]:
    """All files of an item: the one that its manifest names, and the shards if that is an index."""
    return [file, *hugging_face.shards_of(file, (entry.path for entry in manifest.files))]


def files_of_items(folders: Collection[str], manifest: Manifest, besides: str = "") -> list[str]:
    """The files in the folders of sharded items, and the one that says of all such items, the largest first."""
    chosen = set(folders)
    entries = [e for e in manifest.files if e.path.rpartition("/")[0] in chosen or (chosen and e.path == besides)]
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
    index = load_file(folders(file), entries[file], {"form": "index"}, name, shared=shared)  # also for other tools
    joined = {key: tensor for part in parts for key, tensor in part.items()}
    with torch_reading.refusing(folders(file), file):
        whole = OrderedDict(safetensors.in_order(joined, json.loads(index["metadata"].get(ORDER_KEY, "[]"))))
    whole._metadata = next((m for part in parts if (m := getattr(part, "_metadata", None)) is not None), OrderedDict())  # type: ignore[attr-defined]
    return whole


def load_file(folder: Place, entry: FileEntry, item: Mapping[str, Any], name: str, *, shared: bool) -> Any:
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
    with (
        torch_reading.refusing(folder, entry.path),
        torch_reading.outside_inference_mode(),
    ):  # it may become the program's own
        loaded = parse(memory, entry.size_bytes)
        return loaded[name] if item["form"] == "tensor" else loaded
