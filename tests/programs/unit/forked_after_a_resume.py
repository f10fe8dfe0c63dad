"""A process that is forked after a resume from FOLDER changes an optimizer's tensor: prints whether ours stays as it was."""

import os
import sys

import torch

from safe_ckpt import Checkpointer

weight = torch.nn.Parameter(torch.ones(1 << 16))
optimizer = torch.optim.Adam([weight])
weight.sum().backward()
optimizer.step()
with Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, {"optimizer": optimizer}).result()
    ckpt.resume({"optimizer": optimizer})
before = optimizer.state[weight]["exp_avg"].clone()
if (child := os.fork()) == 0:
    torch.set_num_threads(1)  # as a DataLoader's worker does: OpenMP's threads do not survive a fork
    optimizer.state[weight]["exp_avg"].fill_(123)
    os._exit(0)
os.waitpid(child, 0)
print(bool(optimizer.state[weight]["exp_avg"].equal(before)))
