"""Trains in FOLDER, with KIND "sharded" or "full" of checkpoints, up to EPOCHS; says how it ends and saves to the path OVER."""

import os
import sys
from pathlib import Path

from lightning_fsdp2 import fit, print_of

if __name__ == "__main__":
    folder, kind, epochs, over = sys.argv[1:]
    made, module = fit(Path(folder), kind, int(epochs))
    os.write(1, f"RANK {made.global_rank} {print_of(module)} {made.global_step}\n".encode())  # in one piece
    made.save_checkpoint(over)
