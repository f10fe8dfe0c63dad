"""Resumes from FOLDER: prints the step, or the errno and path of the error."""

import sys

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.errors import DirectoryError

config = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=4, peer_stall_s=5, shutdown_s=10))
try:
    with Checkpointer(sys.argv[1], config) as ckpt:
        print("resumed", ckpt.resume({"a": 0, "b": []}).step)
except DirectoryError as error:
    print("refused", error.errno, error.path)
