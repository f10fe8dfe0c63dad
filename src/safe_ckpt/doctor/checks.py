"""All checks of one process, in the order in which they are told."""

from __future__ import annotations

from safe_ckpt.doctor import disk, durability, limits, locking, machine, naming, space, speed, surroundings
from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok
from safe_ckpt.doctor.runner import Check


def directory(examined: Examined) -> list[Finding]:
    """What is looked at."""
    if examined.existing != examined.asked:
        text = f"{examined.asked} does not exist yet: {examined.existing} is examined in its place"
        return [ok("directory", text, levels_up=examined.levels_up)]
    if not examined.asked.is_dir():
        return [fail("directory", f"{examined.asked} is no directory", "choose another path")]
    return [ok("directory", str(examined.asked), levels_up=0)]


ON_DIRECTORY = (
    Check(name="directory", run=directory),
    Check(name="held by", run=locking.holder),
    Check(name="leftovers", run=locking.leftovers),
    Check(name="file system", run=disk.file_system),
    Check(name="write", run=durability.creating),
    Check(name="fsync", run=durability.durability, needs_scratch=True),
    Check(name="rename", run=naming.renaming, needs_scratch=True),
    Check(name="exclusive creation", run=naming.exclusive, needs_scratch=True),
    Check(name="links", run=naming.links, needs_scratch=True),
    Check(name="names", run=naming.names, needs_scratch=True),
    Check(name="delete while open", run=naming.unlinking, needs_scratch=True),
    Check(name="lock", run=locking.locking, needs_scratch=True),
    Check(name="space", run=space.space),
    Check(name="files", run=space.inodes),
    Check(name="quota", run=space.quota, needs_scratch=True),
    Check(name="direct I/O", run=durability.direct_io, needs_scratch=True),
    Check(name="speed", run=speed.throughput, needs_scratch=True),
)
"""Of the directory. On several ranks rank 0 alone does these."""

ON_MACHINE = (
    Check(name="hashing", run=speed.hashing, touches_disk=False),
    Check(name="memory", run=machine.memory, touches_disk=False),
    Check(name="shared memory", run=machine.shared_memory, touches_disk=False),
    Check(name=machine.DEV_SHM, run=machine.dev_shm, touches_disk=False),
    Check(name="swap", run=machine.swap, touches_disk=False),
    Check(name="limits", run=limits.limits, touches_disk=False),
    Check(name="cores", run=limits.cores, touches_disk=False),
    Check(name="resolver", run=surroundings.resolver, touches_disk=False),
    Check(name="scheduler", run=surroundings.scheduler, touches_disk=False),
    Check(name="versions", run=surroundings.versions, touches_disk=False),
)
"""Of the host and the process. On several ranks one rank of every host does these."""
