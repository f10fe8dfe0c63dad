"""The items of a ``Checkpointer``: which files a rank needs, and reading them, verified on the way, wherever they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.resuming.candidate import FileReader, ObjectReader, Reader
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.state import plan, restore
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.transfer.host_cache import Host


class StoredItems:
    """What ``resume`` asks for, as one rank reads it.

    Args:
        state: as given to ``resume``.
        rank: this rank.
        world_size: how many there are.

    Attributes:
        verified: the manifest of what was read last, with the files that were verified, on any rank.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        self._state = state
        self._rank = rank
        self._world_size = world_size
        self.verified: Manifest | None = None

    def reader(self, engine: Engine, home: Home) -> Reader:
        """What reads a candidate in ``home``."""
        if home.is_mounted:
            return FileReader(engine, self.load)
        return ObjectReader(engine, self.wanted, self.load_fetched, lambda: self.verified)

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
        if self._rank == 0:
            # Rank 0 verifies the files that no rank loads: a checkpoint is good as a whole or not at all.
            asked = {file for name in self._state for file in manifest.items[name]["files"].values()}
            elsewhere = {one.path for one in manifest.files if 0 < one.rank < self._world_size and one.path in asked}
            verify(path, manifest, only={entry.path for entry in manifest.files} - read - elsewhere)
        return loaded

    def wanted(self, manifest: Manifest, host: Host) -> list[FileEntry]:
        """The files that are fetched to a folder of the host: those of which several of its ranks need something.

        Raises:
            RestoreError: the checkpoint has no such item, or none for this rank.
        """
        entries = {entry.path: entry for entry in manifest.files}
        needed = self._needed(manifest, manifest.name)
        chosen = self._sharded(manifest, needed)
        if len(host.ranks) > 1:
            items = {name: manifest.items[name] for name in needed}
            whole = [name for name, item in items.items() if item["form"] != plan.SHARDED and not item["per_rank"]]
            chosen += [file for name in whole for file in plan.files_of(needed[name], manifest)]
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
            plan.check_there(source, manifest.files)
        return loaded

    def _load(
        self, source: Place, manifest: Manifest, folder: Path, host: Host, local: set[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """What this rank needs, and the files that the ranks of the host have verified together.

        Args:
            source: the checkpoint.
            manifest: its manifest.
            folder: where the ``local`` files are.
            host: the ranks that share ``folder``.
            local: files that are there.
        """
        needed = self._needed(manifest, source)
        sharded = self._sharded(manifest, needed)
        if sharded:
            verify(folder, manifest, only=set(sharded[host.place :: len(host.ranks)]), cached=True)
        loaded: dict[str, Any] = {}
        for name, file in needed.items():
            item = manifest.items[name]
            if item["form"] == plan.SHARDED:
                shards = restore.Shards(folder / file)
                loaded[name] = shards.refuse_code() if self._rank == 0 else shards
            else:
                shared = len(host.ranks) > 1 and not item["per_rank"]
                loaded[name] = plan.load_item(
                    lambda f: folder if f in local else source, manifest, file, name, shared=shared
                )
        return loaded, {*sharded, *(part for file in needed.values() for part in plan.files_of(file, manifest))}

    def _sharded(self, manifest: Manifest, needed: Mapping[str, str]) -> list[str]:
        folders = [file for name, file in needed.items() if manifest.items[name]["form"] == plan.SHARDED]
        return plan.files_in(folders, manifest)

    def _needed(self, manifest: Manifest, place: Place | str) -> Mapping[str, str]:
        return plan.files_for(manifest, self._state, rank=self._rank, path=Path(str(place)))
