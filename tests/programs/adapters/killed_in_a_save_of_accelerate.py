"""Saves four times with Accelerate below FOLDER; the last is not written when SIGKILL comes. More FOLDERS for modules."""

# ruff: noqa: E402
import os
import signal
import sys
import time

sys.path[:0] = sys.argv[2:]
from accelerate_runs import CONFIG, Training, make
from safe_ckpt.accelerate import register

folder = sys.argv[1]
accelerator = make(None)
handle = register(accelerator, CONFIG)
Training(accelerator, width=100_000)
for step in (30, 40, 50):
    accelerator.save_state(f"{folder}/step_{step}", async_save=False)
writer = handle.saver.engine._pipeline.writer
os.kill(writer.pid, signal.SIGSTOP)
accelerator.save_state(f"{folder}/step_60")
deadline = time.monotonic() + 20
while not os.listdir(f"{folder}/.safe_ckpt/names/step_60/pending") and time.monotonic() < deadline:
    pass
os.kill(writer.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
