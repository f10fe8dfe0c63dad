"""SIGKILL of a whole job at random moments, again and again."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import job
import pytest

from kit import warm
from kit.patience import wait_until
from kit.thorough import THOROUGH
from support import kill_group, writer_processes

JOB = Path(__file__).with_name("job.py")


def run_and_kill(folder, number, saves, seconds):
    """Start the job, kill it ``seconds`` after it has begun its n-th save. Returns the lines that it said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.tensor", "torch.distributed.checkpoint", "safe_ckpt.checkpointer"]
    )
    lines = folder / f"lines{number}"
    arguments = (folder / "exp", str(folder / f"store{number}"), str(lines), dict(os.environ))
    process = context.Process(target=job.lead, args=arguments)
    process.start()
    deadline, ready = time.monotonic() + 60, None
    while process.is_alive() and time.monotonic() < (deadline if ready is None else ready + seconds):
        time.sleep(0.002)
        if ready is None and lines.exists() and lines.read_bytes().count(b"SAVING") >= saves:
            ready = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(timeout=30)
    *whole, _ = lines.read_bytes().split(b"\n")
    return [line.decode() for line in whole]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_a_two_rank_job_lose_no_announced_checkpoint(tmp_path):
    """SIGKILLs of a two-rank job that saves 64 MiB without pause, with keep_last=1: 4 of them, 100 in ``make faults``.

    Every restart finds a checkpoint that verifies, is equal in every byte, and is not older than the last one that was
    reported committed; no pending directory, trash or process is left after it.
    """
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    trials = int(os.environ.get("SAFE_CKPT_KILLS", "100" if THOROUGH else "4"))
    chance = random.Random(seed)
    committed, within = 0, 0
    for trial in range(trials + 1):
        lines = run_and_kill(tmp_path, trial, chance.randint(1, 3), chance.random() * 0.25)
        pending = tmp_path / "exp/.safe_ckpt/pending"
        within += pending.is_dir() and any(pending.iterdir())
        where = f"seed {seed}, trial {trial}: {lines}"
        assert not [line for line in lines if line.startswith("ERROR")], where
        assert "LEFT 0 0" in lines, where
        resumed = {int(line.split()[2]) for line in lines if line.startswith("RESUMED")}
        assert len(resumed) == 1, where
        (step,) = resumed
        assert step >= committed, f"{where}: {step} is older than {committed}, which was reported committed"
        committed = max([step, *(int(line.split()[1]) for line in lines if line.startswith("COMMITTED"))])
    print(f"seed {seed}: {trials} kills, {within} of them within a save, {committed} steps saved")
    assert committed >= trials / 5, f"seed {seed}: hardly anything was saved ({committed} steps)"
    assert within >= trials / 10, f"seed {seed}: hardly a kill came within a save ({within})"
    wait_until(lambda: not writer_processes(), what="the end of all writers")


def test_a_killed_parent_takes_its_writer_along(tmp_path):
    """SIGKILL of the job alone: its writer processes end by themselves within seconds."""
    command = [sys.executable, str(JOB), str(tmp_path / "exp"), "0", "1", str(tmp_path / "store")]
    process = warm.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        while not process.stdout.readline().startswith(b"COMMITTED"):
            pass
        writers = writer_processes()
        assert writers
        process.kill()
        process.wait()
        wait_until(lambda: not set(writers) & set(writer_processes()), 5, "the end of the writers")
    finally:
        kill_group(process)
        process.stdout.close()
