"""Saves three times to FOLDER, with at most MOST_BYTES of host memory if that is not 0, and resumes; its log goes to stdout."""

import logging
import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, WriterConfig

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
config = CheckpointConfig(max_host_bytes=int(sys.argv[2]) or None, writer=WriterConfig(chunk_bytes=1 << 20))
with Checkpointer(sys.argv[1], config) as ckpt:
    for step in (1, 2, 3):
        ckpt.save(step, {"t": torch.full((1_000_003,), float(step)), "n": step}).result(timeout_s=30)
    state = {"t": torch.zeros(1_000_003), "n": 0}
    print("resumed", ckpt.resume(state).step, state["n"], set(state["t"].tolist()))
