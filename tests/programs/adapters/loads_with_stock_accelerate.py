"""Loads what lies in FOLDER without a handle and says the state's fingerprint."""

import sys

from accelerate_rank import say

from accelerate_runs import Training, make

accelerator = make(sys.argv[1])
training = Training(accelerator, number=5)
training.scramble()
accelerator.load_state()
say(training.fingerprint())
accelerator.end_training()
