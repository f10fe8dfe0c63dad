"""Saves once with Accelerate to FOLDER/job_b, where another job saves as well. More FOLDERS for modules."""

# ruff: noqa: E402
import sys

sys.path[:0] = sys.argv[2:]
from accelerate_runs import CONFIG, Training, make
from safe_ckpt.accelerate import register

accelerator = make(None)
with register(accelerator, CONFIG):
    Training(accelerator)
    accelerator.save_state(sys.argv[1] + "/job_b")
