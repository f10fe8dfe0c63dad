"""Saves with Fabric to the file PATH without end: for ``kills.killed``."""

import os
import sys

import torch
from lightning.fabric import Fabric

from safe_ckpt.lightning import SafeCheckpointIO

fabric = Fabric(accelerator="cpu", devices=1, plugins=[SafeCheckpointIO()])
fabric.launch()
path, state = sys.argv[1], {"step": 0, "w": torch.zeros(1 << 18)}
if os.path.exists(path):
    fabric.load(path, state)
assert state["w"].unique().tolist() == [float(state["step"])]
print("BEGUN", state["step"], flush=True)
while True:
    state["step"] += 1
    state["w"].fill_(state["step"])
    fabric.save(path, state)
    print("DONE", state["step"], flush=True)
