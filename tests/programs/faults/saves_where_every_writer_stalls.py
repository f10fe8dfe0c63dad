"""Saves into FOLDER while every writer process is stopped, then while none is: prints what came of both."""

import os
import signal
import sys
import time

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig
from safe_ckpt.core.writer import workers
from safe_ckpt.errors import WriterError

real = workers.WriterClient._send


def stopped(self, *arguments):
    os.kill(self.pid, signal.SIGSTOP)
    real(self, *arguments)


workers.WriterClient._send = stopped
config = CheckpointConfig(timeouts=Timeouts(writer_stall_s=2), writer=WriterConfig(max_respawns=1, inline_bytes=0))
with Checkpointer(sys.argv[1], config) as ckpt:
    begun = time.monotonic()
    try:
        ckpt.save(1, {"m": {"w": torch.ones(100_000)}}).result()
    except WriterError as error:
        print(error.name, error.pid > 0, "no progress" in error.ended, time.monotonic() - begun < 30)
    workers.WriterClient._send = real
    print(ckpt.save(2, {"m": {"w": torch.ones(100_000)}}).result().step)
