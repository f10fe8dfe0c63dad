"""Trains with two workers, and saves at SIGTERM: FOLDER, "resumable" or "stock", and "stay" for workers that stay."""

import logging
import sys

import torch
from torch.utils.data import DataLoader

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.data import resumable

logging.basicConfig(level=logging.INFO)
folder, kind, *more = sys.argv[1:]
loader = DataLoader(torch.arange(100000.0), batch_size=2, num_workers=2, persistent_workers="stay" in more)
loader = resumable(loader) if kind == "resumable" else loader
with Checkpointer(folder, CheckpointConfig(save_on_signals=("SIGTERM",))) as ckpt:
    for step, batch in enumerate(loader, 1):
        if step == 5:
            print("trains", *(worker.pid for worker in loader._iterator._workers) if "stay" in more else (), flush=True)
        if ckpt.stop_requested:
            ckpt.save(step, {"batch": batch}).result()
            break
print("stopped", flush=True)
