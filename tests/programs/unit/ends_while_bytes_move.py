"""Saves to FOLDER, slowly, "here" or in "the writer process", under SHUTDOWN_S, and ends as HOW says."""

import sys
import time
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig

folder, shutdown_s, where, how = sys.argv[1:]
if where == "here":
    sys.executable = None
slow = WriterConfig(chunk_bytes=4096, flush_every_bytes=4096, direct_io="off")
config = CheckpointConfig(timeouts=Timeouts(shutdown_s=float(shutdown_s)), writer=slow)
ckpt = Checkpointer(folder, config)
ckpt.save(1, {"m": {"w": torch.zeros(2_000_000)}})
# To start a writer process moves no bytes, and a busy machine takes longer for it than this program waits for progress.
deadline = time.monotonic() + 60
while not any(file.stat().st_size for file in Path(folder).rglob("*.safetensors")) and time.monotonic() < deadline:
    time.sleep(0.01)
if how == "closes":
    ckpt.close()
elif how == "raises":
    raise KeyError("mine")
