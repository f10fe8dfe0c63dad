"""Sends itself SIGTERM at step 3: prints the step that it saves to DIRECTORY then, and if the signal's default is back."""

import os
import signal
import sys

from safe_ckpt import CheckpointConfig, Checkpointer

with Checkpointer(sys.argv[1], CheckpointConfig(save_on_signals=("SIGTERM",))) as ckpt:
    for step in range(1, 10):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if ckpt.stop_requested:
            print(ckpt.save(step, {"step": step}).result().step)
            break
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
