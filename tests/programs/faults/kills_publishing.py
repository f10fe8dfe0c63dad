"""Publishes four files into DIRECTORY without end: for ``kills.killed``."""

import sys

import torch

import safe_ckpt
from safe_ckpt import CheckpointConfig, Retention

directory = sys.argv[1]
newest = safe_ckpt.newest(directory)
step = newest.step if newest is not None else 0
print("BEGUN", step, flush=True)
while True:
    step += 1
    with safe_ckpt.publishing(directory, step, config=CheckpointConfig(retention=Retention(keep_last=1))) as folder:
        for part in range(4):
            (folder / "deep").mkdir(exist_ok=True)
            torch.save(torch.full((1 << 18,), float(step)), folder / "deep" / f"{part}.pt")
    print("DONE", step, flush=True)
