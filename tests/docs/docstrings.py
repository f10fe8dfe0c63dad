"""Run examples of docstrings in this process, each in a folder of its own: ``python tests/docs/docstrings.py NAME...``.

An example begins with what ``_GIVEN`` has for its package, as the program around it would have. What the docstring shows as
output is compared as on a page. Prints what is wrong, and exits with 1 if anything is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from blocks import Block, blocks_of
from page import Page
from public import with_examples

_BEFORE = """
import os
import subprocess
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import safe_ckpt
from safe_ckpt import *
from safe_ckpt.data import resumable
from safe_ckpt.errors import SafeCheckpointError, SaveError
import pytest
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.extensions.record import RecordExtension
from safe_ckpt.testing import FaultyStorage, Kills, kills
from safe_ckpt.testing.contracts import *

torch.manual_seed(0)
rank = 0
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
dataset = TensorDataset(torch.randn(32, 4))
prepare_the_data = lambda: None


def train_one_step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


train_one_step(model, optimizer)
with Checkpointer("runs/exp") as ckpt:
    for step in (10, 20):
        state = {"model": model, "optimizer": optimizer, "rng": PerRank(RngState()), "step": step}
        ckpt.save(step, state, metrics={"loss": 10 / step})
os.makedirs("nvme")
Path("nvme/exp_avg.swp").write_bytes(bytes(4096))
"""
_GIVEN = {
    "adapters": """
from types import SimpleNamespace
from safe_ckpt.adapters import *

trainer = SimpleNamespace(save=lambda: print("saved by the trainer"))
""",
    "lightning": """
import warnings

warnings.simplefilter("ignore")  # Lightning's advice about this machine
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from safe_ckpt.lightning import *

module = BoringModel()
dataset = torch.randn(64, 32)
quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
""",
    "accelerate": """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safe_ckpt.accelerate import *
""",
    "transformers": """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from safe_ckpt.transformers import *

sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 17, (16, 8))]
args = TrainingArguments("runs/transformers", max_steps=2, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
""",
    "peft": """
import copy
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from safe_ckpt.peft import *

sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(**sizes))
tuned = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj"]))
""",
    "deepspeed": """
import deepspeed
from safe_ckpt.deepspeed import *

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
deepspeed.init_distributed("gloo")
ds_config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
""",
    "torchtitan": """
import importlib.util, sys, types

if importlib.util.find_spec("triton") is None:  # torchtitan imports kernels for GPUs
    kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep")
    kernels.combine_op = kernels.dispatch_op = kernels.init_buffer = kernels.MinimalAsyncEPDispatchMetadata = None
    sys.modules[kernels.__name__] = kernels
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from safe_ckpt.torchtitan import *
""",
    "ray": """
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from safe_ckpt.ray import *

def train(config):
    pass
""",
}


def package_of(name: str) -> str:
    """The package that an example belongs to; "" for the root and what lies beside it."""
    part = name.split(".")[1]
    return part if part in _GIVEN else ""


def problems_of(name: str, text: str) -> list[str]:
    """What is wrong with one example, in the working directory, which is empty."""
    page = Page(show=False)
    for code in (_BEFORE, _GIVEN.get(package_of(name), "")):
        exec(compile(code, "given", "exec"), page.namespace)
    blocks: list[Block] = blocks_of(f"{name}.md", text)
    for block in blocks:
        page.run(block)
    return page.problems


def main(names: list[str]) -> int:
    """Run the examples of these."""
    examples: dict[str, Any] = with_examples()
    problems: list[str] = []
    home = Path(tempfile.mkdtemp(dir=os.getcwd()))
    for number, name in enumerate(names):
        folder = home / str(number)
        folder.mkdir()
        os.chdir(folder)
        problems += problems_of(name, examples[name])
    print("\n\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
