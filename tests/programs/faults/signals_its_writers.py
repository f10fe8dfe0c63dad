"""Saves four times to FOLDER; from the second on the writer process gets the signal NUMBER first. Prints the steps."""

import logging
import os
import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts

folder, number = sys.argv[1], int(sys.argv[2])
ckpt = Checkpointer(folder, CheckpointConfig(timeouts=Timeouts(shutdown_s=5, writer_stall_s=5)))
handle = ckpt.save(1, {"w": {"t": torch.ones(20_000_000)}})
logging.basicConfig()
for step in (2, 3, 4):
    os.kill(ckpt._engine._pipeline.writer.pid, number)
    handle = ckpt.save(step, {"w": {"t": torch.full((20_000_000,), float(step))}})
    print(handle.result(timeout_s=50).step, flush=True)
ckpt.close()
