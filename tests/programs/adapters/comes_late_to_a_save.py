"""Rank 1 comes late to a save in FOLDER, then the disk is slower than the group's timeout: says counters and that timeout."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs
from accelerate_rank import rank, say

from accelerate_runs import Training, make
from safe_ckpt import CheckpointConfig, Timeouts
from safe_ckpt.accelerate import register

folder = sys.argv[1]
config = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=30, writer_stall_s=20, peer_stall_s=3))
accelerator = make(folder, limit=2, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=4))])
handle = register(accelerator, config)
training = Training(accelerator)
for number in range(3):
    if rank == 1 and number == 1:
        time.sleep(5)
    accelerator.save_state()
    say("COUNTER", accelerator.save_iteration)
handle.wait()
real, slow = os.fsync, []


def fsync(fd):
    if not slow:
        slow.append(fd)
        time.sleep(6)
    real(fd)


os.fsync = fsync
begun = time.monotonic()
accelerator.save_state()
handle.wait()
say("LONG", time.monotonic() - begun > 5)
group = dist.distributed_c10d._get_default_group()
say("TIMEOUT", group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
accelerator.wait_for_everyone()
accelerator.end_training()
say("NAMES", sorted(os.listdir(f"{folder}/checkpoints")))
