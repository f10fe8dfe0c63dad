"""Saves to FOLDER while the writer process is stopped: for a second, together with this process, and for good.

Prints whether it stayed the same after the first two, then the step, whether it is another one, and the seconds of the third.
"""

import os
import signal
import subprocess
import sys
import time

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts

PAUSES = """
import os, signal, sys, time
for number in (signal.SIGSTOP, signal.SIGCONT):
    [os.kill(int(pid), number) for pid in sys.argv[1:]]
    time.sleep(4)
"""
ckpt = Checkpointer(sys.argv[1], CheckpointConfig(timeouts=Timeouts(shutdown_s=5)))


def save(step):
    return ckpt.save(step, {"w": {"t": torch.full((20_000_000,), float(step))}})


save(1).result(timeout_s=30)
writer = ckpt._engine._pipeline.writer
pid = writer.pid
os.kill(pid, signal.SIGSTOP)
handle = save(2)
time.sleep(1)
os.kill(pid, signal.SIGCONT)
handle.result(timeout_s=30)
os.kill(pid, signal.SIGSTOP)
handle = save(3)
pauser = subprocess.Popen([sys.executable, "-c", PAUSES, str(os.getpid()), str(pid)])
handle.result(timeout_s=30)
pauser.wait()
print(writer.pid == pid)
os.kill(pid, signal.SIGSTOP)
begun = time.monotonic()
print(save(4).result(timeout_s=30).step, writer.pid != pid, time.monotonic() - begun)
ckpt.close()
