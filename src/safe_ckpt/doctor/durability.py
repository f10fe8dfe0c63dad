"""Does a file that was written hold what was written, and does fsync take the time that a disk takes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import statistics
import time
from pathlib import Path

from safe_ckpt.core.storage.durable import sync_directory
from safe_ckpt.doctor.disk import current
from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok, refused, time_text, warn

_ROUNDS = 5
_SUSPICIOUS_S = 20e-6
_SLOW_S = 1.0


def creating(examined: Examined) -> list[Finding]:
    """A folder and a file can be made, and what was written is read back."""
    if examined.problem is not None:
        return [refused("write", examined.problem, f"cannot create a folder in {examined.existing}")]
    folder = examined.place() / "written"
    folder.mkdir()
    data = os.urandom(1 << 20)
    begun = time.monotonic()
    (folder / "file").write_bytes(data)
    same = (folder / "file").read_bytes() == data
    seconds = time.monotonic() - begun
    if not same:
        return [fail("write", "a file does not hold what was written", "do not keep checkpoints there: look at dmesg")]
    if os.listdir(folder) != ["file"]:
        advice = "the file system caches what folders hold, even for the host that writes: switch that off in its mount"
        return [fail("write", "a new file is not listed in its folder", advice)]
    return [ok("write", f"created, written and read back 1 MiB in {time_text(seconds)}", seconds_s=seconds)]


def durability(examined: Examined) -> list[Finding]:
    """How long a file and a directory take to reach the disk."""
    folder = examined.place() / "synced"
    folder.mkdir()
    file_s, folder_s = [], []
    for number in range(_ROUNDS):
        path = folder / str(number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, os.urandom(65536))
            file_s.append(_timed_fsync(fd))
        finally:
            os.close(fd)
        begun = time.perf_counter()
        try:
            sync_directory(str(folder))
        except OSError as error:
            return [refused("fsync", error, "fsync of a directory")]
        folder_s.append(time.perf_counter() - begun)
    mount = current(examined.existing)
    in_memory = mount is not None and mount.in_memory
    return [judge_fsync(statistics.median(file_s), statistics.median(folder_s), in_memory=in_memory)]


def _timed_fsync(fd: int) -> float:
    begun = time.perf_counter()
    os.fsync(fd)
    return time.perf_counter() - begun


def judge_fsync(file_s: float, folder_s: float, *, in_memory: bool) -> Finding:
    """Whether an fsync that takes so long can be believed, and afforded."""
    text = f"{time_text(file_s)} for a file of 64 KiB, {time_text(folder_s)} for a directory"
    figures = {"file_s": file_s, "directory_s": folder_s}
    if max(file_s, folder_s) > _SLOW_S:
        advice = "every save does a handful of these: others keep the disk busy, or its write cache is off"
        return warn("fsync", text, advice, **figures)
    if file_s < _SUSPICIOUS_S and not in_memory:
        advice = (
            "no disk is that quick: it may return before the bytes are on the disk, and a power cut could lose a save"
        )
        return ok("fsync", text, advice, **figures)
    return ok("fsync", text, **figures)


def direct_io(examined: Examined) -> list[Finding]:
    """Writes past the page cache, and how they must be aligned."""
    for alignment in (512, 4096):
        if _direct(examined.place() / f"direct-{alignment}", alignment):
            text = f"O_DIRECT works, aligned to {alignment} bytes"
            return [ok("direct I/O", text, works=True, alignment_bytes=alignment)]
    advice = (
        "writes go through the page cache and are flushed on the way: as safe, but they compete with training for memory "
        "and for its cache"
    )
    return [ok("direct I/O", "no O_DIRECT on this file system", advice, works=False)]


def _direct(path: Path, alignment: int) -> bool:
    memory = mmap.mmap(-1, 8192)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return False
        raise
    view = memoryview(memory)
    try:
        return os.pwrite(fd, view[alignment : 2 * alignment], alignment) == alignment
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        view.release()
        os.close(fd)
