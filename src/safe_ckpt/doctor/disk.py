"""Which file system a directory is on, and what is known of its kind."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok, skipped, warn

_TABLE = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LOST_AT_REBOOT = (
    "it is memory: what is saved there is gone after a reboot or with the job. Choose a directory on a disk"
)
_LAG = "other hosts may see new files seconds late; safe_ckpt waits for that"
NETWORK = {
    "nfs": f"{_LAG}. Mount it hard, not soft: a soft mount turns a busy server into failed saves",
    "nfs4": f"{_LAG}. Mount it hard, not soft: a soft mount turns a busy server into failed saves",
    "lustre": "stripe the directory for large files before training: lfs setstripe -c 4 DIR",
    "gpfs": "nothing to do; small files are slow there, large ones are not",
    "beegfs": "nothing to do; with client caching in buffered mode other hosts may see new files late",
    "ceph": "nothing to do; an evicted client loses what it has not flushed, which a save reports as an error",
    "cifs": f"{_LAG}. Mount it with cache=strict, and expect slow renames",
    "smb3": f"{_LAG}. Mount it with cache=strict, and expect slow renames",
    "9p": f"{_LAG}. It is a folder of the host of a virtual machine: prefer a disk",
    "virtiofs": "it is a folder of the host of a virtual machine: the host decides when bytes are on the disk",
}
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system.

    Attributes:
        point: where it is mounted.
        kind: its type, such as ``"ext4"``.
        source: the device or the server.
        options: of the mount and of the file system.
    """

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def in_memory(self) -> bool:
        """Whether it is gone after a reboot."""
        return self.kind in _MEMORY


def mount_of(path: str, table: str) -> Mount | None:
    """The mount that ``path`` is on; None when the table has none.

    Args:
        path: absolute, without symbolic links.
        table: what ``/proc/self/mountinfo`` says.
    """
    best: Mount | None = None
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        ahead, behind = left.split(), right.split(" ")
        if not separator or len(ahead) < 6 or len(behind) < 2:
            continue
        point = _plain(ahead[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts at one point the later one lies on top.
        if inside and (best is None or len(point) >= len(best.point)):
            options = frozenset([*ahead[5].split(","), *(behind[2].split(",") if len(behind) > 2 else [])])
            best = Mount(point=point, kind=behind[0], source=_plain(behind[1]), options=options)
    return best


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found.group(1), 8)), text)


def current(path: Path, table: Path = _TABLE) -> Mount | None:
    """The mount that ``path`` is on now; None where that cannot be told."""
    try:
        return mount_of(os.path.realpath(path), table.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def judge(mount: Mount) -> Finding:
    """What to know of this file system."""
    text = f"{mount.kind} at {mount.point}, from {mount.source}"
    figures = {"kind": mount.kind, "mount_point": mount.point, "source": mount.source}
    if "ro" in mount.options:
        advice = "mount it for writing, or choose another directory"
        return fail("file system", f"{text}, read-only", advice, **figures)
    if mount.in_memory:
        return warn("file system", text, _LOST_AT_REBOOT, **figures)
    if mount.kind == "overlay":
        advice = "it is the container's own layer, gone with the container: mount a volume and save there"
        return warn("file system", text, advice, **figures)
    if mount.kind.startswith("fuse"):
        advice = (
            "what fsync and rename promise there is up to that program: object stores behind FUSE are not supported"
        )
        return warn("file system", text, advice, **figures)
    if "soft" in mount.options and mount.kind in NETWORK:
        return warn("file system", f"{text}, mounted soft", NETWORK[mount.kind], **figures)
    return ok("file system", text, NETWORK.get(mount.kind, ""), **figures)


def file_system(examined: Examined) -> list[Finding]:
    """The kind of the file system."""
    mount = current(examined.existing)
    return [judge(mount) if mount else skipped("file system", "the table of mounts does not tell")]
