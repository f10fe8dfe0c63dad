"""Offloaded folders of several machines, whose paths and numbers say nothing of each other."""

import ctypes
import os
import socket

from kit.ranks import spawn_ranks, values
from safe_ckpt import consolidate_offloaded
from support import needs_root


def _consolidated(rank, folder, machines):
    if rank and machines > 1:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x04000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUTS
        socket.sethostname("another")
    consolidate_offloaded({"nvme": folder / "nvme"}, folder / f"on-{machines}")
    status = (folder / "nvme").stat()
    return status.st_dev, status.st_ino


@needs_root
def test_folders_of_two_machines_are_never_taken_for_one(tmp_path):
    """Equal disks number their folders alike: on two machines each one is there, and on one machine one of them."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme/x.tensor").write_bytes(b"1234")
    for machines, parts in ((1, ["nvme"]), (2, ["nvme", "nvme.rank00001"])):
        numbers = values(spawn_ranks(_consolidated, 2, tmp_path, machines))
        assert numbers[0] == numbers[1]
        found = tmp_path / f"on-{machines}"
        assert sorted(path.name for path in found.iterdir() if path.is_dir() and path.name[0] != ".") == parts
        assert {(found / part / "x.tensor").read_bytes() for part in parts} == {b"1234"}
