"""``io`` and ``open`` of the simulated processes: file objects over the descriptors of ``posix_calls``."""

from __future__ import annotations

import io
import os as real_os
import posix as real_posix
import types
from typing import Any

from sim.shims import posix_calls as calls
from sim.shims.paths import FIRST
from sim.world import Killed, hub


class _Raw(io.RawIOBase):
    """A file object over a descriptor."""

    def __init__(self, fd: int, path: Any, flags: int, *, closefd: bool = True) -> None:
        super().__init__()
        self._fd, self.name, self._flags, self._closefd = fd, path, flags, closefd

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return not self._flags & real_os.O_WRONLY

    def writable(self) -> bool:
        return bool(self._flags & (real_os.O_WRONLY | real_os.O_RDWR))

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = calls._read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return calls._write(self._fd, data) if self._fd >= FIRST else real_posix.write(self._fd, data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return calls._lseek(self._fd, offset, whence)

    def tell(self) -> int:
        return calls._lseek(self._fd, 0, real_os.SEEK_CUR)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        calls._ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        if self.closed:
            return
        try:
            super().close()
            if self._closefd:
                calls._close(self._fd)
        except (Killed, OSError):
            if hub.task is not None and hub.task.proc.alive:
                raise


def open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """See ``open``."""
    del opener
    plus = "+" in mode
    flags = real_os.O_RDWR if plus else real_os.O_RDONLY if "r" in mode else real_os.O_WRONLY
    extra = {"w": real_os.O_CREAT | real_os.O_TRUNC, "a": real_os.O_CREAT | real_os.O_APPEND}
    extra["x"] = real_os.O_CREAT | real_os.O_EXCL
    for letter, more in extra.items():
        flags |= more if letter in mode else 0
    fd = file if isinstance(file, int) else calls._open(file, flags, 0o666)
    raw = _Raw(fd, file, flags, closefd=closefd)
    if buffering == 0:
        return raw
    kind: Any = io.BufferedRandom if plus else io.BufferedReader if "r" in mode else io.BufferedWriter
    buffered = kind(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    fake = types.ModuleType("io")
    vars(fake).update(vars(io))
    fake.open = fake.open_code = open_file  # type: ignore[attr-defined]
    return {"io": fake}
