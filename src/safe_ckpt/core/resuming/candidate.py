"""Reading one candidate on all ranks, from a file system or from an object store, and why all of them pass it over.

From a file system a rank waits for what it does not see yet. From a store each host fetches once what several of
its ranks need.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import identity_of
from safe_ckpt.core.home.visibility import Patience, await_visible
from safe_ckpt.core.resuming.host_cache import Host, HostCache, host_of, hosts_of
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.presence import ShortReadError
from safe_ckpt.core.storage.reader import drop_cache
from safe_ckpt.core.storage.source import in_files, in_store
from safe_ckpt.errors import (
    CorruptCheckpointError,
    DirectoryNotSharedError,
    HostileCheckpointError,
    IncompleteCheckpointError,
    SafeCheckpointError,
    UnsupportedFormatError,
    naming,
)

logger = logging.getLogger(__name__)
_VISIBLE_S = 60.0
_LONGEST_S = 30.0
_UNHELD_S = 2.0
"""Where another job may delete what is read, waiting for what is missing would mostly be in vain: the next one is tried."""
_PAUSE_S = 0.1

KINDS: dict[str, type[CorruptCheckpointError]] = {
    "missing": IncompleteCheckpointError,
    "refused": HostileCheckpointError,
    "bad": CorruptCheckpointError,
}
"""Problems that a candidate may have. Only one of the last kind is damaged, and is moved into quarantine."""
Wanted = Callable[[Manifest, Host], Sequence[FileEntry]]
"""Which files are to be fetched to a folder of the host; the others are read from the store. Equal on all ranks of a host."""
LoadFetched = Callable[[ObjectPath, Manifest, Path, Host], Any]
"""Reads a checkpoint on this rank, verifying what it reads: its folder in the store, its manifest, the folder of the host."""
Step = Callable[[Manifest], "dict[str, Any] | None"]


@dataclass(kw_only=True)
class Rejected:
    """Those that are not resumed from; the same on every rank.

    Attributes:
        why: by name, in the order in which they were passed over.
        kinds: of those that were read, by name: which of ``KINDS``.
    """

    why: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def damaged(self) -> dict[str, str]:
        """Those whose bytes are wrong, and why."""
        return {name: why for name, why in self.why.items() if self.kinds.get(name) == "bad"}


def first_usable(
    infos: Iterable[CheckpointInfo],
    read: Callable[[CheckpointInfo], dict[str, Any] | None],
    rejected: Rejected,
    name_of: Callable[[CheckpointInfo], str],
) -> CheckpointInfo | None:
    """Try one after the other. Every rank calls this.

    Args:
        infos: in the order in which they are tried, on every rank.
        read: says why all ranks pass one over; None when all can use it.
        rejected: gets those that are passed over.
        name_of: under which name.

    Returns:
        The first that all can use; None where there is none.
    """
    for info in infos:
        verdict = read(info)
        if verdict is None:
            return info
        name = name_of(info)
        rejected.why[name], rejected.kinds[name] = verdict["why"], verdict["kind"]
        how = "cannot be used" if verdict["kind"] == "bad" else "is passed over"
        logger.warning("%s %s: %s", info.path, how, verdict["why"])
    return None


class Ranks(Protocol):
    """The ranks that read together. An engine is one; so are those that hold nothing, see ``visit``."""

    @property
    def config(self) -> CheckpointConfig:
        """Settings."""

    @property
    def coordinator(self) -> Coordinator:
        """Where they meet."""

    @property
    def rank(self) -> int:
        """This rank."""

    def agree(self, kind: str, **options: Any) -> Any:
        """One agreed step under ``barrier_s``. See ``Coordinator.agree``."""


class Reader(Protocol):
    """Reads candidates. Every method is called on every rank."""

    def try_one(self, place: Place, *, ours: bool) -> tuple[Any, dict[str, Any] | None]:
        """Read one candidate on all ranks.

        Args:
            place: the candidate.
            ours: it had a manifest of ours when it was listed.

        Returns:
            What this rank read, and why all pass it over: None when all can use it.

        Raises:
            SafeCheckpointError: it could not be read, on every rank; it is not treated as damaged.
        """

    def verified(self) -> Manifest | None:
        """The manifest of the last one, with the files that were verified; None where that is all of them."""

    def rest(self, place: Place) -> bool:
        """Bring files that lay elsewhere to where they are read from. Whether that was done: what failed may be tried again."""

    def close(self) -> None:
        """Delete what was fetched. On this rank alone."""


class FileReader:
    """See ``Reader``: from a file system that all ranks share.

    Args:
        ranks: those that read.
        load: reads one candidate on this rank, verifying what it reads; raises ``CorruptCheckpointError``, of which
            ``IncompleteCheckpointError`` only says that a file was not there, or ``OSError``.
        held: whether this job holds the directory; else another one may delete what is being read.
    """

    def __init__(self, ranks: Ranks, load: Callable[[Path], Any], *, held: bool = True) -> None:
        self._ranks = ranks
        self._load = load
        self._held = held
        self._longest_s = _LONGEST_S if held else _UNHELD_S
        self._damage = KnownDamage()

    def verified(self) -> Manifest | None:
        """See ``Reader``. All of it."""
        return None

    def rest(self, place: Place) -> bool:
        """See ``Reader``. All ranks see all files."""
        del place
        return False

    def close(self) -> None:
        """See ``Reader``."""

    def try_one(self, place: Place, *, ours: bool) -> tuple[Any, dict[str, Any] | None]:
        """See ``Reader``."""
        ranks, load, damage, path = self._ranks, self._load, self._damage, in_files(place)
        loaded: Any = None
        patience = Patience(ranks.config.timeouts, self._longest_s)
        seen = ranks.agree(
            "candidate files",
            must_match={"path": path},
            decide=lambda _: _files(path, patience, ours=ours),
        )
        if seen["missing"]:
            why = f"rank 0: {path} ({', '.join(seen['missing'])}): is missing"
            return None, {"why": why, "kind": "missing"}

        def read() -> dict[str, str]:
            nonlocal loaded
            try:
                with naming(rank=ranks.rank, phase=f"reading {path}"):
                    if ranks.rank != 0:
                        self._await_files(path, seen)
                    damage.refuse(path)
                    loaded = _read(path, load, Patience(ranks.config.timeouts, self._longest_s))
            except CorruptCheckpointError as error:
                kind = problem_kind(error)
                if kind == "bad":
                    damage.note(path, error)
                return {kind: str(error)}
            return {}

        verdict = ranks.coordinator.agree(
            "resume candidate",
            timeout_s=ranks.config.timeouts.lengthy_s,
            must_match={"path": path},
            local=read,
            decide=verdict_of,
        )
        return loaded, verdict

    def _await_files(self, path: Path, seen: Mapping[str, Any]) -> None:
        # Caches of network file systems lag behind. So this rank waits for files that rank 0 sees, and for the replacement of
        # an old manifest.
        timeouts = self._ranks.config.timeouts
        deadline = time.monotonic() + min(_VISIBLE_S if self._held else _UNHELD_S, timeouts.barrier_s / 2)
        for file in [path, *(path / name for name in seen["files"])]:
            if not await_visible(file, max(0.0, deadline - time.monotonic())):
                raise self._unseen(path, file)
        while seen["op_id"] and _op_id(path) != seen["op_id"]:
            if time.monotonic() >= deadline:
                raise self._unseen(path, path)
            time.sleep(0.05)

    def _unseen(self, path: Path, file: Path) -> SafeCheckpointError:
        rank = self._ranks.rank
        if self._held:
            return DirectoryNotSharedError(path=str(file), rank=rank, ranks=(rank,))
        message = "is not what rank 0 saw: it was deleted or replaced since, or the ranks do not share the directory"
        return IncompleteCheckpointError(path=str(path), file="" if file == path else file.name, message=message)


def _files(path: Path, patience: Patience, *, ours: bool) -> dict[str, Any]:
    """Rank 0: which save this is and its files, as far as its manifest can be read, and those that stay missing."""
    while True:
        over = not patience.left_s
        try:
            manifest = read_manifest(path)
            break
        except IncompleteCheckpointError as error:
            # Without a manifest it is another tool's, unless it had one, or its directory names one.
            if not ours and not (presence.is_directory(path) and path / MANIFEST_NAME in presence.entries_in(path)):
                return {"op_id": "", "files": [], "missing": []}
            if over or not patience.until_there(path / error.file):
                return {"op_id": "", "files": [], "missing": [error.file or path.name]}
        except SafeCheckpointError:  # every rank will find it so
            return {"op_id": "", "files": [], "missing": []}
    names = [MANIFEST_NAME, *(entry.path for entry in manifest.files)] if presence.is_directory(path) else []
    missing = [name for name in names if not patience.until_there(path / name)]
    return {"op_id": manifest.op_id, "files": names, "missing": missing}


def _op_id(path: Path) -> str:
    try:
        return read_manifest(path).op_id
    except (SafeCheckpointError, FileNotFoundError):
        return ""


def _read(path: Path, load: Callable[[Path], Any], patience: Patience) -> Any:
    """Load, and again when a file was missing and came back, or once when bytes differed.

    If a second read from the disk shows no mismatch, the memory or the network was at fault. That it is of another format, two
    reads must say: bytes that differ may name one.
    """
    differed: SafeCheckpointError | None = None
    while True:
        over = not patience.left_s
        try:
            return load(path)
        except IncompleteCheckpointError as error:
            if over or not patience.until_there(path / error.file):
                raise
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            if differed and (isinstance(error, CorruptCheckpointError) or isinstance(differed, UnsupportedFormatError)):
                raise
            differed = error
            logger.warning("%s: reading it once more", error)
            drop_cache(path)
        except ShortReadError as error:
            if over:
                raise
            logger.info("%s: waiting for it to be seen as it is", error)
            drop_cache(path)
            time.sleep(_PAUSE_S)
        except FileNotFoundError as error:
            _await_missing(path, error, patience, over=over)


def _await_missing(path: Path, error: FileNotFoundError, patience: Patience, *, over: bool) -> None:
    file = Path(error.filename or "?")
    if isinstance(error, SafeCheckpointError) or path not in (file, *file.parents):
        raise error
    if over or not patience.until_there(file):
        raise IncompleteCheckpointError(path=str(path), file=file.name, message="is missing") from error


class KnownDamage:
    """Files that were found damaged, under whichever name: checkpoints share the bytes of what did not change."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], str] = {}

    def note(self, path: Path, error: CorruptCheckpointError) -> None:
        """A file of a directory was found damaged."""
        identity = identity_of(path / error.file) if error.file else None
        if identity is not None:
            self._found[identity] = str(path / error.file)

    def refuse(self, path: Path) -> None:
        """Look at a directory before it is read.

        Raises:
            CorruptCheckpointError: it shares a damaged file.
        """
        if not self._found or not presence.is_there(path / MANIFEST_NAME):
            return
        for entry in read_manifest(path).files:
            known = self._found.get(identity_of(path / entry.path) or (-1, -1))
            if known is not None:
                raise CorruptCheckpointError(path=str(path), file=entry.path, message=f"is the damaged {known}")


class ObjectReader:
    """See ``Reader``: from an object store.

    Args:
        ranks: those that read.
        wanted: which files are fetched.
        load: reads.
        verified: see ``Reader``.

    Attributes:
        verified: as given.
    """

    def __init__(
        self, ranks: Ranks, wanted: Wanted, load: LoadFetched, verified: Callable[[], Manifest | None]
    ) -> None:
        self._ranks = ranks
        self._wanted = wanted
        self._load = load
        self.verified = verified
        storage = ranks.config.storage
        self._cache = HostCache(storage.cache_dir, part_bytes=storage.part_bytes, at_a_time=2 * storage.parts_in_flight)

    def try_one(self, place: Place, *, ours: bool) -> tuple[Any, dict[str, Any] | None]:
        """See ``Reader``."""
        del ours
        path = in_store(place)
        loaded, verdict = self._try_one(path)
        if verdict is None:
            return loaded, None
        logger.warning("%s: reading it once more", verdict["why"])
        return self._try_one(path.afresh())

    def rest(self, place: Place) -> bool:
        """See ``Reader``. All ranks see all files."""
        del place
        return False

    def close(self) -> None:
        """See ``Reader``."""
        self._cache.clear()

    def _try_one(self, path: ObjectPath) -> tuple[Any, dict[str, Any] | None]:
        attempt = _Attempt(self._ranks.rank, path, self._cache)
        found = self._step("candidate in the store", attempt, attempt.look, _grouped)
        if "verdict" in found:
            return None, found["verdict"]
        attempt.host = host_of(self._ranks.rank, found["hosts"])
        fetch = functools.partial(attempt.fetch, self._wanted, found["token"])
        verdict = self._step("fetch", attempt, fetch, verdict_of)
        if verdict is None:
            verdict = self._step("resume candidate", attempt, functools.partial(attempt.read, self._load), verdict_of)
        return attempt.loaded, verdict

    def _step(self, kind: str, attempt: _Attempt, action: Step, decide: Callable[[Mapping[int, Any]], Any]) -> Any:
        return self._ranks.coordinator.agree(
            kind,
            timeout_s=self._ranks.config.timeouts.lengthy_s,
            must_match={"path": attempt.path},
            local=functools.partial(attempt.tried, action),
            decide=decide,
            phase=f"reading {attempt.path}",
        )


class _Attempt:
    """One candidate on one rank."""

    def __init__(self, rank: int, path: ObjectPath, cache: HostCache) -> None:
        self._rank = rank
        self.path = path
        self._cache = cache
        self._manifest: Manifest | None = None
        self._folder = Path()
        self.host = Host(ranks=(rank,), place=0)
        self.loaded: Any = None

    def look(self, manifest: Manifest) -> dict[str, Any]:
        """Tell which host this is, and which save."""
        needed = sum(entry.size_bytes for entry in manifest.files)
        return {"op_id": manifest.op_id, "host": self._cache.host_id(needed)}

    def fetch(self, wanted: Wanted, token: str, manifest: Manifest) -> None:
        """Fetch this rank's share of what its host needs."""
        if entries := wanted(manifest, self.host):
            self._folder = self._cache.fetch(self.path, entries, token, self.host)

    def read(self, load: LoadFetched, manifest: Manifest) -> None:
        """Read and verify what this rank needs."""
        self.loaded = load(self.path, manifest, self._folder, self.host)

    def tried(self, step: Step) -> dict[str, Any]:
        """Read the manifest, and do a step with it. Returns the result of the step, or the candidate's problem."""
        try:
            with naming(rank=self._rank, phase=f"reading {self.path}", path=str(self.path)):
                self._manifest = self._manifest or read_manifest(self.path)
                return step(self._manifest) or {}
        except CorruptCheckpointError as error:
            return {problem_kind(error): str(error)}


def _grouped(answers: Mapping[int, Any]) -> dict[str, Any]:
    verdict = verdict_of(answers)
    if verdict is not None:
        return {"verdict": verdict}
    if len({answers[rank]["op_id"] for rank in answers}) > 1:
        return {"verdict": {"why": "the ranks read different manifests", "kind": "missing"}}
    return {"hosts": hosts_of({rank: answers[rank]["host"] for rank in answers}), "token": uuid.uuid4().hex}


def problem_kind(error: CorruptCheckpointError) -> str:
    """Return which of ``KINDS`` an error is: ranks tell each other so."""
    return next(kind for kind, error_kind in KINDS.items() if isinstance(error, error_kind))


def verdict_of(answers: Mapping[int, Any]) -> dict[str, Any] | None:
    """Say on rank 0 why a candidate is passed over, and which of ``KINDS`` that is; None when all ranks can use it."""
    for kind in reversed(KINDS):
        for rank in sorted(answers):
            if kind in answers[rank]:
                return {"why": f"rank {rank}: {answers[rank][kind]}", "kind": kind}
    return None
