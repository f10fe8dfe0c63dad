"""SIGKILL of a job that saves with ``safe_ckpt.dcp`` in the background, at random moments, again and again."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as stock

from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, dcp
from safe_ckpt.errors import NoValidCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's own, which reads what ours saved
JOB = """
import sys, torch
from safe_ckpt import Retention, dcp
from safe_ckpt.errors import NoValidCheckpointError
directory = sys.argv[1]
dcp.configure(retention=Retention(keep_last=1))
state = {"step": 0, "deep": {"tensor": torch.zeros(1 << 18)}}
try:
    dcp.load(state, checkpoint_id=directory)
except NoValidCheckpointError as error:
    if error.rejected:
        raise
assert state["deep"]["tensor"].unique().tolist() == [float(state["step"])]
print("BEGUN", state["step"], flush=True)
upload = None
while True:
    state["step"] += 1
    state["deep"]["tensor"].fill_(state["step"])
    before, upload = upload, dcp.async_save(state, checkpoint_id=f"{directory}/step-{state['step']}")
    if before is not None:
        before.result()
        print("DONE", state["step"] - 1, flush=True)
"""


def _newest(directory):
    state = {"step": 0, "deep": {"tensor": torch.zeros(1 << 18)}}
    try:
        dcp.load(state, checkpoint_id=directory)
    except NoValidCheckpointError as error:
        if error.rejected:
            raise
    return state["step"], state["deep"]["tensor"].unique().tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_lose_nothing_that_was_saved(tmp_path):
    """6 SIGKILLs with keep_last=1, 20 in ``make faults``: what was announced is there, and stock reads what has a name."""
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    chance, announced, run = random.Random(seed), 0, tmp_path / "run"
    for trial in range(20 if THOROUGH else 6):
        job = subprocess.Popen([sys.executable, "-c", JOB, run], stdout=subprocess.PIPE, text=True)
        try:
            begun = int(job.stdout.readline().split()[1])
            assert begun >= announced, f"seed {seed}, trial {trial}: it went back to {begun} from {announced}"
            done = [job.stdout.readline() for _ in range(chance.randint(0, 3))]
            time.sleep(chance.random() * 0.15)  # the moment of the kill
        finally:
            job.send_signal(signal.SIGKILL)
        rest, _ = job.communicate(timeout=30)
        done += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        announced = max([begun, announced, *(int(line.removeprefix("DONE")) for line in done)])
        step, values = _newest(run)
        assert step >= announced, f"seed {seed}, trial {trial}"
        assert values == [float(step)], f"seed {seed}, trial {trial}"
        for folder in run.glob("step-*"):
            state = {"step": 0, "deep": {"tensor": torch.zeros(1 << 18)}}
            stock.load(state, checkpoint_id=folder, no_dist=True)
            assert state["deep"]["tensor"].unique().tolist() == [float(state["step"])], f"seed {seed}, trial {trial}"
    dcp.configure(CheckpointConfig())
    dcp.save({"step": 0}, checkpoint_id=run / "last")
    left = list((run / ".safe_ckpt").rglob("pending/*"))
    assert not left, f"seed {seed}: something was left over: {left}"
