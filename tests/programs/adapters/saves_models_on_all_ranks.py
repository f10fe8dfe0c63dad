"""Saves state, a model in shards, and a model beside both in FOLDER: says the files and names that are there."""

import os
import sys
from pathlib import Path

import torch
from accelerate_rank import rank, say

from accelerate_runs import CONFIG, Training, make, stateful
from safe_ckpt.accelerate import register

folder = Path(sys.argv[1])
accelerator = make(None, dataloader_config=stateful())
handle = register(accelerator, CONFIG)
training = Training(accelerator, number=rank, num_workers=1)
training.epoch()
accelerator.save_state(folder / "state", async_save=False)
path = accelerator.save_model(training.head, folder / "weights", max_shard_size="20B")
say(sorted(os.listdir(path)))
accelerator.save_model(training.head, folder, safe_serialization=False)
say(sorted(os.listdir(folder)), sorted(torch.load(folder / "pytorch_model.bin")))
accelerator.end_training()
