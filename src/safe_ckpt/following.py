"""Following a run beside its job: each new checkpoint once, held while it is read; and all of them by name."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.core.formats.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.home import is_anything_at
from safe_ckpt.core.home.pins.book import Book, commit_order, identity
from safe_ckpt.core.home.pins.hold import Hold
from safe_ckpt.core.home.pins.record import DEFAULT_TTL_S
from safe_ckpt.core.storage.objects.place import place_of
from safe_ckpt.core.storage.presence import Stamp, is_seen
from safe_ckpt.core.storage.source import by_storage
from safe_ckpt.errors import CheckpointNotFoundError, DirectoryError, SafeCheckpointError, StateError
from safe_ckpt.reading import all_in, one_at
from safe_ckpt.text import listed

if TYPE_CHECKING:
    from safe_ckpt.core.home.home import Candidate
    from safe_ckpt.core.storage.objects.place import Place

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_LOOKS_ANYWAY = 20
"""After so many looks at which the folder's entries were the same, all is looked at again: files may lie deeper."""
_SHORTEST_TTL_S = 1.0
_LONGEST_TTL_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Followed(CheckpointInfo):
    """A checkpoint that ``follow`` gives.

    Attributes:
        missed: names of those that should have come before it, and that retention has deleted: none was held for this reader,
            or its limit was reached.
        pinned: whether it is held: not where this reader may not write.

    Example:
        ```python
        for checkpoint in safe_ckpt.follow("runs/exp", timeout_s=0):
            print(checkpoint.step, checkpoint.pinned, checkpoint.missed)
        ```

        ```text
        10 True ()
        20 True ()
        ```
    """

    missed: tuple[str, ...] = ()
    pinned: bool = False


def follow(
    directory: str | os.PathLike[str],
    *,
    healthy: bool = True,
    every: int | None = None,
    newest_only: bool = False,
    after: int | None = None,
    limit: int = 10,
    timeout_s: float | None = None,
    reader: str = "",
    ttl_s: float = DEFAULT_TTL_S,
) -> Iterator[Followed]:
    """Each committed checkpoint once, in the order of the commits: those that are there, then each new one.

    In this process alone: of several ranks one follows. Beside a live job, without its lock, by any number of readers, from a
    directory or a bucket, and of any layout that ``safe-ckpt list`` knows. A save that is not finished is never seen.

    While the block of the loop runs, its checkpoint is held: retention does not delete it. A small file below
    ``.safe_ckpt/pins`` says so. It is renewed as long as this process lives, and counts for ``ttl_s`` after that. A directory
    in which this process may not write is followed without; that is logged once. A save of the same step again replaces a
    checkpoint all the same.

    Args:
        directory: where the checkpoints are, or will be; or the address of an object store.
        healthy: leave out those with bad numbers.
        every: take each n-th alone, and have retention keep it until then, whatever its rules. None takes what is there when
            the loop comes to it.
        newest_only: when several are new, the newest alone. Not with ``every``.
        after: leave out those that are there of this step and before it, such as the last that an earlier process took.
        limit: with ``every``, how many may wait for this reader. The oldest are given up, and ``missed`` names them.
        timeout_s: the loop ends when no new one came for so long; None waits for ever.
        reader: what this reader is called in messages and by ``safe-ckpt list``; "" for the program's name.
        ttl_s: for how long what it holds is kept after its last sign of life.

    Returns:
        An iterator. Where the loop is left by ``break``, what is held is given up when the iterator is closed or collected.

    Raises:
        StateError: an argument is not allowed.
        ConfigError: what the environment says is not allowed, or an address cannot be used.
        DirectoryError: ``directory`` is a checkpoint; or it cannot be listed.
        ForkedError: an object store cannot be used in a process that was forked from one that uses it.

    Example:
        ```python
        for checkpoint in safe_ckpt.follow("runs/exp", timeout_s=0):  # without timeout_s it waits for the next one
            safe_ckpt.load(checkpoint.path, {"model": model})
            print("evaluates step", checkpoint.step)
        ```

        ```text
        evaluates step 10
        evaluates step 20
        ```
    """
    _check(every is None or every >= 1, "every", every, "a number of checkpoints from 1 on")
    _check(limit >= 1, "limit", limit, "a number of checkpoints from 1 on")
    _check(not (newest_only and every is not None), "newest_only", newest_only, "either this or every")
    _check(_SHORTEST_TTL_S <= ttl_s <= _LONGEST_TTL_S, "ttl_s", ttl_s, f"{_SHORTEST_TTL_S} to {_LONGEST_TTL_S} seconds")
    place = _place(directory)
    if is_anything_at(place) and one_at(place) is not None:
        raise DirectoryError(path=str(place), message="is a checkpoint: follow the directory that it lies in")
    book = Book(every=every or 1, limit=limit if every is not None else None, healthy=healthy, newest_only=newest_only)
    follower = _Follower(place, book, keeps=every is not None, after=after, reader=reader, ttl_s=ttl_s)
    return follower.each(timeout_s)


@contextlib.contextmanager
def pin(path: str | os.PathLike[str], *, reader: str = "", ttl_s: float = DEFAULT_TTL_S) -> Iterator[CheckpointInfo]:
    """Hold one checkpoint while the block runs: retention does not delete it. See ``follow``.

    Args:
        path: a checkpoint, of any layout; or a directory of checkpoints, which means the newest that is whole and healthy. Or
            the address of either in an object store.
        reader: see ``follow``.
        ttl_s: see ``follow``.

    Yields:
        What is known of it.

    Raises:
        CheckpointNotFoundError: it is not there.
        StateError: ``ttl_s`` is not allowed.
        ConfigError: what the environment says is not allowed, or an address cannot be used.
        DirectoryError: it cannot be looked at.

    Example:
        ```python
        with safe_ckpt.pin("runs/exp/step-00000020") as checkpoint:
            print(checkpoint.step, (checkpoint.path / "model.safetensors").exists())
        ```

        ```text
        20 True
        ```
    """
    _check(_SHORTEST_TTL_S <= ttl_s <= _LONGEST_TTL_S, "ttl_s", ttl_s, f"{_SHORTEST_TTL_S} to {_LONGEST_TTL_S} seconds")
    place = _place(path)
    hold = Hold(title=reader or _program(), ttl_s=ttl_s)
    try:
        yield _held(place, hold)
    finally:
        hold.close()


def _held(place: Place, hold: Hold) -> CheckpointInfo:
    one = one_at(place) if is_anything_at(place) else None
    if one is not None:
        if not one.problem and hold.take(place, lambda: _is_still(one.summary), ours=_is_ours(one.summary)):
            return one.summary
        raise CheckpointNotFoundError(path=str(place), message=one.problem or "was deleted")
    found = [info for info in checkpoints(place) if info.whole and info.healthy]
    for info in reversed(found):
        if hold.take(info.path, lambda info=info: _is_still(info), ours=_is_ours(info)):  # type: ignore[misc]
            return info
    raise CheckpointNotFoundError(path=str(place), message="there is no such checkpoint, and none in it")


def checkpoints(directory: str | os.PathLike[str] | Place) -> list[CheckpointInfo]:
    """All checkpoints in a directory, of any layout that ``safe-ckpt list`` knows, the oldest first. In this process alone.

    Their manifests are read, their payloads are not. ``whole``, ``healthy`` and ``problem`` say what is wrong with one.

    Args:
        directory: where the checkpoints are, or the address of an object store.

    Returns:
        The checkpoints; none where the directory is missing. Those of other tools, which have no place in the order of commits,
        come first, by their steps.

    Raises:
        ConfigError: what the environment says is not allowed, or an address cannot be used.
        DirectoryError: it cannot be listed.
        ForkedError: an object store cannot be used in a process that was forked from one that uses it.

    Example:
        ```python
        for checkpoint in safe_ckpt.checkpoints("runs/exp"):
            print(checkpoint.name, checkpoint.step, checkpoint.metrics, checkpoint.whole, checkpoint.healthy)
        ```

        ```text
        step-00000010 10 {'loss': 1.0} True True
        step-00000020 20 {'loss': 0.5} True True
        ```
    """
    place = directory if not isinstance(directory, str | os.PathLike) else _place(directory)
    return sorted(_infos(place), key=commit_order)


def best(directory: str | os.PathLike[str], metric: str, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
    """The best checkpoint by a metric, of those that are whole and healthy: what ``keep_best`` keeps. In this process alone.

    Args:
        directory: see ``checkpoints``.
        metric: its name, as given to ``save``.
        mode: whether the smallest number is the best, or the largest.

    Returns:
        None when no checkpoint has a finite number as this metric.

    Raises:
        StateError: ``mode`` is neither.
        ConfigError: what the environment says is not allowed, or an address cannot be used.
        DirectoryError: the directory cannot be listed.
        ForkedError: an object store cannot be used in a process that was forked from one that uses it.

    Example:
        ```python
        print(safe_ckpt.best("runs/exp", "loss").name)
        ```

        ```text
        step-00000020
        ```
    """
    _check(mode in ("min", "max"), "mode", mode, "'min' or 'max'")
    found = [one for one in checkpoints(directory) if one.whole and one.healthy and metric in one.metrics]
    finite = [one for one in found if math.isfinite(one.metrics[metric])]
    return next(iter(retention.best_first(finite, Retention(keep_best=1, metric=metric, mode=mode))), None)


def _is_still(info: CheckpointInfo) -> bool:
    """Whether a checkpoint is still there, and no other one of its name. Another tool's says nothing but that it is there.

    Raises:
        OSError: the storage gave no answer.
    """
    if not info.verified:
        return by_storage(info.path, is_seen, lambda _: True)
    try:
        return read_manifest(info.path).op_id == info.op_id
    except SafeCheckpointError:
        return False


class _Follower:
    """One reader of one run."""

    def __init__(self, place: Place, book: Book, *, keeps: bool, after: int | None, reader: str, ttl_s: float) -> None:
        self._place = place
        self._book = book
        self._keeps = keeps
        self._after = after
        self._lock = threading.RLock()
        self._before: object = None
        self._same = 0
        # Seen is nothing yet: all that is there is behind this reader's place.
        facts = {"seen": -1, "every": book.every, "limit": book.limit or 0} if keeps else {}
        self._hold = Hold(
            title=reader or _program(),
            ttl_s=ttl_s,
            tick=self._look if keeps else None,
            healthy=book.healthy,
            **facts,
        )

    def each(self, timeout_s: float | None) -> Iterator[Followed]:
        try:
            while (one := self._next(timeout_s)) is not None:
                yield one
                self._leave()
        finally:
            self._hold.close()

    def _next(self, timeout_s: float | None) -> Followed | None:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            self._look()
            while (info := self._first()) is not None:
                if self._hold.take(info.path, lambda info=info: _is_still(info), ours=_is_ours(info)):  # type: ignore[misc]
                    return self._followed(info)
                self._look(anew=True)  # if it is gone it was missed, unless this step was saved again
                if self._first() is info:
                    break  # the storage does not say what has become of it
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _leave(self) -> None:
        """The block is over: what was taken is neither held nor wanted any more, before anything new is seen."""
        with self._lock:
            self._hold.leave(**({"wants": self._wanted()} if self._keeps else {}))

    def _wanted(self) -> tuple[str, ...]:
        return tuple(name for one in self._book.waiting if (name := self._hold.name_of(one.path)))

    def _first(self) -> CheckpointInfo | None:
        with self._lock:
            return self._book.waiting[0] if self._book.waiting else None

    def _followed(self, info: CheckpointInfo) -> Followed:
        told = self._hold.told() if self._keeps else []
        with self._lock:
            self._book.waiting = [one for one in self._book.waiting if identity(one) != identity(info)]
            self._book.told([name.rpartition("/")[2] for name in told])
            missed = self._book.take_missed()
        if missed:
            logger.warning("%s: deleted before this reader came to them: %s", self._place, listed(missed))
        facts = {name: getattr(info, name) for name in CheckpointInfo.__dataclass_fields__}
        return Followed(**facts, missed=missed, pinned=self._hold.is_written)

    def _look(self, *, anew: bool = False) -> None:
        """Take note of what is there, in whichever thread: while a block runs, retention keeps what this has not seen."""
        with self._lock:
            if (
                not self._hold.is_written and self._keeps
            ):  # first: what is deleted between a look and the pin would be missed
                self._leave_place()
            now = by_storage(self._place, _entries, lambda _: None)
            if not anew and now is not None and now == self._before and self._same < _LOOKS_ANYWAY:
                self._same += 1
                return
            self._before, self._same = now, 0
            found = _infos(self._place, whole=True)
            newest = max((one.sequence for one in found), default=-1)
            if newest > self._book.seen:
                # A list that is made while folders come and go may have the newest, and lack the one before it: one that
                # is begun now has all up to that. What is deleted in between was missed.
                again = {identity(one): one for one in _infos(self._place, whole=True) if one.sequence <= newest}
                found = [*again.values(), *(one for one in found if identity(one) not in again)]
            if self._after is not None and found:
                self._book.begin_after(found, self._after)
                self._after = None
            if self._book.look(found) and self._keeps:
                self._leave_place(any(one.verified for one in found))
                self._hold.change(wants=self._wanted(), seen=self._book.seen)

    def _leave_place(self, ours: bool = False) -> None:
        if not self._hold.is_written and is_anything_at(self._place):
            self._hold.place_at(self._place / "any", ours=ours)


def _infos(place: Place, *, whole: bool = False) -> list[CheckpointInfo]:
    try:
        found: Sequence[Candidate] = all_in(place)
    except OSError as error:
        if isinstance(error, SafeCheckpointError):
            raise
        raise DirectoryError.of(error, path=str(place), rank=0, phase="looking for checkpoints") from error
    infos = []
    for one in found:
        with contextlib.suppress(FileNotFoundError):  # a live job has just deleted it
            if not (whole and one.problem):
                infos.append(one.summary)
    return infos


def _entries(folder: Path) -> object:
    """Return what changes when a checkpoint comes or goes right below a folder of this file system."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.name, Stamp.of(entry.stat(follow_symlinks=False))))
    return sorted(found, key=lambda one: one[0])


def _is_ours(info: CheckpointInfo) -> bool:
    return info.verified and info.name.startswith("step-")


def _place(path: str | os.PathLike[str]) -> Place:
    config = CheckpointConfig.from_environment()
    return place_of(path, config.storage, config.timeouts.lengthy_s)


def _program() -> str:
    return os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else "") or "python"


def _check(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise StateError(key=key, message=f"expected {expected}, got {value!r}")
