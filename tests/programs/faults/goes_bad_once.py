"""Trains below FOLDER; a number goes bad at a step that SEED says, once; AFTER_S seconds later SIGKILL, if that is not 0."""

import math
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Health, Retention

folder, seed, after_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
chance = random.Random(seed)
at, marker = chance.randint(5, 60), folder.with_suffix(".struck")
torch.manual_seed(0)
net = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
state = {"net": net, "optimizer": optimizer}
config = CheckpointConfig(retention=Retention(keep_last=2), health=Health(action="stop"))
if after_s:
    threading.Thread(target=lambda: (time.sleep(after_s), os.kill(os.getpid(), 9)), daemon=True).start()
with Checkpointer(folder, config) as ckpt:
    info = ckpt.resume(state)
    for step in range(info.step if info else 0, 80):
        if step >= at and not marker.exists():
            marker.touch()
            target = chance.choice([net.weight.data, net.bias.data, *optimizer.state[net.weight].values()])
            target.view(-1)[0] = chance.choice([math.nan, math.inf])
        net(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1, state)
assert all(tensor.isfinite().all() for tensor in net.state_dict().values())
assert all(value.isfinite().all() for one in optimizer.state.values() for value in one.values())
