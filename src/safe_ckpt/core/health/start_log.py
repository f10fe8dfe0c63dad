"""The log of starts in the hidden folder, and what each rank adds to it: how far it got, and how it ended.

Rank 0 writes the log, when a checkpoint was chosen. Each rank writes a file of its own at its end: the rank that fails is
seldom rank 0. How far training got lies in a page of shared memory that the kernel keeps when the process is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import struct
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.health.starts import End, Log, Newest, Start, decide
from safe_ckpt.core.storage.durable import publish_file, sync_directory, write_durably
from safe_ckpt.errors import CrashLoopError

logger = logging.getLogger(__name__)
_LOG = "starts.json"
_MOST_BYTES = 1 << 20
_MOST_WORDS = 300
_PAGE = struct.Struct("<qq")  # the step, and how many healthy checkpoints were committed


class StartLog:
    """In one directory.

    Args:
        folder: the hidden folder's own one for this.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pass_over(self, newest: Sequence[Newest], *, tries: int, back: int) -> Mapping[str, str]:
        """Which checkpoints are passed over at this start: ``op_id`` -> why. On rank 0.

        Raises:
            CrashLoopError: going back has not helped.
            OSError: that cannot be noted.
        """
        known = self.read()
        decision = decide(known, newest, tries=tries, back=back)
        if decision.gave_up:
            raise CrashLoopError(path=str(self._folder.parent.parent), cause=decision.gave_up, back=len(known.passed))
        if decision.log != known:
            self.write(decision.log)
        return decision.because

    def read(self) -> Log:
        """What is known. Nothing, where that cannot be read: it is no reason not to start. On rank 0."""
        try:
            log = Log.from_json(json.loads(self._read(_LOG)))
        except FileNotFoundError:
            return Log()
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s: earlier starts are not known: %s", self._folder, error)
            return Log()
        return replace(log, starts=[self._ended(start) for start in log.starts])

    def begin(self, *, resumed: str, step: int) -> str:
        """Note that this start resumes from a checkpoint. Returns its key; "" if it cannot be noted. On rank 0."""
        try:
            return self._begin(self.read(), resumed, step)
        except OSError as error:  # a start is more than the knowledge of it
            logger.warning("%s: this start is not noted: %s", self._folder, error)
            return ""

    def _begin(self, log: Log, resumed: str, step: int) -> str:
        start = Start(key=uuid.uuid4().hex, resumed=resumed, step=step)
        self.write(log.with_start(start))
        kept = {one.key for one in log.starts} | {start.key, "starts"}
        for path in self._folder.iterdir():
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)
        return start.key

    def write(self, log: Log) -> None:
        """Replace what is known. On rank 0.

        Raises:
            OSError: it cannot be.
        """
        self._folder.mkdir(exist_ok=True)
        staged = self._folder / f".{_LOG}"
        write_durably(staged, json.dumps(log.to_json()).encode())
        publish_file(staged, self._folder / _LOG)

    def _ended(self, start: Start) -> Start:
        """With what its ranks have written. An exception on any of them counts more than how the others ended."""
        if start.end:
            return start
        found: list[dict[str, Any]] = []
        for path in self._folder.glob(f"{start.key}.*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(self._read(path.name)))
        with contextlib.suppress(OSError, struct.error):
            step, saved = _PAGE.unpack_from(self._read(f"{start.key}.step"))
            start = replace(start, reached=step if step >= 0 else None, saved=saved > 0)
        found.sort(key=lambda row: ("exception", "signal", "done").index(row["end"]))
        return replace(start, end=found[0]["end"], what=str(found[0]["what"])) if found else start

    def _read(self, name: str) -> bytes:
        with (self._folder / name).open("rb") as file:
            return file.read(_MOST_BYTES)


class RunningStart:
    """This start, on one rank.

    Args:
        folder: as ``StartLog`` has it.
        key: of the start.
        rank: this rank.
    """

    def __init__(self, folder: Path, key: str, rank: int) -> None:
        self._folder, self._key, self._rank = folder, key, rank
        self._page: mmap.mmap | None = None
        self._step, self._saved = -1, 0
        if rank == 0:
            try:
                self._page = self._shared_page()
            except OSError as error:  # how far it gets is not known then
                logger.warning("%s: %s", folder, error)

    def _shared_page(self) -> mmap.mmap:
        with (self._folder / f"{self._key}.step").open("w+b") as file:
            file.write(_PAGE.pack(-1, 0).ljust(mmap.PAGESIZE, b"\0"))
            file.flush()
            return mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def reached(self, step: int) -> None:
        """Training has come to this step. Takes less than a microsecond; on any thread."""
        if self._page is not None:
            self._step = step
            _PAGE.pack_into(self._page, 0, step, self._saved)

    def committed(self) -> None:
        """A healthy checkpoint is committed. On any thread."""
        self._saved += 1
        if self._page is not None:
            _PAGE.pack_into(self._page, 0, self._step, self._saved)

    def end(self, *, at_exit: bool) -> None:
        """It ends now: well, or with the exception that is on its way. Called once; never raises."""
        error = sys.exc_info()[1] or (getattr(sys, "last_value", None) if at_exit else None)
        end: End = "done"
        if error is not None:
            end = "signal" if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit) else "exception"
        what = f"{type(error).__name__}: {error}"[:_MOST_WORDS] if error is not None else ""
        try:
            path = self._folder / f"{self._key}.{self._rank}.json"
            write_durably(path, json.dumps({"end": end, "what": what}).encode())
            sync_directory(str(self._folder))
        except OSError as failure:
            logger.warning("%s: how this start ended is not noted: %s", self._folder, failure)
        if self._page is not None:
            with contextlib.suppress(BufferError, ValueError):
                self._page.close()
            self._page = None


def folder_in(hidden: os.PathLike[str]) -> Path:
    """Where the log lies in a hidden folder."""
    return Path(hidden) / "starts"
