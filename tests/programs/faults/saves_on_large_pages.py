"""Saves into FOLDER, resumes and verifies as if the pages of this machine had 64 KiB."""

# ruff: noqa: E402 - what is imported finds the pages changed
import mmap
import sys

mmap.PAGESIZE = mmap.ALLOCATIONGRANULARITY = 65536
Real = mmap.mmap


class Strict(Real):
    """Refuses what a kernel with pages of 64 KiB would."""

    def __new__(cls, fileno, length, *args, offset=0, **more):
        if offset % 65536:
            raise ValueError(f"offset {offset}")
        return super().__new__(cls, fileno, length, *args, offset=offset, **more)

    def madvise(self, option, start=0, length=None):
        if start % 65536:
            raise ValueError(f"start {start}")
        return super().madvise(option, start) if length is None else super().madvise(option, start, length)


mmap.mmap = Strict
import torch

from safe_ckpt.core.staging import buffer

seen = []
real = buffer._map


def strict_map(start, length, advice):
    if length % 65536:
        raise ValueError(f"length {length}")
    seen.append(length)
    return real(start, length, advice)


buffer._map = strict_map
from safe_ckpt import Checkpointer

with Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, {"t": torch.arange(3_000_001), "n": 1}).result(timeout_s=30)
    state = {"t": torch.zeros(3_000_001, dtype=torch.int64), "n": 0}
    ckpt.resume(state)
print(bool((state["t"] == torch.arange(3_000_001)).all()), len(seen) > 0)
from safe_ckpt.tools.cli.app import app

app(["verify", sys.argv[1]])
