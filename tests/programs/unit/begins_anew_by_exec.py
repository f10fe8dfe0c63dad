"""Resumes from FOLDER, prints what, saves, and begins anew by an exec so many TIMES, without closing."""

import os
import sys

import torch

from safe_ckpt import Checkpointer

folder, times = sys.argv[1], int(sys.argv[2])
ckpt = Checkpointer(folder)
state = {"w": {"t": torch.ones(10)}}
info = ckpt.resume(state)
print(info.step if info else None, flush=True)
ckpt.save(10 - times, state).result()
if times:
    os.execv(sys.executable, [sys.executable, __file__, folder, str(times - 1)])
ckpt.close()
