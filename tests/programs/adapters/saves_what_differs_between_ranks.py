"""Tries saves in FOLDER in which the ranks differ: paths, sizes, hooks and places of a loader. Says each error."""

import os
import sys
import time
from pathlib import Path

from accelerate_rank import rank, say

from accelerate_runs import CONFIG, Training, make, stateful
from safe_ckpt import SafeCheckpointError
from safe_ckpt.accelerate import register

folder = Path(sys.argv[1])
accelerator = make(None, dataloader_config=stateful())
handle = register(accelerator, CONFIG)
training = Training(accelerator)


def attempt(*args):
    begun = time.monotonic()
    try:
        accelerator.save_state(*args, async_save=False)
    except Exception as error:
        say(type(error).__name__, "mine" in str(error), time.monotonic() - begun < 10)


attempt(folder / f"mine{rank}")
for call, *given in (
    (accelerator.save_state, folder / f"mine{rank}"),
    (accelerator.save_model, training.net, folder / f"mine{rank}"),
    (accelerator.save_model, training.net, folder / "weights", "big"),
):
    try:
        call(*given)
    except SafeCheckpointError as error:
        say(type(error).__name__, str(error).rpartition(": ")[2])


def hook(models, weights, output_dir):
    (Path(output_dir) / f"extra{rank}.txt").write_text("x")
    if rank == 1 and broken:
        raise KeyError("mine")


broken = True
removable = accelerator.register_save_state_pre_hook(hook)
attempt(folder / "a")
broken = False
attempt(folder / "a")
say(sorted(name for name in os.listdir(folder / "a") if name.startswith(("extra", "random"))))
removable.remove()
for number, _ in enumerate(training.loader):
    if number == rank:
        attempt(folder / "mine")
accelerator.end_training()
