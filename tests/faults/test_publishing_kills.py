"""SIGKILL of a job that publishes with a saver of its own, at random moments, again and again."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import safe_ckpt
from kit.thorough import THOROUGH

JOB = """
import sys, torch, safe_ckpt
from safe_ckpt import CheckpointConfig, Retention
directory = sys.argv[1]
newest = safe_ckpt.newest(directory)
step = newest.step if newest is not None else 0
print("BEGUN", step, flush=True)
while True:
    step += 1
    with safe_ckpt.publishing(directory, step, config=CheckpointConfig(retention=Retention(keep_last=1))) as folder:
        for part in range(4):
            (folder / "deep").mkdir(exist_ok=True)
            torch.save(torch.full((1 << 18,), float(step)), folder / "deep" / f"{part}.pt")
    print("DONE", step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_lose_nothing_that_was_published(tmp_path):
    """6 SIGKILLs with keep_last=1, 20 in ``make faults``: what was announced is there, whole, and nothing torn is seen."""
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    chance, announced = random.Random(seed), 0
    for trial in range(20 if THOROUGH else 6):
        job = subprocess.Popen([sys.executable, "-c", JOB, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
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
        newest = safe_ckpt.newest(tmp_path / "run")
        assert (newest.step if newest is not None else 0) >= announced, f"seed {seed}, trial {trial}"
        if newest is not None:
            for part in range(4):
                found = torch.load(newest.path / "deep" / f"{part}.pt")
                assert found.unique().tolist() == [float(newest.step)], f"seed {seed}, trial {trial}"
    with safe_ckpt.publishing(tmp_path / "run", 10_000):
        pass
    assert not (tmp_path / "run/.safe_ckpt/pending").exists(), f"seed {seed}: something was left over"
