"""Saves to FOLDER, which is mirrored to URL, once SIGTERM asks it to stop, and ends."""

import sys
import time

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Timeouts

config = CheckpointConfig(
    mirror=Mirror(url=sys.argv[2]), save_on_signals=("SIGTERM",), signal_grace_s=20, timeouts=Timeouts(shutdown_s=5)
)
with Checkpointer(sys.argv[1], config) as ckpt:
    print("ready", flush=True)
    for step in range(1000):
        time.sleep(0.05)
        if ckpt.stop_requested:
            ckpt.save(step, {"w": torch.ones(1 << 20)})
            break
