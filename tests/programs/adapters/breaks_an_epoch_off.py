"""Trains two ranks below FOLDER, once straight and once broken off in an epoch and resumed: both must see and end the same."""

import sys
from pathlib import Path

import torch
from lightning_program import CONFIG, pl
from lightning_runs import fingerprint, module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

folder = Path(sys.argv[1])


def go(name, seed, **settings):
    pl.seed_everything(1, verbose=False)
    module = module_class(pl)(loader=resumable)
    torch.manual_seed(seed)  # the sampler's own seed is that of the program
    callback = SafeCheckpointCallback(dirpath=folder / name, config=CONFIG, resume="auto", filename="{step}")
    trainer(pl, [callback], folder, strategy="ddp", devices=2, **settings).fit(module)
    return module


if __name__ == "__main__":
    straight = go("straight", 1)
    before, after = go("broken", 1, max_steps=3, max_epochs=-1), go("broken", 7)
    assert before.seen + after.seen == straight.seen, (before.seen, after.seen, straight.seen)
    assert (len(before.seen), len(straight.seen)) == (3, 6)
    assert fingerprint(after) == fingerprint(straight)
