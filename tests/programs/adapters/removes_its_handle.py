"""Saves in FOLDER with a handle that it removes: says if threads and methods are as before, and what memory is shared."""

import sys
import threading

from accelerate_rank import say

from accelerate_runs import CONFIG, Training, make, shared_memory
from safe_ckpt.accelerate import register

accelerator = make(sys.argv[1])
before = threading.active_count(), accelerator.save_state
with register(accelerator, CONFIG) as handle:
    training = Training(accelerator)
    accelerator.save_state()
say((threading.active_count(), accelerator.save_state) == before, shared_memory())
training.epoch()
accelerator.end_training()
