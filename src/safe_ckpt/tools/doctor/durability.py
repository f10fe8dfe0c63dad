"""Checks that a file holds what was written, fsync takes as long as a disk takes, and a job's lock excludes a second job."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock

import safe_ckpt
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.storage.durable import NO_SYNC, sync_directory
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from safe_ckpt.text import duration
from safe_ckpt.tools.doctor.check import (
    CheckResult,
    Examined,
    at_a_price,
    fail,
    held_by,
    not_made,
    ok,
    refused,
    warn_if,
)
from safe_ckpt.tools.doctor.disk import current
from safe_ckpt.tools.inspection.listing import holders_of

_T = TypeVar("_T")
_ROUNDS = 5
_SUSPICIOUS_S = 20e-6
_SLOW_S = 1.0
_LEASE_S = 60.0
_QUICK_S = 10.0
_HOLD = """
import sys
from pathlib import Path
sys.path[:0] = {roots!r}
from safe_ckpt.core.home.file_lock import JobLock
lock = JobLock(Path({folder!r}), subject=Path({folder!r}), lease_s={lease_s!r})
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def creating(examined: Examined) -> list[CheckResult]:
    """A folder and a file can be made, and what was written is read back."""
    if examined.problem is not None:
        return [refused("write", examined.problem, f"cannot create a folder in {examined.existing}")]
    folder = examined.folder("written")
    data = os.urandom(1 << 20)
    seconds = _seconds((folder / "file").write_bytes, data)
    if (folder / "file").read_bytes() != data:
        return [fail("write", "a file does not hold what was written", "do not keep checkpoints there: look at dmesg")]
    if os.listdir(folder) != ["file"]:
        advice = "the file system caches what folders hold, even for the host that writes: switch that off in its mount"
        return [fail("write", "a new file is not listed in its folder", advice)]
    return [ok("write", f"wrote 1 MiB in {duration(seconds)} and read it back", seconds_s=seconds)]


def syncing(examined: Examined) -> list[CheckResult]:
    """Measure how long a file and a directory take to reach the disk."""
    folder = examined.folder("synced")
    file_s, folder_s = [], []
    for number in range(_ROUNDS):
        with (folder / str(number)).open("xb", buffering=0) as file:
            file.write(os.urandom(65536))
            file_s.append(_seconds(os.fsync, file.fileno()))
        try:
            folder_s.append(_seconds(sync_directory, str(folder)))
        except OSError as error:
            return [refused("fsync", error, "fsync of a directory")]
    if not sync_directory(str(folder)):
        return [at_a_price("fsync", "fsync of a directory is refused", NO_SYNC)]
    mount = current(examined.existing)
    in_memory = mount is not None and mount.in_memory
    return [judge_fsync(statistics.median(file_s), statistics.median(folder_s), in_memory=in_memory)]


def _seconds(action: Callable[[_T], object], argument: _T) -> float:
    begun = time.perf_counter()
    action(argument)
    return time.perf_counter() - begun


def judge_fsync(file_s: float, folder_s: float, *, in_memory: bool) -> CheckResult:
    """Judge whether an fsync that takes so long can be believed, and afforded."""
    text = f"{duration(file_s)} for a file of 64 KiB, {duration(folder_s)} for a directory"
    figures = {"file_s": file_s, "directory_s": folder_s}
    if max(file_s, folder_s) > _SLOW_S:
        advice = "every save does a handful of these: others keep the disk busy, or its write cache is off"
        return at_a_price("fsync", text, advice, **figures)
    advice = "no disk is that fast: it may return before the bytes are on the disk, and a power cut may lose a save"
    return ok("fsync", text, advice if file_s < _SUSPICIOUS_S and not in_memory else "", **figures)


def locking(examined: Examined) -> list[CheckResult]:
    """Check whether a second job is refused while the first lives, and takes over at once when that is killed."""
    folder = examined.folder("locked")
    if not sys.executable:
        return [not_made("lock", "sys.executable is not set: no second process can be started")]
    lock = JobLock(folder, subject=folder, lease_s=_LEASE_S)
    roots = [str(Path(module.__file__).parent.parent) for module in (safe_ckpt, filelock) if module.__file__]
    command = [sys.executable, "-I", "-c", _HOLD.format(roots=roots, folder=str(folder), lease_s=_LEASE_S)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as holder:
        try:
            if holder.stdout is None or holder.stdout.readline() != b"held\n":
                last = (holder.communicate()[1].decode(errors="replace").strip().splitlines() or ["it ended"])[-1]
                return [fail("lock", f"a process cannot take it: {last}", "choose a directory on another file system")]
            with contextlib.suppress(DirectoryInUseError):
                lock.acquire()
                lock.release()
                advice = "two jobs could write one directory: choose a directory on another file system"
                return [fail("lock", "two processes hold it at the same time", advice)]
        finally:
            holder.kill()
    return [_taken_over(lock)]


def _taken_over(lock: JobLock) -> CheckResult:
    begun = time.monotonic()
    try:
        lock.acquire()
        lock.confirm()
    except DirectoryError as error:
        advice = "after a crash nobody could resume here without safe-ckpt unlock: choose another directory"
        return fail("lock", f"that of a killed process is not taken over: {error.message}", advice)
    lock.release()
    seconds = time.monotonic() - begun
    text = f"a second process is refused, that of a killed one is taken over in {duration(seconds)}"
    advice = "small files are slow here: see the times of fsync"
    return warn_if(seconds > _QUICK_S, "lock", text, advice, takeover_s=seconds)


def holder(examined: Examined) -> list[CheckResult]:
    """The job that holds the directory. Its lock is only read; the job is not disturbed."""
    if examined.existing != examined.asked or not examined.asked.is_dir():
        return []
    held, advice = holders_of(examined.asked), "that job is not disturbed; speeds are measured beside it"
    if held and held[0].holder.alive is None:
        advice += ". Whether it is alive is unknown here: if it is gone, the next job takes over by itself"
    return held_by(held, advice)
