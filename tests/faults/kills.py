"""A job that is begun and killed at random moments, again and again; what it announced must be there each time."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from kit import warm
from kit.thorough import THOROUGH
from support import program_path

TRIALS = 20 if THOROUGH else 6


def killed(job: str, *args: Any) -> Iterator[tuple[str, int]]:
    """Begin a job, let it announce up to three saves, kill it a moment later; that 6 times, 20 in ``make faults``.

    Args:
        job: the name of a program in tests/programs. It prints ``BEGUN n`` when it has resumed from step n, and ``DONE n`` when
            step n is saved.
        args: its arguments.

    Yields:
        After each kill: which one it was, for messages, and the newest step that was announced so far.
    """
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    chance, announced = random.Random(seed), 0
    for trial in range(TRIALS):
        which = f"seed {seed}, trial {trial}"
        command = [sys.executable, "-W", "ignore", str(program_path(job)), *map(str, args)]
        process = warm.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            begun = int(process.stdout.readline().split()[1])
            assert begun >= announced, f"{which}: it went back to {begun} from {announced}"
            done = [process.stdout.readline() for _ in range(chance.randint(0, 3))]
            time.sleep(chance.random() * 0.15)  # the moment of the kill
        finally:
            process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=30)
        done += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        announced = max([begun, announced, *(int(line.removeprefix("DONE")) for line in done)])
        yield which, announced
