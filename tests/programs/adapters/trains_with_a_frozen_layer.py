"""Trains a net with a frozen layer in FOLDER up to EPOCHS, with sharded checkpoints, and says how it ends."""

import os
import sys
from pathlib import Path

import torch
from lightning_fsdp2 import Module, fit, print_of


class Wide(Module):
    def __init__(self, **more):
        super().__init__(**more)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 800), torch.nn.Linear(800, 800), torch.nn.Linear(800, 2))
        self.net[1].requires_grad_(requires_grad=False)


if __name__ == "__main__":
    made, module = fit(Path(sys.argv[1]), "sharded", int(sys.argv[2]), make=Wide)
    os.write(1, f"RANK {made.global_rank} {print_of(module)} {made.global_step}\n".encode())
