"""Has a Checkpointer of DIRECTORY take signals, never asks for them, and sends itself two, and two more after the grace."""

import os
import signal
import sys
import time

from safe_ckpt import CheckpointConfig, Checkpointer

config = CheckpointConfig(save_on_signals=("SIGTERM", "SIGUSR1"), signal_grace_s=0.5)
ckpt = Checkpointer(sys.argv[1], config)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
time.sleep(0.7)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
print("still alive", flush=True)
