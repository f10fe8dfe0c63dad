"""Saves to FOLDER, slowly, "here" or in "the writer process", under SHUTDOWN_S, and ends as HOW says."""

import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig

folder, shutdown_s, where, how = sys.argv[1:]
if where == "here":
    sys.executable = None
slow = WriterConfig(chunk_bytes=4096, flush_every_bytes=4096, direct_io="off")
config = CheckpointConfig(timeouts=Timeouts(shutdown_s=float(shutdown_s)), writer=slow)
ckpt = Checkpointer(folder, config)
ckpt.save(1, {"m": {"w": torch.zeros(4_000_000)}})
if how == "closes":
    ckpt.close()
elif how == "raises":
    raise KeyError("mine")
