"""Saves three times to FOLDER with EXECUTABLE as the interpreter of the writer process, and resumes."""

import sys
import time

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig

folder, sys.executable = sys.argv[1:]
settings = CheckpointConfig(timeouts=Timeouts(writer_stall_s=2), writer=WriterConfig(inline_bytes=0))
begun = time.monotonic()
with Checkpointer(folder, settings) as ckpt:
    for step in (1, 2, 3):
        ckpt.save(step, {"w": {"t": torch.ones(1000) * step}}).result(timeout_s=20)
    state = {"w": {"t": torch.zeros(1000)}}
    assert ckpt.resume(state).step == 3
    assert state["w"]["t"].eq(3).all()
assert time.monotonic() - begun < 12, time.monotonic() - begun
print("done", flush=True)
