"""Saves to a folder under limits of the process; prints as JSON what came of each."""

import json
import resource
import sys
from pathlib import Path

import torch

from safe_ckpt import Checkpointer, SafeCheckpointError


def tell(ckpt, step, state):
    try:
        return ckpt.save(step, state).result(timeout_s=30).step
    except SafeCheckpointError as error:
        return [type(error).__name__, str(error)]


large, parts = {"w": {"t": torch.ones(16 << 20)}}, {f"part{n}": {"t": torch.ones(200_000)} for n in range(4)}
found = {}
with Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(0, {"w": {"t": torch.ones(1)}}).result(timeout_s=30)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (40 << 20), resource.RLIM_INFINITY))
    found["address space"] = tell(ckpt, 1, large)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["without the limit"] = tell(ckpt, 2, large)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    found["large file"] = tell(ckpt, 3, large)
    found["small files"] = tell(ckpt, 4, parts)
with Checkpointer(sys.argv[1] + "/new") as ckpt:
    found["large file from the start"] = tell(ckpt, 3, large)
    found["small files from the start"] = tell(ckpt, 4, parts)
print(json.dumps(found))
