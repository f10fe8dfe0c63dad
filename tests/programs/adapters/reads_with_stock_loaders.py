"""Reads below FOLDER, without safe_ckpt, a Llama of SIZES (JSON) that it saved: every loader must give the same bytes."""

# ruff: noqa: E402
import sys

sys.modules["safe_ckpt"] = None  # as if it were not installed
import json
import warnings

warnings.filterwarnings("ignore")
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import load_checkpoint_in_model
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

folder, sizes = Path(sys.argv[1]), json.loads(sys.argv[2])
expected = torch.load(folder / "expected.pt", weights_only=True)


def check(state):
    assert all(torch.equal(state[name], value) for name, value in expected.items()), "other bytes"


saved = folder / "run/step-00000003"
found = {}
for file in saved.glob("model-*.safetensors"):
    with safe_open(file, "pt") as opened:
        found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - it is no dict
check(found)
model = LlamaForCausalLM(LlamaConfig(**sizes))
load_checkpoint_in_model(model, str(saved))
check(model.state_dict())
(saved / "config.json").write_text(LlamaConfig(**sizes).to_json_string())
check(LlamaForCausalLM.from_pretrained(saved).state_dict())
state = torch.load(saved / "optimizer.pt", weights_only=True)
assert state["state"], "an optimizer's state"
read = {name: torch.zeros_like(value) for name, value in expected.items()}
dcp.load({"model": read}, checkpoint_id=folder / "sharded/step-00000003", no_dist=True)
check(read)
assert not [name for name in sys.modules if name.startswith("safe_ckpt.")]
