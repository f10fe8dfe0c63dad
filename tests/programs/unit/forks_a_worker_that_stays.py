"""Saves to FOLDER and forks a process that lives on for a while with all descriptors but two; prints its own pid and waits."""

import os
import sys
import time

from safe_ckpt import CheckpointConfig, Checkpointer, WriterConfig

ckpt = Checkpointer(sys.argv[1], CheckpointConfig(writer=WriterConfig(inline_bytes=0)))
ckpt.save(1, {"x": 1}).result()
if os.fork() == 0:
    os.close(1)
    os.close(2)
    time.sleep(20)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
