"""Saves three times with Accelerate into FOLDER, named by it ("automatic") or by the program, says so and lives on."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from safe_ckpt.accelerate import register

folder, automatic = sys.argv[1], sys.argv[2] == "automatic"
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=automatic))
accelerator.prepare(torch.nn.Linear(2, 2))
with register(accelerator) as handle:
    for step in range(3):
        accelerator.save_state(**({} if automatic else {"output_dir": f"{folder}/checkpoint_{step}"}))
    handle.wait()
    print("saved", flush=True)
    sys.stdin.read()
