"""Trains a net of WIDTH in FOLDER up to EPOCHS, from its newest checkpoint on, saves at each step and says so."""

import sys

from accelerate import DistributedDataParallelKwargs
from accelerate_rank import say

from accelerate_runs import CONFIG, Training, make, stateful
from safe_ckpt.accelerate import register
from safe_ckpt.errors import NoValidCheckpointError

folder, width, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# DDP puts its buckets into another order after the first step of a process, and sums of three ranks or more differ by the
# order. With unused parameters it does not.
ordered = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = make(folder, limit=2, dataloader_config=stateful(), kwargs_handlers=[ordered])
register(accelerator, CONFIG)
training = Training(accelerator, width=width)
try:
    accelerator.load_state()
except NoValidCheckpointError:
    say("FRESH")
steps = len(training.loader)
begin = training.counter.count
say("BEGIN", begin)


def saved(count):
    accelerator.save_state(step=count)
    say("SAVED", count)


for epoch in range(begin // steps, epochs):
    training.loader.set_epoch(epoch)
    training.epoch(saved)
say("END", training.fingerprint(), training.counter.count)
accelerator.end_training()
