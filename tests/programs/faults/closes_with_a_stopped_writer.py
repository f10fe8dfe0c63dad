"""Saves to FOLDER, stops the writer process and closes, which may take SHUTDOWN_S seconds."""

import os
import signal
import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts

folder, shutdown_s = sys.argv[1], float(sys.argv[2])
config = CheckpointConfig(timeouts=Timeouts(shutdown_s=shutdown_s, writer_stall_s=60))
ckpt = Checkpointer(folder, config)
handle = ckpt.save(1, {"w": {"t": torch.ones(20_000_000)}})
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(ckpt._engine._pipeline.writer.pid, signal.SIGSTOP)
print("closing", flush=True)
ckpt.close()
