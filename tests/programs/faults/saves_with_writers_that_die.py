"""Saves to FOLDER while every writer process ends at its start: prints the step."""

import logging
import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, WriterConfig
from safe_ckpt.core.writer import workers

logging.basicConfig()
workers._BOOT = "import os; os._exit(3)"
with Checkpointer(sys.argv[1], CheckpointConfig(writer=WriterConfig(inline_bytes=0))) as ckpt:
    print(ckpt.save(1, {"m": {"w": torch.ones(100_000)}}).result().step)
