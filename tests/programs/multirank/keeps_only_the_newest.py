"""Saves step after step to DIRECTORY, where one checkpoint is kept, and prints each step that is saved."""

import sys
import time

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Retention

state = {f"part{n}": torch.zeros(1 << 16) for n in range(8)}
with Checkpointer(sys.argv[1], CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
    for step in range(1, 100_000):
        for tensor in state.values():
            tensor.fill_(step)
        ckpt.save(step, state)
        ckpt.wait()
        print(step, flush=True)
        time.sleep(0.1)  # its training
