"""Trains an epoch, saves in FOLDER and says the state's fingerprint."""

import sys

from accelerate_rank import say

from accelerate_runs import CONFIG, Training, make
from safe_ckpt.accelerate import register

accelerator = make(sys.argv[1])
register(accelerator, CONFIG)
training = Training(accelerator)
training.epoch()
accelerator.save_state()
say(training.fingerprint())
accelerator.end_training()
