"""The mirror: committed checkpoints are uploaded to an object store in the background, by a process of its own.

Used on rank 0. The process is as nice as can be, so that it gives way to training and to the writer of the next save. Where
uploads take longer than saves come, only the newest that waits is uploaded, and those that ``keep_every_steps`` names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.core.directory import retention
from safe_ckpt.core.directory.catalog import Candidate, newest_first
from safe_ckpt.core.directory.object_catalog import ObjectCatalog, list_objects
from safe_ckpt.core.directory.object_root import ObjectRoot
from safe_ckpt.core.directory.workspace import HIDDEN, Workspace
from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry, read_manifest
from safe_ckpt.core.staging.worker_thread import Background, Refused
from safe_ckpt.core.storage.copier import FileCopy, Stamp
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import ObjectPath, Place, open_place
from safe_ckpt.core.transfer.fetching import fetch_into, mirrored, name_of
from safe_ckpt.core.writer.client import WriteJob
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import CorruptCheckpointError, SafeCheckpointError, SaveError, named

logger = logging.getLogger(__name__)
NAMED = "named"
_NICENESS = 19
_LOOK_S = 0.1
_LAST_WORDS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    root: ObjectPath
    workspace: Workspace
    info: CheckpointInfo


@dataclass(kw_only=True)
class _Tier:
    """One directory of the mirror, owned by this job."""

    root: ObjectRoot
    catalog: ObjectCatalog
    uploaded: set[str]
    names: dict[Place, str]


class Mirror:
    """Uploads what was committed. Called on any thread of rank 0.

    Args:
        config: settings with a ``mirror.url``.
        emit: receives what happens.
        owner: what this belongs to and how that is ended, for messages.

    Attributes:
        stop_by: when the job must be over, on the monotonic clock; what is not uploaded by then is given up.
        error: why the newest is not uploaded; None where nothing is wrong.

    Raises:
        ConfigError: the url is none, or obstore is not installed.
    """

    def __init__(self, config: CheckpointConfig, emit: Callable[[events.Event], None], owner: str) -> None:
        self._config = config
        self._emit = emit
        self._owner = owner
        self._options = StorageOptions.of(config.storage, config.timeouts.lengthy_s)
        self._top = open_place(config.mirror.url or "", self._options)
        writer = dataclasses.replace(config.writer, niceness=_NICENESS, inline_bytes=0)
        self._writer = WriterSupervisor(writer, config.timeouts, self._respawned, self._options)
        self._background = Background("safe_ckpt-mirror", self._work)
        self._turn = threading.Condition()
        self._queue: list[_Waiting] = []
        self._current: _Waiting | None = None
        self._there: set[str] = set()  # uploaded by an earlier job, by the saves' ids
        self._committed: dict[Place, _Waiting] = {}
        self._deleted: set[tuple[ObjectPath, str]] = set()
        self._tiers: dict[ObjectPath, _Tier] = {}
        self._newest: dict[ObjectPath, int] = {}  # the highest number in the order of commits that is uploaded
        self._first: Path | None = None
        self._closing = threading.Event()
        self._rate = 0.0
        self.stop_by: float | None = None
        self.error: SafeCheckpointError | None = None

    def root_of(self, workspace: Workspace) -> ObjectPath:
        """Where the checkpoints of a directory go: of the first one to the url itself, of others to a folder in it."""
        if workspace.hidden.parent.parent.name == HIDDEN:  # taken for one name alone
            return self._top / NAMED
        if self._first is None:
            self._first = workspace.path
        return self._top if self._first == workspace.path else self._top / workspace.path.name

    def put(self, info: CheckpointInfo, workspace: Workspace) -> None:
        """This was committed: upload it."""
        if workspace.path not in info.file_path.parents:
            return  # a file elsewhere, of which a resume knows nothing
        if info.op_id in self._there:
            return
        waiting = _Waiting(root=self.root_of(workspace), workspace=workspace, info=info)
        every = self._config.mirror.keep_every_steps
        with self._turn:
            passed = [
                one
                for one in self._queue
                if one.root == waiting.root and not (every is not None and one.info.step % every == 0)
            ]
            self._queue = [*(one for one in self._queue if one not in passed), waiting]
            self._committed[info.path] = waiting
            self._deleted.discard((waiting.root, info.file_path.relative_to(workspace.path).as_posix()))
        for one in passed:
            logger.info("%s is not mirrored: a newer one is there, and the mirror is behind", one.info.path)
        try:
            self._background.put(info.name)
        except Refused as error:
            logger.warning("%s is not mirrored: %s", info.path, error)

    def holding(self, paths: Sequence[Place]) -> set[Place]:
        """Those of ``paths`` that must not be deleted now: one that is being uploaded, and what ``required`` protects."""
        with self._turn:
            current = self._current.info.path if self._current is not None else None
            held = {path for path in paths if path == current or self._is_protected(path)}
            for path in set(paths) - held:
                self._committed.pop(path, None)
        return held

    def _is_protected(self, path: Place) -> bool:
        """Whether ``required`` keeps it: neither it nor a newer one of its directory is uploaded."""
        if not self._config.mirror.required:
            return False
        if path not in self._committed:  # an earlier job's
            return not self._newest
        one = self._committed[path]
        return one.info.sequence > self._newest.get(one.root, -1)

    def candidates(self, workspace: Workspace) -> list[Candidate]:
        """What the mirror has of a directory, the newest first.

        Raises:
            OSError: the store gives no answer.
        """
        patient = self.root_of(workspace)
        near = ObjectPath(patient.bucket.within(self._config.timeouts.barrier_s / 2), patient.key)
        found = list_objects(near)
        self._there |= {one.manifest.op_id for one in found if one.manifest is not None}
        return newest_first(found)

    def fetch(self, candidate: Candidate, workspace: Workspace) -> CheckpointInfo:
        """Bring one into the directory.

        Raises:
            CorruptCheckpointError: it is damaged, or something of it is not there.
            OSError: the store gave no answer, or the disk refuses.
        """
        if candidate.manifest is None or not isinstance(candidate.path, ObjectPath):
            raise CorruptCheckpointError(path=str(candidate.path), message=candidate.problem or "has no manifest")
        storage, begun = self._config.storage, time.monotonic()
        info = fetch_into(
            workspace,
            candidate.path,
            candidate.manifest,
            at_a_time=2 * storage.parts_in_flight,
            part_bytes=storage.part_bytes,
        )
        seconds = time.monotonic() - begun
        self._emit(
            events.Fetched(
                rank=0, path=str(info.path), url=str(candidate.path), size_bytes=info.size_bytes, seconds=seconds
            )
        )
        with self._turn:  # it need not be uploaded again
            root = self.root_of(workspace)
            self._newest[root] = max(self._newest.get(root, -1), info.sequence)
        return info

    def deleted(self, paths: Sequence[Place], workspace: Workspace) -> None:
        """Retention has deleted these. With ``follow`` their copies go, too, after the next upload."""
        if not self._config.mirror.follow:
            return
        place = self.root_of(workspace)
        gone = [path for path in paths if isinstance(path, Path) and workspace.path in path.parents]
        with self._turn:
            self._deleted |= {(place, path.relative_to(workspace.path).as_posix()) for path in gone}

    def progress(self) -> int:
        """A number that changes as long as bytes move."""
        return self._writer.progress()

    def drain(self, within_s: float | None = None) -> None:
        """Upload the newest that waits.

        Waits as long as bytes move, and ``shutdown_s`` for what makes no progress.

        Args:
            within_s: wait this long at most, progress or not.
        """
        with self._turn:
            size = sum(one.info.size_bytes for one in self._known())
        if size:
            self._forecast(size)
        self._background.end()
        try:
            self._drain(within_s)
        finally:
            self._closing.set()
            self._background.join(_LAST_WORDS_S)
        with self._turn:
            left = [str(one.info.path) for one in self._known()]
        if left:
            logger.warning("not mirrored in time: %s", ", ".join(left))

    def close(self) -> None:
        """Give the mirror back, after ``drain``."""
        self._writer.close()
        for tier in self._tiers.values():
            with contextlib.suppress(OSError, SafeCheckpointError):
                self._follow(tier)
            tier.root.close()

    def _forecast(self, size: int) -> None:
        left = "" if self.stop_by is None else f", {max(0.0, self.stop_by - time.monotonic()):.0f} s are left"
        takes = f"about {size / self._rate:.0f} s" if self._rate else "an unknown time"
        logger.info("uploading %d MiB to the mirror takes %s%s", size >> 20, takes, left)

    def _drain(self, within_s: float | None) -> None:
        limit_s = self._config.timeouts.shutdown_s if within_s is None else within_s
        seen, since = self.progress(), time.monotonic()
        while self._background.is_alive and time.monotonic() - since <= limit_s:
            if self.stop_by is not None and time.monotonic() > self.stop_by:
                return
            self._background.join(_LOOK_S)
            if (now := self.progress()) != seen and within_s is None:
                seen, since = now, time.monotonic()

    def _known(self) -> list[_Waiting]:
        return [*([self._current] if self._current is not None else []), *self._queue]

    def _work(self, _: str) -> None:
        with self._turn:
            if not self._queue or self._closing.is_set():
                return
            self._current = self._queue.pop(0)
        one, begun = self._current, time.monotonic()
        try:
            url = self._upload(one)
        except Exception as error:
            self.error = named(error, rank=0, phase="mirroring", path=one.info.path)
            logger.warning("%s is not mirrored: %s", one.info.path, self.error)
            self._emit(events.Mirrored(rank=0, path=str(one.info.path), url=str(one.root), error=str(self.error)))
        else:
            self._uploaded(one, url, time.monotonic() - begun)
        finally:
            with self._turn:
                self._current = None

    def _uploaded(self, one: _Waiting, url: str, seconds: float) -> None:
        self.error = None
        with self._turn:
            self._newest[one.root] = max(self._newest.get(one.root, -1), one.info.sequence)
        if not url:
            return
        self._rate = one.info.size_bytes / max(seconds, 1e-3)
        self._emit(
            events.Mirrored(rank=0, path=str(one.info.path), url=url, size_bytes=one.info.size_bytes, seconds=seconds)
        )

    def _upload(self, one: _Waiting) -> str:
        """Returns where it is; "" if it was there already."""
        tier, path = self._tier(one.root), one.info.file_path
        if one.info.op_id in tier.uploaded or not path.exists():  # or retention was faster
            return ""
        manifest, single = read_manifest(path), not path.is_dir()
        expected = {entry.path: entry for entry in manifest.files}
        names = [path.name] if single else list(expected)
        folder = tier.root.place(path.name, uuid.uuid4().hex)
        tier.root.announce(folder, tier.root.next_sequence())
        try:
            entries = self._send(path.parent if single else path, names, folder)
            for entry in entries:
                known = expected.get(entry.path)
                if known is not None and (known.size_bytes, known.xxh3_128) != (entry.size_bytes, entry.xxh3_128):
                    message = "its bytes are not those that were written: it is not mirrored"
                    raise CorruptCheckpointError(path=str(path), file=entry.path, message=message)
            name = path.relative_to(one.workspace.path).as_posix()
            kept = [expected.get(entry.path, entry) for entry in entries]
            remote = mirrored(manifest, name, kept, single=single)
            tier.root.commit(folder, remote.to_bytes())
        except BaseException:
            tier.root.drop(folder)
            raise
        tier.uploaded.add(manifest.op_id)
        tier.names[folder] = name
        self._retain(tier, CheckpointInfo.of(remote, folder, sum(entry.size_bytes for entry in entries)))
        return str(folder)

    def _send(self, base: Path, names: Sequence[str], folder: ObjectPath) -> list[FileEntry]:
        copies = [
            FileCopy(source=str(base / name), path=f"{folder}/{name}", stamp=Stamp.of((base / name).stat()))
            for name in names
        ]
        written = self._writer.write(WriteJob(name=folder.name, rank=0, copies=copies), self._check)
        return [
            FileEntry(path=name, size_bytes=result.size_bytes, xxh3_128=result.xxh3_128, rank=0)
            for name, result in zip(names, written, strict=True)
        ]

    def _retain(self, tier: _Tier, info: CheckpointInfo) -> None:
        mirror = self._config.mirror
        rules = Retention(keep_last=mirror.keep_last, keep_every_steps=mirror.keep_every_steps)
        decision = retention.after_commit(info, tier.catalog, retention.policy_of(rules))
        if decision is not None:
            tier.root.discard(decision.to_delete)
        self._follow(tier)

    def _follow(self, tier: _Tier) -> None:
        """Delete what was deleted here, but never the newest that is there."""
        with self._turn:
            names = {name for place, name in self._deleted if place == tier.root.path}
        newest = max(tier.catalog.committed, key=lambda info: info.sequence, default=None)
        due = [
            info.path for info in tier.catalog.committed if tier.names.get(info.path) in names and info is not newest
        ]
        if due:
            tier.catalog.forget(due)
            tier.root.discard(due)
        with self._turn:
            self._deleted -= {(tier.root.path, name) for name in names}

    def _tier(self, place: ObjectPath) -> _Tier:
        if place not in self._tiers:
            storage = self._config.storage
            root = ObjectRoot(place, lease_s=self._config.lease_s, owner=self._owner, unfenced=storage.unfenced)
            root.open(self._config.timeouts.barrier_s + self._config.lease_s)
            try:
                candidates = list_objects(place)
            except BaseException:
                root.close()
                raise
            ours = [(one.path, one.manifest) for one in candidates if one.manifest is not None]
            self._tiers[place] = _Tier(
                root=root,
                catalog=ObjectCatalog(candidates),
                uploaded={manifest.op_id for _, manifest in ours},
                names={path: name_of(manifest) for path, manifest in ours},
            )
        return self._tiers[place]

    def _check(self) -> None:
        over = self.stop_by is not None and time.monotonic() > self.stop_by
        if over or self._closing.is_set():
            raise SaveError(name="mirror", cause="the job is over", rank=0, phase="mirroring")

    def _respawned(self, pid: int, ended: str) -> None:
        name = self._current.info.name if self._current is not None else ""
        self._emit(events.Respawned(rank=0, pid=pid, ended=ended, name=name))
