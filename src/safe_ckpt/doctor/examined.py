"""The directory under examination, and the private folder in it in which everything is tried out."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safe_ckpt.doctor.runner import StuckError, bounded
from safe_ckpt.inspection.listing import find_shelf

logger = logging.getLogger(__name__)
PREFIX = ".safe_ckpt_doctor-"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the caller wants to know.

    Attributes:
        state_bytes: the size of one checkpoint; None to take that of the newest one in the directory.
        probe_bytes: how much is written and read to measure the speed, at most a tenth of what is free; 0 for not at all.
        timeout_s: how long any single check may take, and how long the ranks wait for each other.
    """

    state_bytes: int | None = None
    probe_bytes: int = 256 << 20
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What a check is given.

    Attributes:
        asked: the directory that was asked about, absolute.
        existing: that, or the nearest of its parents that exists.
        scratch: a private folder below ``existing``; None where it could not be made.
        problem: why not.
        options: what the caller wants to know.
        state_bytes: the size of one checkpoint, if it is known.
        state_from: how it is known, in words.
        stop: set when the checks are to end early; long ones look at it.
    """

    asked: Path
    existing: Path
    scratch: Path | None = None
    problem: OSError | None = None
    options: Options = field(default_factory=Options)
    state_bytes: int | None = None
    state_from: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def levels_up(self) -> int:
        """How many levels ``existing`` is above ``asked``."""
        return len(self.asked.parts) - len(self.existing.parts)

    def place(self) -> Path:
        """The private folder, for a check that cannot do without; those are not run where there is none."""
        if self.scratch is None:
            raise FileNotFoundError(f"there is no private folder in {self.existing}")
        return self.scratch


def nearest_existing(path: Path) -> Path:
    """``path``, absolute, or the nearest of its parents that exists. Follows no link at the end of the path."""
    path = Path(os.path.abspath(path))
    return next(candidate for candidate in (path, *path.parents) if os.path.lexists(candidate) or not candidate.name)


def known_size(directory: Path, options: Options) -> tuple[int | None, str]:
    """The size of one checkpoint, as given or as that of the newest one in ``directory``, and how it is known."""
    if options.state_bytes is not None:
        return options.state_bytes, "as given"
    try:
        infos = [candidate.info for candidate in find_shelf(directory).usable]
    except OSError:  # there is none, or a live job is deleting one just now
        return None, ""
    newest = next((info for info in infos if info is not None and info.size_bytes), None)
    return (newest.size_bytes, f"as {newest.path.name} is") if newest else (None, "")


@contextlib.contextmanager
def examining(path: Path, options: Options) -> Iterator[Examined]:
    """The directory with its private folder, which is removed at the end, also after an error or Ctrl-C.

    Where the folder cannot be made, that is told by ``problem``. Called on rank 0, on the main thread.

    Raises:
        StuckError: the file system does not answer.
    """
    asked = Path(os.path.abspath(path))
    existing = bounded(lambda: nearest_existing(asked), options.timeout_s)
    size, known_from = None, ""
    with contextlib.suppress(StuckError):  # so many checkpoints, or a disk that will show it again at once
        size, known_from = bounded(lambda: known_size(asked, options), options.timeout_s)
    scratch = existing / f"{PREFIX}{uuid.uuid4().hex}"
    stop = threading.Event()
    problem: OSError | None = None
    try:
        try:
            bounded(scratch.mkdir, options.timeout_s)
        except StuckError:
            raise
        except OSError as error:
            problem = error
        yield Examined(
            asked=asked,
            existing=existing,
            scratch=None if problem else scratch,
            problem=problem,
            options=options,
            state_bytes=size,
            state_from=known_from,
            stop=stop,
        )
    finally:
        stop.set()
        _remove(scratch, options.timeout_s)


def _remove(scratch: Path, timeout_s: float) -> None:
    try:
        bounded(lambda: _delete(scratch), timeout_s)
    except OSError as error:
        logger.warning("%s could not be removed, delete it by hand: %s", scratch, error)


def _delete(scratch: Path) -> None:
    # A check that was given up may still make a file in there while this goes through.
    for attempt in range(3):
        try:
            if os.path.lexists(scratch):
                shutil.rmtree(scratch)
            return
        except OSError:
            if attempt == 2:
                raise
