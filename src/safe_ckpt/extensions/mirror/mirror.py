"""The mirror: committed checkpoints go to another place in the background, by a process of its own.

Used on rank 0. The process is as nice as can be, so that it gives way to training and to the writer of the next save. Where
uploads take longer than saves come, only the newest that waits is uploaded, and those that ``keep_every_steps`` names; with
``follow`` all that are still there. What failed is tried again before the next one, and at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, read_manifest
from safe_ckpt.core.home.candidates import by_commit
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.home.places import everything_in, with_deadline
from safe_ckpt.core.staging.worker_thread import Background, Refused, StuckError, bounded
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import Place, place_of
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import CorruptCheckpointError, MirrorBehindError, SafeCheckpointError, SaveError, named
from safe_ckpt.extensions.mirror.fetching import directory_of, fetch_into, mirrored_name
from safe_ckpt.extensions.mirror.tier import Tier, Waiting

logger = logging.getLogger(__name__)
NAMED = "named"
_NICENESS = 19
_LAST_WORDS_S = 5.0
_GIVING_BACK_S = 1.0
_LETTERS = 8
_LOOK_S = 0.2
_MOST_PAUSE_S = 30.0  # each try that fails is a warning and an event


class MirrorUploads:
    """Uploads what was committed, to an object store or to another directory. Called on any thread of rank 0.

    Args:
        config: settings with a ``mirror.url``.
        emit: receives what happens.
        owner: what this belongs to and how that is ended, for messages.

    Attributes:
        stop_by: when the job must be over, on the monotonic clock; what is not uploaded by then is given up.
        error: why the newest is not uploaded; None where nothing is wrong.
        elsewhere: a number that changes as long as bytes move on other hosts.

    Raises:
        ConfigError: the address is none, or obstore is not installed.
    """

    def __init__(self, config: CheckpointConfig, emit: Callable[[events.Event], None], owner: str) -> None:
        self._config = config
        self._emit = emit
        self._owner = owner
        options = StorageOptions.of(config.storage, config.timeouts.lengthy_s)
        top = place_of(config.mirror.url or "", config.storage, config.timeouts.lengthy_s)
        self._top = with_deadline(top, options.give_up_after_s, self._check)
        writer = dataclasses.replace(config.writer, niceness=_NICENESS, inline_bytes=0)
        self._writer = WriterSupervisor(writer, config.timeouts, self._respawned, options)
        self._background = Background("safe_ckpt-mirror", self._work)
        self._turn = threading.Condition()
        self._queue: list[Waiting] = []
        self._current: Waiting | None = None
        self._there: set[str] = set()  # uploaded by an earlier job, by the saves' ids
        self._committed: dict[Place, Waiting] = {}
        self._deleted: set[tuple[Place, str]] = set()
        self._tiers: dict[Place, Tier] = {}
        self._roots: dict[Path, Place] = {}
        self._verified: dict[Place, tuple[Place, Manifest]] = {}  # what was fetched
        # What this job saved that has neither a copy nor a newer one there, by its number in the order of commits.
        self._behind: dict[Place, dict[int, str]] = {}
        self._newest: dict[Place, int] = {}  # the highest number in the order of commits that is uploaded
        self._closing = threading.Event()
        self._closed = False
        self._rate = 0.0
        self.elsewhere: Callable[[], int] = lambda: 0
        self.stop_by: float | None = None
        self.error: SafeCheckpointError | None = None

    def root_of(self, home: Home) -> Place:
        """The place for the checkpoints of a directory: for the first one the url itself, for others a folder in it."""
        if home.is_single_name:
            return self._top / NAMED
        path = in_files(home.path)
        with self._turn:
            if not self._roots:
                self._roots[path] = self._top
            elif path not in self._roots:
                # A further directory has a folder of its own, and the same one on another machine with the same layout.
                digest = hashlib.sha256(os.path.relpath(path, next(iter(self._roots))).encode()).hexdigest()
                self._roots[path] = self._top / f"{path.name}-{digest[:_LETTERS]}"
            return self._roots[path]

    def put(self, info: CheckpointInfo, home: Home, *, saved: bool = True) -> None:
        """Upload this.

        Args:
            info: what was committed.
            home: the directory.
            saved: this job has just saved it; else an earlier one has, and did not come to uploading it.
        """
        if in_files(home.path) not in info.file_path.parents:
            return  # a file elsewhere, of which a resume knows nothing
        if info.marked or info.op_id in self._there:
            return  # a marked one would count there, and a healthy one would be deleted for it
        waiting = Waiting(root=self.root_of(home), home=home, info=info, saved=saved)
        with self._turn:
            passed = [one for one in self._queue if self._gives_way(one, waiting)]
            self._queue = [*(one for one in self._queue if one not in passed), waiting]
            self._committed[info.path] = waiting
            if saved:
                self._behind.setdefault(waiting.root, {})[info.sequence] = str(info.path)
            self._deleted.discard((waiting.root, mirrored_name(info.file_path, home)))
        for one in passed:
            logger.info("%s is not mirrored: a newer one is there, and the mirror is behind", one.info.path)
        try:
            self._background.put(info.name)
        except Refused as error:
            logger.warning("%s is not mirrored: %s", info.path, error)

    def _gives_way(self, one: Waiting, newer: Waiting) -> bool:
        follow, every = self._config.mirror.follow, self._config.mirror.keep_every_steps
        kept = follow or (every is not None and one.info.step % every == 0)
        may = one.root == newer.root and one.root.name != NAMED and one.info.sequence <= newer.info.sequence
        return may and (not kept or one.info.path == newer.info.path)

    def behind(self, home: Home) -> int:
        """How many saves of this job neither have a copy, nor does a newer one."""
        return len(self._late(self.root_of(home)))

    def await_copies(self, limit_s: float) -> None:
        """Wait until each save of this job, or a newer one, has its copy.

        Raises:
            MirrorBehindError: it has none after ``limit_s``, or the job is over.
        """
        deadline, again_at, pause_s = time.monotonic() + limit_s, 0.0, _LOOK_S
        for root in list(self._behind):
            while late := self._late(root):
                if time.monotonic() > deadline or self._is_late():
                    cause = f"it took longer than {limit_s:.0f} s" if self.error is None else str(self.error)
                    raise MirrorBehindError(path=late[-1], url=str(root), behind=len(late), limit=0, cause=cause)
                if self._current is None and time.monotonic() >= again_at:
                    with contextlib.suppress(Refused):
                        self._background.put("once more")  # what has failed
                    again_at, pause_s = time.monotonic() + pause_s, min(2 * pause_s, _MOST_PAUSE_S)
                time.sleep(_LOOK_S)

    def _late(self, root: Place) -> list[str]:
        """The saves of this job without a copy, in the order of their commits."""
        with self._turn:
            return list(self._behind.get(root, {}).values())

    def holding(self, paths: Sequence[Place]) -> set[Place]:
        """The ``paths`` that must not be deleted now: one that is being uploaded, and what ``required`` protects."""
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
        if path in self._committed:
            one = self._committed[path]
            return one.info.sequence > self._newest.get(one.root, -1)
        parents = in_files(path).parents  # of an earlier job
        root = next((root for folder, root in self._roots.items() if folder in parents), None)
        return root is None or _sequence_at(path) > self._newest.get(root, -1)

    def candidates(self, home: Home) -> list[Candidate]:
        """The checkpoints of a directory that the mirror has, the newest first.

        Raises:
            OSError: the store gives no answer.
        """
        limit_s = self._config.timeouts.barrier_s
        root = with_deadline(self.root_of(home), limit_s / 2)
        found = bounded(lambda: everything_in(root), limit_s)
        self._there |= {one.manifest.op_id for one in found if one.manifest is not None}
        return by_commit(found)

    def fetch(self, candidate: Candidate, home: Home) -> CheckpointInfo:
        """Bring a checkpoint into the directory.

        Raises:
            CorruptCheckpointError: it is damaged, or something of it is not there.
            OSError: the store gave no answer, or the disk refuses.
        """
        if candidate.manifest is None:
            raise CorruptCheckpointError(path=str(candidate.path), message=candidate.problem or "has no manifest")
        earlier = directory_of(candidate.manifest)
        if earlier not in ("", home.path.name):
            message = "%s was mirrored from a directory %r: this run, in %s, continues that one. Was that meant?"
            logger.warning(message, candidate.path, earlier, home.path)
        there, timeouts, begun = candidate.path, self._config.timeouts, time.monotonic()
        source = with_deadline(there, timeouts.lengthy_s)
        info = fetch_into(home, source, candidate.manifest, timeouts=timeouts)
        seconds, size = time.monotonic() - begun, info.size_bytes
        self._emit(
            events.Fetched(rank=0, path=str(info.path), url=str(candidate.path), size_bytes=size, seconds=seconds)
        )
        root = self.root_of(home)
        with self._turn:  # it need not be uploaded again
            self._verified[root] = there, candidate.manifest
            self._newest[root] = max(self._newest.get(root, -1), info.sequence)
        return info

    def deleted(self, paths: Sequence[Place], home: Home) -> None:
        """Note what retention has deleted. With ``follow`` the copies go, too, after the next upload."""
        if not self._config.mirror.follow:
            return
        place = self.root_of(home)
        gone = [path for path in map(in_files, paths) if in_files(home.path) in path.parents]
        with self._turn:
            self._deleted |= {(place, mirrored_name(path, home)) for path in gone}

    def progress(self) -> int:
        """A number that changes as long as bytes move."""
        return self._writer.progress()

    def drain(self, within_s: float | None = None) -> None:
        """Upload what waits, the newest first.

        Waits as long as bytes move, and ``shutdown_s`` for what makes no progress.

        Args:
            within_s: wait this long at most, progress or not.
        """
        with self._turn:
            size = sum(one.info.size_bytes for one in self._known())
        if size:
            until = "" if self.stop_by is None else f", {max(0.0, self.stop_by - time.monotonic()):.0f} s are left"
            takes = f"about {size / self._rate:.0f} s" if self._rate else "an unknown time"
            logger.info("uploading %d MiB to the mirror takes %s%s", size >> 20, takes, until)
            with contextlib.suppress(Refused):
                self._background.put("once more")  # what has failed
        self._background.end()
        try:
            limit_s = self._config.timeouts.shutdown_s if within_s is None else within_s
            self._background.drain(
                lambda: self.progress() + self.elsewhere(), limit_s, extend=within_s is None, is_over=self._is_late
            )
        finally:
            self._closing.set()
            self._background.join(self._within_grace(min(_LAST_WORDS_S, self._config.timeouts.shutdown_s)))
        with self._turn:
            left = [str(one.info.path) for one in self._known()]
        if left:
            logger.warning("not mirrored in time: %s", ", ".join(left))

    def close(self) -> None:
        """Give the mirror back, after ``drain``."""
        self._closing.set()
        self._writer.close()
        with self._turn:
            self._closed = True
            tiers = dict(self._tiers)
        for place, tier in tiers.items():
            deleted = self._deleted_from(place) if self.error is None else ()
            try:
                limit_s = self._within_grace(self._config.timeouts.shutdown_s)
                bounded(functools.partial(tier.close, deleted), limit_s)
            except StuckError as error:
                logger.warning("%s: %s: its lock is given up when its lease runs out", place, error)

    def _known(self) -> list[Waiting]:
        return [*([self._current] if self._current is not None else []), *self._queue]

    def _work(self, _: str) -> None:
        """Upload what waits, until one fails: what is left has its turn after the next save, or at the end."""
        while not self._closing.is_set():
            with self._turn:
                if not self._queue:
                    return
                one = self._current = max(self._queue, key=lambda waiting: waiting.info.sequence)
                self._queue.remove(one)
            begun = time.monotonic()
            try:
                url = self._tier(one.root).upload(one, lambda job: self._writer.write(job, self._check), self._check)
                self._uploaded(one, url, time.monotonic() - begun)
            except Exception as error:
                self._failed(one, error)
                return
            finally:
                with self._turn:
                    self._current = None

    def _failed(self, one: Waiting, error: Exception) -> None:
        self.error = named(error, rank=0, phase="mirroring", path=one.info.path)
        logger.warning("%s is not mirrored: %s", one.info.path, self.error)
        self._emit(events.Mirrored(rank=0, path=str(one.info.path), url=str(one.root), error=str(self.error)))
        if isinstance(self.error, CorruptCheckpointError):
            return  # the same bytes would be refused again
        with self._turn:
            if not any(self._gives_way(one, newer) for newer in self._queue):
                self._queue.append(one)

    def _uploaded(self, one: Waiting, url: str | None, seconds: float) -> None:
        self.error = None
        with self._turn:
            number, late = one.info.sequence, self._behind.get(one.root, {})
            late.pop(number, None)
            if url is not None:
                self._newest[one.root] = max(self._newest.get(one.root, -1), number)
                # Of those that the user names one by one none stands for another.
                for older in [] if one.root.name == NAMED else [other for other in late if other < number]:
                    del late[older]
        if url:
            self._rate = one.info.size_bytes / max(seconds, 1e-3)
            size = one.info.size_bytes
            self._emit(events.Mirrored(rank=0, path=str(one.info.path), url=url, size_bytes=size, seconds=seconds))
        deleted = self._deleted_from(one.root)
        if deleted:
            self._tier(one.root).follow(deleted)
            with self._turn:
                self._deleted -= {(one.root, name) for name in deleted}

    def _deleted_from(self, place: Place) -> set[str]:
        with self._turn:
            return {name for root, name in self._deleted if root == place}

    def _tier(self, place: Place) -> Tier:
        if place in self._tiers:
            return self._tiers[place]
        verified, keeps_all = self._verified.get(place), place == self._top / NAMED
        tier = Tier(place, self._config, self._owner, keeps_all=keeps_all, verified=verified)
        with self._turn:
            if not self._closed:
                self._tiers[place] = tier
                return tier
        tier.close()  # the store answered when the job was over
        raise SaveError(name="mirror", cause="the job is over", rank=0, phase="mirroring")

    def _is_late(self) -> bool:
        return self.stop_by is not None and time.monotonic() > self.stop_by

    def _within_grace(self, limit_s: float) -> float:
        """This long, or as long as the grace of a signal lasts; behind it as long as giving a place back takes."""
        return limit_s if self.stop_by is None else min(limit_s, max(_GIVING_BACK_S, self.stop_by - time.monotonic()))

    def _check(self) -> None:
        if self._is_late() or self._closing.is_set():
            raise SaveError(name="mirror", cause="the job is over", rank=0, phase="mirroring")

    def _respawned(self, pid: int, ended: str) -> None:
        name = self._current.info.name if self._current is not None else ""
        self._emit(events.Respawned(rank=0, pid=pid, ended=ended, name=name))


def _sequence_at(path: Place) -> float:
    """The place of a checkpoint in the order of commits; behind all others where it cannot be told."""
    try:
        return read_manifest(path).sequence
    except (OSError, SafeCheckpointError):
        return math.inf
