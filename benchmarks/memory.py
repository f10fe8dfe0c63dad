"""How much memory this process and its children hold, as the kernel counts it."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


def status(pid: int | str = "self") -> dict[str, int]:
    """The sizes in a process's status, in bytes; empty when it is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value.split()[0]) * 1024
    return found


def reset_peak() -> None:
    """Start anew with this process's peak; where that is forbidden, the peak is that of its whole life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text(encoding="ascii").split()]
    return found


def _memfd_bytes() -> int:
    # Pages of a memory file that nobody touched through a mapping are in no process's resident set.
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("/memfd:"):
                file = os.stat(link)
                found[file.st_ino] = file.st_blocks * 512  # a mapping keeps a second descriptor of the same file
    return sum(found.values())


@dataclass
class Watermarks:
    """The most that was seen when somebody looked.

    Attributes:
        before_bytes: this process's own memory before the backend was set up.
        shared_bytes: shared memory that this process holds.
        child_bytes: the largest child process, shared memory left out.
    """

    before_bytes: int = 0
    shared_bytes: int = 0
    child_bytes: int = 0

    def begin(self) -> None:
        reset_peak()
        self.before_bytes = status().get("VmRSS", 0)

    def look(self) -> None:
        self.shared_bytes = max(self.shared_bytes, status().get("RssShmem", 0), _memfd_bytes())
        for pid in children():
            seen = status(pid)
            self.child_bytes = max(self.child_bytes, seen.get("RssAnon", 0) + seen.get("RssFile", 0))

    def to_json(self) -> dict[str, int]:
        """With this process's peak so far, shared memory included."""
        return {
            "before_bytes": self.before_bytes,
            "peak_bytes": status().get("VmHWM", 0),
            "shared_bytes": self.shared_bytes,
            "largest_child_bytes": self.child_bytes,
        }
