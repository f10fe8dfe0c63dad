"""The file system of a directory: its kind, what renames do there, and how much fits."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.storage import durable
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.doctor.check import CheckResult, Examined, at_a_price, fail, not_made, ok, warn_if

_LITTLE_BYTES = 1 << 30
_TABLE = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LAG = "other hosts may see new files seconds late; safe_ckpt waits for them"
_NFS = f"{_LAG}. Mount it hard, not soft: a soft mount turns a busy server into failed saves"
_CIFS = f"{_LAG}. Mount it with cache=strict, and expect slow renames"
NETWORK = {
    "nfs": _NFS,
    "nfs4": _NFS,
    "lustre": "stripe the directory for large files before training: lfs setstripe -c 4 DIR",
    "cifs": _CIFS,
    "smb3": _CIFS,
    "9p": f"{_LAG}. It is a folder of the host of a virtual machine: prefer a disk",
    "virtiofs": "it is a folder of the host of a virtual machine: the host decides when bytes are on the disk",
}
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_CLUSTERS = ("ceph", "gpfs", "beegfs", "glusterfs", "afs", "cvmfs", "orangefs", "pvfs2")
_BLOCKS = Path("/sys/dev/block")
_SOLD_AS_NVME = "Elastic Block Store"  # AWS shows a disk on its network as NVMe, with this in the name of its model


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
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def current(path: Path, table: Path = _TABLE) -> Mount | None:
    """The mount that ``path`` is on now; None where that is unknown."""
    try:
        return mount_of(os.path.realpath(path), table.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def judge_file_system(mount: Mount) -> CheckResult:
    """Judge whether checkpoints survive on a file system of this kind."""
    text = f"{mount.kind} at {mount.point}, from {mount.source}"
    figures = {"kind": mount.kind, "mount_point": mount.point, "source": mount.source}
    if "ro" in mount.options:
        advice = "mount it for writing, or choose another directory"
        return fail("file system", f"{text}, read-only", advice, **figures)
    advice = NETWORK.get(mount.kind, "")
    if mount.in_memory:
        advice = (
            "it is memory: what is saved there is gone after a reboot or with the job. Choose a directory on a disk, or set "
            "mirror.url to one"
        )
    elif mount.kind == "overlay":
        advice = "it is the container's own layer, which is deleted with the container: mount a volume and save there"
    elif mount.kind.startswith("fuse"):
        advice = "its program decides what fsync and rename promise: object stores behind FUSE are not supported"
    elif "soft" in mount.options and advice:
        text += ", mounted soft"
    else:
        return ok("file system", text, advice, **figures)
    return at_a_price("file system", text, advice, **figures)


def medium_of(mount: Mount, device: int, blocks: Path = _BLOCKS) -> str:
    """Where the files lie: memory, NVMe, a disk, the network; "" where that is not known, as behind a FUSE program.

    Args:
        mount: the mount.
        device: the number of its device.
        blocks: where the kernel lists the devices, for tests.
    """
    if mount.in_memory:
        return "memory"
    if mount.kind in NETWORK or mount.kind.removeprefix("fuse.") in _CLUSTERS:
        return "the network"
    return _medium_of_block((blocks / f"{os.major(device)}:{os.minor(device)}").resolve())


def _medium_of_block(block: Path) -> str:
    """That of a device, by its folder in ``/sys``: of one that is made of others, the slowest of theirs."""
    if not block.is_dir():
        return ""
    parts = list((block / "slaves").glob("*"))
    if parts:
        found = {_medium_of_block(part.resolve()) for part in parts}
        return next((one for one in ("", "the network", "a disk") if one in found), "NVMe")
    if not block.name.startswith("nvme"):
        return "a disk"
    whole = block if (block / "device").exists() else block.parent  # of a partition
    controller = (whole / "device").resolve()
    # Of a controller, or of those below a subsystem of several paths: anything else is NVMe over fabrics.
    transports = {_text(one) for one in (controller / "transport", *controller.glob("nvme*/transport"))}
    is_far = bool(transports - {"", "pcie"})
    return "the network" if is_far or _SOLD_AS_NVME in _text(controller / "model") else "NVMe"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def file_system(examined: Examined) -> list[CheckResult]:
    """The kind of the file system, and what it is on."""
    mount = current(examined.existing)
    if mount is None:
        return [not_made("file system", f"{_TABLE} does not list it")]
    found, medium = judge_file_system(mount), medium_of(mount, os.stat(examined.existing).st_dev)
    where = {"": "", "memory": ", in memory"}.get(medium, f", on {medium}")
    return [
        dataclasses.replace(
            found, measured=f"{found.measured}{where}", figures={**found.figures, "medium": medium or None}
        )
    ]


def renaming(examined: Examined) -> list[CheckResult]:
    """A rename replaces a file, moves a directory, and can exchange two."""
    folder = examined.folder("renamed")
    for name in ("new", "old"):
        (folder / name).write_text(name)
    for name in ("a", "b"):
        (folder / name).mkdir()
    os.replace(folder / "new", folder / "old")
    os.rename(folder / "old", folder / "b" / "moved")
    os.rename(folder / "a", folder / "c")
    exchanged = durable.exchange(folder / "b", folder / "c")
    moved = folder / ("c" if exchanged else "b") / "moved"
    if (folder / "new").exists() or moved.read_text() != "new":
        return [fail("rename", "a renamed file is not what it was", "choose a directory on another file system")]
    if exchanged:
        text = "replaces a file in one step, moves directories, and exchanges two names"
        return [ok("rename", text, exchange=True)]
    advice = "replacing a directory takes two renames here; the next start repairs what a crash leaves between them"
    text = "replaces a file in one step and moves directories, but cannot exchange two names"
    return [ok("rename", text, advice, exchange=False)]


def space(examined: Examined) -> list[CheckResult]:
    """Free bytes, against the size of a checkpoint."""
    free_bytes = durable.free_bytes(examined.existing)
    if free_bytes is None:
        return [not_made("space", "this file system does not report its free space, so no save checks it beforehand")]
    stat = os.statvfs(examined.existing)
    total_bytes = stat.f_blocks * stat.f_frsize
    size = examined.state_bytes
    return [judge_space(free_bytes=free_bytes, total_bytes=total_bytes, size=size, why=examined.state_from)]


def judge_space(*, free_bytes: int, total_bytes: int, size: int | None, why: str = "") -> CheckResult:
    """Judge whether that is enough: a new checkpoint is complete before an old one is deleted.

    Args:
        free_bytes: free for this user.
        total_bytes: of the file system.
        size: bytes of one checkpoint, if that is known.
        why: where it is known from.
    """
    text = f"{bytes_text(free_bytes)} free of {bytes_text(total_bytes)}"
    figures = {"free_bytes": free_bytes, "total_bytes": total_bytes, "state_bytes": size}
    if size is None:
        if free_bytes < _LITTLE_BYTES:
            advice = "that is little: free some, or give the size of a checkpoint with --state-bytes"
            return at_a_price("space", text, advice, **figures)
        return ok("space", f"{text}; --state-bytes shows how many checkpoints fit", **figures)
    figures["fit"] = fit = free_bytes // size
    text += f": {fit} {'checkpoint fits' if fit == 1 else 'checkpoints fit'} of {bytes_text(size)} each ({why})"
    if fit == 0:
        advice = "delete something, keep fewer checkpoints (Retention), or choose another directory"
        return fail("space", text, advice, **figures)
    advice = "a new one is complete before an old one is deleted: make room for two"
    return warn_if(fit == 1, "space", text, advice, **figures)
