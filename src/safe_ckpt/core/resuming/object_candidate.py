"""Resuming from an object store: which checkpoint, and how its files get to the ranks. Called by ``resume.choose``."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.transfer.host_cache import Host, HostCache, host_of, hosts_of
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, IncompleteCheckpointError, naming

logger = logging.getLogger(__name__)

KINDS: dict[str, type[CorruptCheckpointError]] = {
    "missing": IncompleteCheckpointError,
    "refused": HostileCheckpointError,
    "bad": CorruptCheckpointError,
}
"""What may be wrong with a candidate. Only one of the last kind is damaged, and is moved into quarantine."""
Wanted = Callable[[Manifest, Host], Sequence[FileEntry]]
"""Which files are to be fetched to a folder of the host; the others are read from the store. Equal on all ranks of a host."""
LoadFetched = Callable[[ObjectPath, Manifest, Path, Host], Any]
"""Reads a checkpoint on this rank, verifying what it reads: its folder in the store, its manifest, the folder of the host."""


class ObjectReader:
    """Reads candidates. Every method is called on every rank.

    Args:
        engine: where the ranks meet.
        wanted: which files are fetched.
        load: reads.
        verified: returns the manifest of the last one, with the files that were verified.

    Attributes:
        verified: as given.
    """

    def __init__(
        self, engine: Engine, wanted: Wanted, load: LoadFetched, verified: Callable[[], Manifest | None]
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._load = load
        self.verified = verified
        storage = engine.config.storage
        self._cache = HostCache(storage.cache_dir, part_bytes=storage.part_bytes, at_a_time=2 * storage.parts_in_flight)

    def try_one(self, path: ObjectPath) -> tuple[Any, dict[str, Any] | None]:
        """Read one candidate on all ranks. Returns what this rank read, and why all pass it over; None when all can use it."""
        loaded, verdict = self._try_one(path)
        if verdict is None:
            return loaded, None
        logger.warning("%s: reading it once more", verdict["why"])
        return self._try_one(path.afresh())

    def close(self) -> None:
        """Delete what was fetched. On this rank alone."""
        self._cache.clear()

    def _try_one(self, path: ObjectPath) -> tuple[Any, dict[str, Any] | None]:
        attempt = _Attempt(self._engine.rank, path, self._cache)
        found = self._step("candidate in the store", path, attempt.look, _grouped)
        if "verdict" in found:
            return None, found["verdict"]
        attempt.host = host_of(self._engine.rank, found["hosts"])
        verdict = self._step("fetch", path, lambda: attempt.fetch(self._wanted, found["token"]), judge)
        if verdict is None:
            verdict = self._step("resume candidate", path, lambda: attempt.read(self._load), judge)
        return attempt.loaded, verdict

    def _step(
        self, kind: str, path: ObjectPath, local: Callable[[], Any], decide: Callable[[Mapping[int, Any]], Any]
    ) -> Any:
        limit_s = self._engine.config.timeouts.lengthy_s
        return self._engine.coordinator.agree(
            kind, timeout_s=limit_s, must_match={"path": path}, local=local, decide=decide, phase=f"reading {path}"
        )


class _Attempt:
    """One candidate on one rank."""

    def __init__(self, rank: int, path: ObjectPath, cache: HostCache) -> None:
        self._rank = rank
        self._path = path
        self._cache = cache
        self._manifest: Manifest | None = None
        self._folder = Path()
        self.host = Host(ranks=(rank,), place=0)
        self.loaded: Any = None

    def look(self) -> dict[str, Any]:
        """Read the manifest, and tell which host this is."""
        found = self._tried(self._look)
        return {**found, "host": self._cache.host_id(self._needed)} if found.keys().isdisjoint(KINDS) else found

    def fetch(self, wanted: Wanted, token: str) -> dict[str, Any]:
        """Fetch this rank's share of what its host needs."""
        return self._tried(lambda manifest: self._fetch(wanted(manifest, self.host), token))

    def read(self, load: LoadFetched) -> dict[str, Any]:
        """Read and verify what this rank needs."""

        def read(manifest: Manifest) -> dict[str, Any]:
            self.loaded = load(self._path, manifest, self._folder, self.host)
            return {}

        return self._tried(read)

    def _look(self, manifest: Manifest) -> dict[str, Any]:
        return {"op_id": manifest.op_id}

    def _fetch(self, entries: Sequence[FileEntry], token: str) -> dict[str, Any]:
        if entries:
            self._folder = self._cache.fetch(self._path, entries, token, self.host)
        return {}

    @property
    def _needed(self) -> int:
        return sum(entry.size_bytes for entry in self._manifest.files) if self._manifest is not None else 0

    def _tried(self, step: Callable[[Manifest], dict[str, Any]]) -> dict[str, Any]:
        try:
            with naming(rank=self._rank, phase=f"reading {self._path}", path=str(self._path)):
                self._manifest = self._manifest or read_manifest(self._path)
                return step(self._manifest)
        except CorruptCheckpointError as error:
            return {kind_of(error): str(error)}


def _grouped(answers: Mapping[int, Any]) -> dict[str, Any]:
    verdict = judge(answers)
    if verdict is not None:
        return {"verdict": verdict}
    if len({answers[rank]["op_id"] for rank in answers}) > 1:
        return {"verdict": {"why": "the ranks read different manifests", "kind": "missing"}}
    return {"hosts": hosts_of({rank: answers[rank]["host"] for rank in answers}), "token": uuid.uuid4().hex}


def kind_of(error: CorruptCheckpointError) -> str:
    """What is wrong, as ranks tell each other: one of ``KINDS``."""
    return next(kind for kind, error_kind in KINDS.items() if isinstance(error, error_kind))


def judge(answers: Mapping[int, Any]) -> dict[str, Any] | None:
    """On rank 0: why a candidate is passed over, and which of ``KINDS`` that is; None when all ranks can use it."""
    for kind in reversed(KINDS):
        for rank in sorted(answers):
            if kind in answers[rank]:
                return {"why": f"rank {rank}: {answers[rank][kind]}", "kind": kind}
    return None
