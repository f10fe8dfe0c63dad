"""Does the lock of a job work here: tried with a second process, in the private folder."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import filelock

import safe_ckpt
from safe_ckpt.core.directory.lock import JobLock, holder_of
from safe_ckpt.doctor.examined import PREFIX, Examined
from safe_ckpt.doctor.finding import Figure, Finding, fail, ok, skipped, time_text, warn
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from safe_ckpt.inspection.listing import find_shelf

_LEASE_S = 60.0
_QUICK_S = 10.0
_OLD_S = 3600.0
_HOLD = """
import sys
sys.path[:0] = {roots!r}
from pathlib import Path
from safe_ckpt.core.directory.lock import JobLock
folder = Path({folder!r})
lock = JobLock(folder, subject=folder, lease_s={lease_s!r})  # by its name it stays
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def locking(examined: Examined) -> list[Finding]:
    """A second job is refused while the first lives, and gets in at once when that is killed."""
    folder = examined.place() / "locked"
    folder.mkdir()
    if not sys.executable:
        return [skipped("lock", "sys.executable is not set: no second process can be started")]
    lock = JobLock(folder, subject=folder, lease_s=_LEASE_S)
    with _holder(folder) as holder:
        try:
            if holder.stdout is None or holder.stdout.readline() != b"held\n":
                last = (holder.communicate()[1].decode(errors="replace").strip().splitlines() or ["it ended"])[-1]
                return [fail("lock", f"a process cannot take it: {last}", "choose a directory on another file system")]
            if _taken(lock):
                lock.release()
                advice = "two jobs could write one directory: choose a directory on another file system"
                return [fail("lock", "two processes hold it at the same time", advice)]
        finally:
            holder.kill()
    return [_taken_over(lock)]


def _holder(folder: Path) -> subprocess.Popen[bytes]:
    roots = [str(Path(module.__file__).parent.parent) for module in (safe_ckpt, filelock) if module.__file__]
    code = _HOLD.format(roots=roots, folder=str(folder), lease_s=_LEASE_S)
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _taken(lock: JobLock) -> bool:
    try:
        lock.acquire()
    except DirectoryInUseError:
        return False
    return True


def _taken_over(lock: JobLock) -> Finding:
    begun = time.monotonic()
    try:
        lock.acquire()
        lock.confirm()
    except DirectoryError as error:
        advice = "after a crash nobody could resume here without safe-ckpt unlock: choose another directory"
        return fail("lock", f"that of a killed process is not taken over: {error.message}", advice)
    lock.release()
    seconds = time.monotonic() - begun
    text = f"a second process is refused, that of a killed one is taken over in {time_text(seconds)}"
    if seconds > _QUICK_S:
        return warn("lock", text, "small files are slow here: see the times of fsync", takeover_s=seconds)
    return ok("lock", text, takeover_s=seconds)


def holder(examined: Examined) -> list[Finding]:
    """Who holds the directory. Only read; a live job goes on undisturbed."""
    if examined.existing != examined.asked:
        return []
    if not examined.asked.is_dir():
        return []
    found = holder_of(find_shelf(examined.asked).hidden)
    if found is None:
        return [ok("held by", "no job")]
    who = f"process {found.pid} on host {found.host}" if found.host else "a job that has not written its name"
    figures: dict[str, Figure] = {"pid": found.pid, "host": found.host, "alive": found.alive}
    if found.alive is False:
        return [ok("held by", f"no job: {who} is gone, and the next job takes over at once", **figures)]
    advice = "that job is not disturbed; speeds are measured beside it"
    if found.alive is None:
        advice += ". Whether it is alive cannot be told from here: if it is gone, the next job takes over by itself"
    return [ok("held by", f"{who}, since {found.started_at}", advice, **figures)]


def leftovers(examined: Examined) -> list[Finding]:
    """Private folders of doctors that were killed."""
    own = examined.scratch.name if examined.scratch else ""
    old = [
        path
        for path in examined.existing.glob(f"{PREFIX}*")
        if path.name != own and time.time() - path.stat().st_mtime > _OLD_S
    ]
    if not old:
        return []
    return [
        warn("leftovers", f"{len(old)} folders of doctors that were killed", f"rm -r {examined.existing}/{PREFIX}*")
    ]
