"""All checks of one process, in the order in which they are reported."""

from __future__ import annotations

from safe_ckpt.tools.doctor import disk, durability, machine, speed
from safe_ckpt.tools.doctor.check import Check, Examined, Finding, fail, ok


def directory(examined: Examined) -> list[Finding]:
    """The directory that is examined."""
    if examined.existing != examined.asked:
        text = f"{examined.asked} does not exist yet: {examined.existing} is examined in its place"
        return [ok("directory", text, levels_up=examined.levels_up)]
    if not examined.asked.is_dir():
        return [fail("directory", f"{examined.asked} is no directory", "choose another path")]
    return [ok("directory", str(examined.asked), levels_up=0)]


ON_DIRECTORY = (
    Check(name="directory", run=directory),
    Check(name="held by", run=durability.holder),
    Check(name="leftovers", run=durability.leftovers),
    Check(name="file system", run=disk.file_system),
    Check(name="write", run=durability.creating),
    Check(name="fsync", run=durability.syncing, needs_scratch=True),
    Check(name="rename", run=disk.renaming, needs_scratch=True),
    Check(name="links", run=disk.links, needs_scratch=True),
    Check(name="names", run=disk.names, needs_scratch=True),
    Check(name="lock", run=durability.locking, needs_scratch=True),
    Check(name="space", run=disk.space),
    Check(name="files", run=disk.inodes),
    Check(name="speed", run=speed.speed, needs_scratch=True),
)
"""Of the directory. On several ranks rank 0 alone does these."""

ON_MACHINE = (
    Check(name="memory", run=machine.memory, touches_disk=False),
    Check(name="shared memory", run=machine.shared_memory, touches_disk=False),
    Check(name="file size", run=machine.file_size, touches_disk=False),
    Check(name="cores", run=machine.cores, touches_disk=False),
    Check(name="versions", run=machine.versions, touches_disk=False),
)
"""Of the host and the process. On several ranks one rank of every host does these."""
