"""The log of starts in the hidden folder, and what each rank adds to it: how far it got, and how it ended.

Rank 0 writes the log, when a checkpoint was chosen. Each rank writes a file of its own at its end: the rank that fails is
seldom rank 0. How far training got is written to a file that the kernel keeps when the process is killed.

All of this only observes: what cannot be read or noted is logged, and no start fails for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import struct
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.health.starts import ENDS, Decision, End, Log, Newest, Start, decide
from safe_ckpt.core.storage.durable import publish_file, sync_directory, write_durably
from safe_ckpt.core.storage.presence import opened
from safe_ckpt.errors import CrashLoopError, SafeCheckpointError, UnhealthyStateError

logger = logging.getLogger(__name__)
_LOG = "starts.json"
_MOST_BYTES = 1 << 20
_MOST_WORDS = 300
_PAGE = struct.Struct("<qq")  # the step, and how many healthy checkpoints were committed
_PEERS = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_PEERS_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket timeout|NCCL|gloo.*timed out", re.IGNORECASE
)


class StartLog:
    """In one directory.

    Args:
        folder: the hidden folder's own one for this.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def would_pass_over(self, newest: Sequence[Newest], *, tries: int, back: int) -> Decision:
        """What a start would do. Changes nothing."""
        return decide(self.read(), newest, tries=tries, back=back)

    def pass_over(self, newest: Sequence[Newest], *, tries: int, back: int) -> Mapping[str, str]:
        """Which checkpoints are passed over at this start: ``op_id`` -> why. On rank 0.

        Raises:
            CrashLoopError: going back has not helped.
        """
        known = self.read()
        decision = decide(known, newest, tries=tries, back=back)
        if decision.gave_up:
            raise CrashLoopError(path=str(self._folder.parent.parent), cause=decision.gave_up, back=len(known.backs))
        if decision.stuck:
            logger.warning("%s: %s. There is none before it", newest[0].name, decision.stuck)
        if decision.log != known:
            self._try(lambda: self._write(decision.log))
        return decision.because

    def read(self) -> Log:
        """What is known. Nothing, where that cannot be read: it is no reason not to start. On rank 0."""
        try:
            return self._load()
        except OSError as error:
            logger.warning("%s: earlier starts are not known: %s", self._folder, error)
            return Log()

    def _load(self) -> Log:
        """Raises ``OSError`` if it is not known whether there is anything."""
        try:
            log = Log.from_json(json.loads(self._read(_LOG)))
            return replace(log, starts=tuple(map(self._ended, log.starts)))
        except FileNotFoundError:
            return Log()
        except OSError:
            raise
        except Exception as error:  # whatever it is: somebody may have edited it, or a disk may fail
            logger.warning("%s: earlier starts are not known: %s", self._folder, error)
            return Log()

    def begin(self, *, resumed: str, step: int, size: int) -> str:
        """Note that this start resumes from a checkpoint. Returns its key; "" if it cannot be noted. On rank 0."""
        try:
            log = self._load()
        except OSError as error:  # what is there must not be replaced by nothing
            logger.warning("%s: this start is not noted: %s", self._folder, error)
            return ""
        start = Start(key=uuid.uuid4().hex, resumed=resumed, step=step, size=size)
        if not self._try(lambda: self._write(log.with_start(start))):
            return ""
        # Of a start whose end is known the log has all that its files say.
        needed = {one.key for one in log.starts if not one.end} | {start.key, "starts"}
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if path.name.partition(".")[0] not in needed:
                    with contextlib.suppress(OSError):
                        path.unlink()
        return start.key

    def _try(self, note: Any) -> bool:
        try:
            note()
        except OSError as error:
            logger.warning("%s: this start is not noted: %s", self._folder, error)
            return False
        return True

    def _write(self, log: Log) -> None:
        self._folder.mkdir(exist_ok=True)
        staged = self._folder / f".{_LOG}"
        write_durably(staged, json.dumps(log.to_json()).encode())
        publish_file(staged, self._folder / _LOG)

    def _ended(self, start: Start) -> Start:
        """With what its ranks have written."""
        if start.end:
            return start
        rows: list[tuple[float, int, End, str]] = []
        for path in self._folder.glob(f"{start.key}.*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                row = json.loads(self._read(path.name))
                if row["end"] in ENDS:
                    rows.append((float(row["at"]), int(path.name.split(".")[1]), row["end"], str(row["what"])))
        with contextlib.suppress(OSError, struct.error):
            step, saved = _PAGE.unpack_from(self._read(f"{start.key}.step"))
            start = replace(start, reached=step if step >= 0 else None, saved=saved > 0)
        return start.ended([row[1:] for row in sorted(rows)])

    def _read(self, name: str) -> bytes:
        with opened(self._folder / name, os.O_RDONLY | os.O_NONBLOCK) as fd:  # a pipe must not hold up a start
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError(f"{name} is no file")
            return os.read(fd, _MOST_BYTES)


class RunningStart:
    """This start, on one rank.

    Args:
        place: the folder that ``StartLog`` has, and the key of the start in it.
        rank: this rank.
    """

    def __init__(self, place: Path, rank: int) -> None:
        folder, key = place.parent, place.name
        self._folder, self._key, self._rank = folder, key, rank
        self._fd = -1
        self._step, self._saved = -1, 0
        # What is being handled already, or was shown in a notebook, is none of this start's.
        self._older = [
            id(error) for error in (sys.exc_info()[1], getattr(sys, "last_value", None)) if error is not None
        ]
        if rank == 0:
            try:
                self._fd = os.open(folder / f"{key}.step", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._note()
            except OSError as error:  # how far it gets is not known then
                logger.warning("%s: %s", folder, error)

    def reached(self, step: int) -> None:
        """Training has come to this step. Takes a microsecond; on any thread."""
        self._step = step
        self._note()

    def committed(self) -> None:
        """A healthy checkpoint is committed. On any thread."""
        self._saved += 1
        self._note()

    def end(self, error: BaseException | None, *, stopped: bool, within_s: float) -> None:
        """It ends now. Called once; never raises.

        Args:
            error: what it ends with; None if it ends well.
            stopped: a signal asked for it.
            within_s: go on after so long, whatever the disk does.
        """
        end, what = self._how(error, stopped=stopped)
        row = {"end": end, "what": what, "at": time.time()}

        def note() -> None:
            try:
                write_durably(self._folder / f"{self._key}.{self._rank}.json", json.dumps(row).encode())
                sync_directory(str(self._folder))
            except OSError as failure:
                logger.warning("%s: how this start ended is not noted: %s", self._folder, failure)

        thread = threading.Thread(target=note, name="safe_ckpt-end", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            note()
        else:
            thread.join(within_s)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _how(self, error: BaseException | None, *, stopped: bool) -> tuple[End, str]:
        if error is None or id(error) in self._older:
            return "done", ""
        what = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
        if stopped or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            return "signal", what
        return ("other" if _is_of_others(error) else "exception"), what

    def _note(self) -> None:
        fd = self._fd
        if fd >= 0:
            with contextlib.suppress(OSError, struct.error):
                os.pwrite(fd, _PAGE.pack(self._step, self._saved), 0)


def _is_of_others(error: BaseException) -> bool:
    """Whether a peer, a disk or the network is at fault, and not what was trained."""
    if isinstance(error, SafeCheckpointError):
        return not isinstance(error, UnhealthyStateError)
    if not _PEERS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | ConnectionError) and _PEERS_WORDS.search(str(error)) is not None


def folder_in(hidden: os.PathLike[str]) -> Path:
    """Where the log lies in a hidden folder."""
    return Path(hidden) / "starts"
