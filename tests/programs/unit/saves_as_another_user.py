"""Becomes USER in the group 2000, resumes from FOLDER and saves twice more; prints the last step."""

import os
import sys

import torch

import safe_ckpt.core.saving.engine
import safe_ckpt.core.writer.sink  # noqa: F401 - all of it while this user may read the interpreter
from safe_ckpt import Checkpointer

folder, user = sys.argv[1], int(sys.argv[2])
os.setgroups([])
os.setgid(2000)
os.setuid(user)
os.umask(0o002)
model = torch.nn.ModuleDict({"frozen": torch.nn.Linear(600, 600), "head": torch.nn.Linear(3, 3)})
model["frozen"].requires_grad_(False)
for tensor in model["frozen"].parameters():
    tensor.zero_()
with Checkpointer(folder) as ckpt:
    info = ckpt.resume({"model": model})
    begin = info.step if info else 0
    for step in (begin + 1, begin + 2):
        ckpt.save(step, {"model": model}).result(timeout_s=60)
print(begin + 2)
