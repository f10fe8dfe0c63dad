"""Starts histories in processes of their own, as the tests need them."""

import os
import re
import sys
from pathlib import Path

from kit import warm

TESTS = Path(__file__).parents[1]


def sim(*arguments):
    """Run ``python -m sim`` with these."""
    return _run("-m", "sim", *map(str, arguments))


def share_of_saves_that_succeed(ended):
    """How many of the saves of the histories that a ``sim`` was asked for end "ok", as a part of all."""
    (told,) = re.findall(r"^outcomes: (.*)$", ended.stdout, re.MULTILINE)
    outcomes = {kind: int(count) for kind, count in re.findall(r"(\w+) (\d+)", told)}
    return outcomes["ok"] / sum(outcomes.values())


def violations_of(name, seed):
    """How many violations a history has with a planted bug, and without."""
    code = "from sim import history, planted; from sim.loader import Slots\n"
    code += f"bad, seed = planted.PLANTED[{name!r}], {seed}\n"
    code += "print(*(len(history.run(seed, slots).violations) for slots in (Slots(bad), Slots())))"
    ended = _run("-c", code)
    ended.check_returncode()
    with_bug, without = map(int, ended.stdout.split()[-2:])
    return with_bug, without


def found_by_its_seed(name, seed):
    """With the planted bug that history violates a rule, and without it none."""
    with_bug, without = violations_of(name, seed)
    assert with_bug > 0
    assert without == 0


def _run(*arguments):
    # One thread: which thread of the system's comes first is no choice of a seed, and a history must come again.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONOPTIMIZE", None)
    command = [sys.executable, *arguments]
    return warm.run(command, cwd=TESTS, env=environment, capture_output=True, text=True)
