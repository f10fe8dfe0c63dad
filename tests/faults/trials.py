"""Starting sweep.py under FaultyStorage, and reading what it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safe_ckpt.testing import FaultyStorage

SWEEP = Path(__file__).with_name("sweep.py")
# What continuous integration goes through in samples, `make faults` goes through whole.


def sampled(cases, chosen):
    """All cases as parameters; those for whose number ``chosen`` is false are for thorough runs."""
    return [
        pytest.param(*case, marks=[] if chosen(number) else [pytest.mark.thorough]) for number, case in enumerate(cases)
    ]


def sweep(folder, scenario, fault, *, first=1, step=1, timeout_s=600):
    """One dict per trial. The first one counted the operations without a fault."""
    storage = FaultyStorage(folder / "kit")
    command = [
        sys.executable,
        str(SWEEP),
        str(folder / "kit"),
        str(folder / "exp"),
        scenario,
        fault,
        str(first),
        str(step),
    ]
    environment = {**os.environ, **storage.environment, "RES_OPTIONS": "timeout:1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment, start_new_session=True
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def records(folder, names):
    """Scenario -> the folder with what was recorded of its save. One process makes them all: to start takes it longer."""
    sweep(folder, "|".join(names), "record")
    return {name: folder / "exp" / str(number) for number, name in enumerate(names)}
