"""Saves to FOLDER, then again while strace injects FAULT into the writer process: prints the step or the error."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts

folder, fault = sys.argv[1:]
config = CheckpointConfig(timeouts=Timeouts(shutdown_s=5, writer_stall_s=1, fsync_stall_s=2))
ckpt = Checkpointer(folder, config)
handle = ckpt.save(1, {"w": {"t": torch.ones(20_000_000)}})
pid = ckpt._engine._pipeline.writer.pid
handle.result(timeout_s=30)
command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,pwrite64", "-e", f"inject={fault}"]
tracer = subprocess.Popen([*command, "-p", str(pid)])


def tracers():
    tasks = Path(f"/proc/{pid}/task")
    return [(tasks / one / "status").read_text().split("TracerPid:")[1].split()[0] for one in os.listdir(tasks)]


while "0" in tracers():
    time.sleep(0.01)
try:
    print(ckpt.save(2, {"w": {"t": torch.full((20_000_000,), 2.0)}}).result(timeout_s=40).step)
except Exception as error:
    print(type(error).__name__)
ckpt.close()
tracer.wait(timeout=10)
