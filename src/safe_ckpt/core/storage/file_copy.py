"""Files that are to be copied as they are: what tells that one has changed, and what an earlier attempt copied already."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.core.storage.durable import WrittenFile

_RECORD = "copied."


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What changes when a file does. ``of`` reads it; two that are equal stand for the same bytes.

    A file's times are those of the kernel's last tick: a file that changed within ``racy_ns`` of being looked at may change
    once more without showing it.
    """

    size_bytes: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """From what ``os.stat`` returned."""
        return cls(
            size_bytes=status.st_size,
            device=status.st_dev,
            inode=status.st_ino,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )


@dataclass(frozen=True, kw_only=True)
class FileCopy:
    """One file to copy.

    Attributes:
        source: where its bytes are.
        path: where they go: relative to the checkpoint in a request, absolute in a job.
        stamp: of the source when the copy was planned.
        kept: an earlier attempt's copy of the same bytes, on the same file system as ``path``; "" when there is none.
        kept_xxh3_128: that copy's digest; it is used only if it has it still.
    """

    source: str
    path: str
    stamp: Stamp
    kept: str = ""
    kept_xxh3_128: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileCopy:
        """From what ``to_json`` returned."""
        return cls(**{**data, "stamp": Stamp(**data["stamp"])})


def first_changed(copies: Sequence[FileCopy]) -> str | None:
    """The first source that is not what it was when its copy was planned; None when all are."""
    for copy in copies:
        try:
            if Stamp.of(os.stat(copy.source)) != copy.stamp:
                return copy.source
        except FileNotFoundError:
            return copy.source
    return None


def record_name(rank: int) -> str:
    """The name of the record of one rank's copies."""
    return f"{_RECORD}{rank:05d}.jsonl"


def records_in(folder: Path) -> list[Path]:
    """The records of all ranks in the staging directory of one save."""
    return sorted(folder.glob(f"{_RECORD}*.jsonl"))


def kept_copies(kept: Path) -> dict[tuple[str, Stamp], tuple[Path, str]]:
    """What earlier attempts copied, as far as it was written down; a line that was cut off is left out.

    Args:
        kept: holds a folder for each attempt.

    Returns:
        Source and stamp, of sources on this host -> the copy as it lies now, and its digest.
    """
    found = {}
    for record in sorted(kept.glob(f"*/{_RECORD}*.jsonl")):
        attempt = record.parent
        for line in record.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):
                data = json.loads(line)
                copy = FileCopy.from_json(data["copy"])
                below = copy.path.split(f"/{attempt.name}/", 1)[1]
                kept_file = attempt / below
                # Of several attempts only the last that got it has it still.
                if data["host"] == socket.gethostname() and _size_of(kept_file) == copy.stamp.size_bytes:
                    found[copy.source, copy.stamp] = (kept_file, str(data["xxh3_128"]))
    return found


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1


class Recorder:
    """Appends a line for every copy that is complete. Losing one costs a copy that is made again, so nothing here is synced."""

    def __init__(self, path: str) -> None:
        self._turn = threading.Lock()
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115 - closed by close()

    def add(self, copy: FileCopy, result: WrittenFile) -> None:
        """A copy is complete. From any thread."""
        if self._file is not None:
            data = {"copy": copy.to_json(), "xxh3_128": result.xxh3_128, "host": socket.gethostname()}
            line = json.dumps(data) + "\n"
            with self._turn:
                self._file.write(line.encode())

    def close(self) -> None:
        """No more will come."""
        if self._file is not None:
            self._file.close()
