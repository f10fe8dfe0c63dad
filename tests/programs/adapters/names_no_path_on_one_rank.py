"""Saves below FOLDER; at first rank 1 gives no path. Says what the ranks get."""

import sys
import time
from pathlib import Path

from accelerate_rank import rank, say

from accelerate_runs import CONFIG, Training, make
from safe_ckpt import SafeCheckpointError
from safe_ckpt.accelerate import register

folder = Path(sys.argv[1])
accelerator = make(None)
handle = register(accelerator, CONFIG)
training = Training(accelerator)
begun = time.monotonic()
try:
    accelerator.save_state(None if rank == 1 else folder / "a")
except SafeCheckpointError as error:
    say(type(error).__name__, "output_dir" in str(error), time.monotonic() - begun < 10)
accelerator.save_state(folder / "b", async_save=False)
say("SAVED")
accelerator.end_training()
