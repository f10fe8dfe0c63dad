"""How many files of the package a save and a resume go through: who reads one must open so many."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST = {"save": 52, "resume": 36, "changes of room": 220}
"""A resume may enter up to three more than the 33 that it needs, when the writer of the next saves comes up before its end."""


@pytest.mark.timeout(200)
def test_a_save_and_a_resume_enter_no_more_files_than_before():
    """``benchmarks/trace_save.py`` has the aims and prints the files. Whoever lowers a number writes it here."""
    command = [sys.executable, str(ROOT / "benchmarks" / "trace_save.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    entered = json.loads(done.stdout)
    assert {what: entered[what] for what in MOST if entered[what] > MOST[what]} == {}
