"""SIGKILL of jobs that save by way of Fabric's plugin, and of jobs beside which others load."""

import pytest
import torch
from kills import killed

import safe_ckpt
from safe_ckpt.errors import NoValidCheckpointError

FABRIC = """
import sys, os, torch
from lightning.fabric import Fabric
from safe_ckpt.lightning import SafeCheckpointIO
fabric = Fabric(accelerator="cpu", devices=1, plugins=[SafeCheckpointIO()])
fabric.launch()
path, state = sys.argv[1], {"step": 0, "w": torch.zeros(1 << 18)}
if os.path.exists(path):
    fabric.load(path, state)
assert state["w"].unique().tolist() == [float(state["step"])]
print("BEGUN", state["step"], flush=True)
while True:
    state["step"] += 1
    state["w"].fill_(state["step"])
    fabric.save(path, state)
    print("DONE", state["step"], flush=True)
"""
CHECKPOINTER = """
import sys, torch
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
state = {"step": 0, "w": {"w": torch.zeros(1 << 18)}}
with Checkpointer(sys.argv[1], CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
    ckpt.resume(state)
    print("BEGUN", state["step"], flush=True)
    while True:
        state["step"] += 1
        state["w"]["w"].fill_(state["step"])
        ckpt.save(state["step"], state).result()
        print("DONE", state["step"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_lose_nothing_that_fabric_saved(tmp_path):
    """One file that ``fabric.save`` replaces again and again is whole after each of 6 SIGKILLs (20), and never an older one."""
    path = tmp_path / "run/last.ckpt"
    for which, announced in killed(FABRIC, path):
        found = torch.load(path) if path.exists() else {"step": 0, "w": torch.zeros(1)}
        assert found["step"] >= announced, which
        assert found["w"].unique().tolist() == [float(found["step"])], which


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_killed_jobs_leave_is_loaded_whole(tmp_path):
    """``safe_ckpt.load`` after each of 6 SIGKILLs (20), before any job has cleaned up: the newest announced one, or a newer."""
    for which, announced in killed(CHECKPOINTER, tmp_path / "run"):
        state = {"step": 0, "w": {"w": torch.zeros(1 << 18)}}
        try:
            info = safe_ckpt.load(tmp_path / "run", state)
        except NoValidCheckpointError as error:
            if announced or error.rejected:
                raise
        else:
            assert info.step == state["step"] >= announced, which
            assert state["w"]["w"].unique().tolist() == [float(info.step)], which
