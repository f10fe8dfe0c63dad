"""Saves small steps into DIRECTORY up to LAST, keeping one; goes on where an earlier one was killed."""

import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Retention

directory, last = sys.argv[1], int(sys.argv[2])
config = CheckpointConfig(retention=Retention(keep_last=1), record_events=False)
with Checkpointer(directory, config) as ckpt:
    state = {"w": {"t": torch.zeros(256)}, "step": 0}
    info = ckpt.resume(state)
    for step in range(info.step + 1 if info is not None else 1, last + 1):
        state["w"]["t"].fill_(step)
        state["step"] = step
        ckpt.save(step, state).result(timeout_s=60)
