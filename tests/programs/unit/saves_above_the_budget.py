"""Saves 256 MiB to FOLDER under max_host_bytes of 8 MiB; prints by how many MiB its memory has grown."""

import sys
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


config = CheckpointConfig(max_host_bytes=8 << 20)
state = {"model": {f"w{i}": torch.full((1 << 22,), float(i)) for i in range(16)}}
with Checkpointer(sys.argv[1], config) as ckpt:
    ckpt.save(1, {"warm": torch.ones(1 << 22)}).result()
    before = peak()
    handle = ckpt.save(2, state)
    grown = peak() - before
    for tensor in state["model"].values():
        tensor.zero_()
    handle.result()
    ckpt.resume(state)
assert all(bool((tensor == i).all()) for i, tensor in enumerate(state["model"].values()))
print(grown >> 20)
