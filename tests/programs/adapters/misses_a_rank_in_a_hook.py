"""Saves twice in FOLDER; at first a hook of rank 1 raises RendezvousTimeout. Says what the ranks get."""

import sys
import time

from accelerate_rank import rank, say

from accelerate_runs import CONFIG, Training, make
from safe_ckpt.accelerate import register
from safe_ckpt.errors import RendezvousTimeout

accelerator = make(sys.argv[1])
handle = register(accelerator, CONFIG)
training = Training(accelerator)


def hook(models, weights, output_dir):
    if rank == 1:
        raise RendezvousTimeout(phase="mine", seconds=1.0, missing=(7,))


removable = accelerator.register_save_state_pre_hook(hook)
begun = time.monotonic()
try:
    accelerator.save_state()
except RendezvousTimeout as error:
    say("mine" in str(error), time.monotonic() - begun < 10)
removable.remove()
accelerator.save_state(async_save=False)
say("SAVED")
accelerator.end_training()
