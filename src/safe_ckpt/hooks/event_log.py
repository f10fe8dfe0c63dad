"""The record: one JSON object per line in ``events.jsonl``, older ones in ``events.jsonl.1`` and so on."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safe_ckpt import machine
from safe_ckpt._version import __version__
from safe_ckpt.events import Alive, Event
from safe_ckpt.hooks import steps

logger = logging.getLogger(__name__)
SIGN_S = 30.0
"""How often rank 0 says that it is alive, once its optimizers step."""
_SIGN_BYTES = 160  # of its line, so that one fits over another
_BESIDE = ("torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "torchtitan")


class JsonlHook:
    """Appends one line per event. Before its first one comes a line ``"event": "run"``, which separates runs.

    A line is written in one piece, so that no reader sees half of two. One that a killed job left torn stays a line of its own.
    While the disk refuses, events are left out, and the log says so once. A sign of life is written over the one before it
    where that is the last line: they do not add up.

    Args:
        path: the file; made at the first event.
        record_bytes: how large it may grow before it is renamed.
        record_files: how many renamed ones are kept.
        world_size: number of ranks, for the line that begins a run.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, record_bytes: int = 16 << 20, record_files: int = 3, world_size: int = 1
    ) -> None:
        self._path = Path(os.path.abspath(path))
        self._record_bytes = record_bytes
        self._record_files = record_files
        self._world_size = world_size
        self._lock = threading.RLock()
        self._begun = False
        self._lines = 0
        self._is_first = False
        self._refused = False
        self._sign: tuple[tuple[int, int], int] | None = None  # the file and the place of the last sign of life

    def __call__(self, event: Event) -> None:
        """Append the event."""
        line = _line(event.facts())
        self._write(event.at, line.rstrip().ljust(_SIGN_BYTES - 1) + b"\n" if isinstance(event, Alive) else line)

    def begin(self) -> None:
        """Append the line that begins a run now, and not before the first event. Once."""
        self._write(time.time())

    def end(self, *, failed: bool) -> None:
        """Append a line that says that the job ended in order, or by an exception: what is killed cannot.

        Args:
            failed: by an exception.
        """
        self.leave_nothing()
        if self._begun:
            facts = {
                "event": "end",
                "rank": 0,
                "at": time.time(),
                "optimizer_steps": steps.taken(),
                "in_order": not failed,
            }
            self._write(time.time(), _line(facts))
            self._begun = False  # what comes in spite of that is another run's

    def leave_nothing(self) -> None:
        """Delete the file where nothing happened in its first run: what is empty at the end was never there."""
        if self._begun and self._lines == 1 and self._is_first:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._begun = False

    def _write(self, at: float, line: bytes = b"") -> None:
        with self._lock:
            try:
                if not self._begun:
                    self._is_first, self._lines = not os.path.lexists(self._path), 0
                    self._append(_line(_run(self._world_size, at)))
                    self._begun = True
                if len(line) == _SIGN_BYTES and self._replace(line):
                    return
                self._append(line)
                self._refused = False
            except OSError as error:
                # Not to the Emitter, which would drop this: a full disk is when the record is wanted most.
                if not self._refused:
                    logger.warning("%s: events are not recorded: %s", self._path, error)
                self._refused = True

    def _replace(self, sign: bytes) -> bool:
        """Write a sign of life over the one before, if that is the last line. It is this object's own in any case."""
        if self._sign is None:
            return False
        with self._opened(os.O_RDWR) as file:
            status, (there, at) = os.fstat(file), self._sign
            if (status.st_dev, status.st_ino) != there or status.st_size != at + len(sign):
                return False
            return os.pwrite(file, sign, at) == len(sign)

    def _append(self, line: bytes) -> None:
        if not line:
            return
        self._lines += 1
        with contextlib.suppress(OSError):  # if it cannot be renamed, it grows, and no line is lost
            size = os.stat(self._path).st_size
            if size and size + len(line) > self._record_bytes:
                self._rotate()
        with self._opened() as file:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            rest = b"\n" + line if torn else line
            if len(line) == _SIGN_BYTES:
                status = os.fstat(file)
                self._sign = (status.st_dev, status.st_ino), status.st_size + torn
            while rest:  # a nearly full disk takes a part, and reports only with the next one that it is full
                rest = rest[os.write(file, rest) :]

    @contextlib.contextmanager
    def _opened(self, how: int = os.O_RDWR | os.O_APPEND | os.O_CREAT) -> Iterator[int]:
        # Who may write to the folder may have put a link to another file there, or a pipe, which would block for ever.
        flags = how | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o666)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise OSError(errno.EPERM, "is not a regular file with one name", str(self._path))
            yield fd
        finally:
            os.close(fd)

    def _rotate(self) -> None:
        if self._record_files == 0:
            os.unlink(self._path)
            return
        names = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._record_files + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)


def _line(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts).encode() + b"\n"


def _run(world_size: int, first_at: float) -> dict[str, Any]:
    versions = {"safe_ckpt": __version__, "python": platform.python_version()}
    for name in _BESIDE:
        # Only what this program imported: looking is free, importing is not.
        if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
            versions[name] = str(version)
    return {
        "event": "run",
        "rank": 0,
        "at": min(time.time(), first_at),  # an event of another thread may arrive late
        "began": machine.process_began(),
        "optimizer_steps": steps.taken(),
        "sign_s": SIGN_S,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "world_size": world_size,
        "versions": versions,
    }
