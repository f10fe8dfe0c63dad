"""Processes and the kernel they run on: which, since when, and in what state."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since the kernel did; None when it has ended.

    Raises:
        OSError: there is no such process, or it cannot be looked at.
    """
    fields = _stat(pid).split()
    return None if len(fields) < 20 or fields[0] in ("Z", "X") else int(fields[19])


def process_state(pid: int) -> str:
    """The kernel's one-letter state of a process on this machine, "" when it is gone, "?" where one cannot look just now."""
    try:
        return _stat(pid)[:1]
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else "?"
    except OSError:  # no descriptors left, say: no sign of a death
        return "?"


def _stat(pid: int) -> str:
    """The fields of ``/proc/<pid>/stat`` behind the process's name."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text[text.rfind(")") + 2 :]


@functools.cache
def kernel_id() -> str:
    """Different for every boot of every machine; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """The number of this process's PID namespace; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def machine_id() -> str:
    """Equal for two processes exactly when each can look up the other by its pid, and reach it through the loopback."""
    boot, spaces = kernel_id(), []
    try:
        spaces = [Path("/proc/self/ns", kind).stat().st_ino for kind in ("pid", "net")]
    except OSError:
        boot = ""
    if not boot:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{socket.gethostname()}/{boot}/{spaces}"
