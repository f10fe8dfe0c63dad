"""The items of a ``Checkpointer`` in an object store: which files a rank needs, and reading them, verified on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import FileEntry, Manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.core.state import plan, restore
from safe_ckpt.core.state.planner import SHARDED
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.transfer.host_cache import Host


class StoredItems:
    """What ``resume`` asks for. An item that every rank has for itself, or a lone rank, is read straight into memory.

    Args:
        state: as given to ``resume``.
        rank: this rank.

    Attributes:
        verified: the manifest of what was read last, with the files that were verified, on any rank.
    """

    def __init__(self, state: Mapping[str, Any], rank: int) -> None:
        self._state = state
        self._rank = rank
        self.verified: Manifest | None = None

    def wanted(self, manifest: Manifest, host: Host) -> list[FileEntry]:
        """The files that are fetched to a folder of the host: those of which several ranks need something.

        Raises:
            RestoreError: the checkpoint has no such item, or none for this rank.
        """
        entries = {entry.path: entry for entry in manifest.files}
        needed = self._needed(manifest)
        items = {name: manifest.items[name] for name in needed}
        folders = [needed[name] for name, item in items.items() if item["form"] == SHARDED]
        chosen = plan.files_in(folders, manifest)
        if len(host.ranks) > 1:
            whole = [name for name, item in items.items() if item["form"] != SHARDED and not item["per_rank"]]
            chosen += [file for name in whole for file in plan.files_of(needed[name], manifest)]
        return [entries[path] for path in chosen]

    def load(self, source: ObjectPath, manifest: Manifest, folder: Path, host: Host) -> dict[str, Any]:
        """Read, from the host's ``folder`` what was fetched, the rest from the store.

        Raises:
            RestoreError: the checkpoint does not fit the state.
            CorruptCheckpointError: bytes are not those that were written.
            IncompleteCheckpointError: a file is not there.
            OSError: the store gave no answer.
        """
        fetched = [entry.path for entry in self.wanted(manifest, host)]
        if fetched:
            verify(folder, manifest, only=set(fetched[host.place :: len(host.ranks)]), cached=True)
        loaded: dict[str, Any] = {}
        for name, file in self._needed(manifest).items():
            item = manifest.items[name]
            if item["form"] == SHARDED:
                shards = restore.Shards(folder / file)
                loaded[name] = shards.refuse_code() if self._rank == 0 else shards
            else:
                loaded[name] = plan.load_item(lambda f: folder if f in fetched else source, manifest, file, name)
        needed = self._needed(manifest).values()
        read = {*fetched, *(part for file in needed for part in plan.files_of(file, manifest))}
        self.verified = dataclasses.replace(manifest, files=tuple(one for one in manifest.files if one.path in read))
        if self._rank == 0:
            plan.check_there(source, manifest.files)
        return loaded

    def _needed(self, manifest: Manifest) -> Mapping[str, str]:
        return plan.files_for(manifest, self._state, rank=self._rank, path=Path(manifest.name))


def files_of(manifest: Manifest, host: Host) -> Sequence[FileEntry]:
    """All of them: for a framework's own reader."""
    del host
    return manifest.files
