"""Saves in FOLDER, fills its disk, saves, restores, frees the disk and saves: says the error and what lies there."""

import os
import sys
from pathlib import Path

from accelerate_rank import rank, say

from accelerate_runs import CONFIG, Training, make
from safe_ckpt import SafeCheckpointError
from safe_ckpt.accelerate import register

folder = Path(sys.argv[1])
accelerator = make(folder, limit=1)
handle = register(accelerator, CONFIG)
training = Training(accelerator, width=20_000)
training.epoch()
accelerator.save_state(async_save=False)
expected = training.fingerprint()
if rank == 0:
    (folder / "filler").write_bytes(b"x" * (os.statvfs(folder).f_bavail * 4096 - (1 << 20)))
training.epoch()
try:
    accelerator.save_state()
    handle.wait()
except SafeCheckpointError as error:
    say(type(error).__name__)
training.scramble()
accelerator.load_state()
say("EQUAL", training.fingerprint() == expected, sorted(os.listdir(folder / "checkpoints")))
if rank == 0:
    (folder / "filler").unlink()
accelerator.wait_for_everyone()
accelerator.save_state(async_save=False)
accelerator.wait_for_everyone()  # rank 0 lets the old one go after the verdict
say(sorted(os.listdir(folder / "checkpoints")))
accelerator.end_training()
