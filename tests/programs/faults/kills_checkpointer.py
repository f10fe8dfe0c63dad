"""Saves into DIRECTORY without end, and keeps one: for ``kills.killed``."""

import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Retention

state = {"step": 0, "w": {"w": torch.zeros(1 << 18)}}
with Checkpointer(sys.argv[1], CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
    ckpt.resume(state)
    print("BEGUN", state["step"], flush=True)
    while True:
        state["step"] += 1
        state["w"]["w"].fill_(state["step"])
        ckpt.save(state["step"], state).result()
        print("DONE", state["step"], flush=True)
