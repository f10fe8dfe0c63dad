"""``make gpu-check``, which has no GPU here: that it says so, and that its checks find what they look for, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).parents[2] / "benchmarks/gpu/check.py"


def check(*arguments):
    command = [sys.executable, str(CHECK), *map(str, arguments)]
    return subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_says_so_and_succeeds(tmp_path):
    """One line, no error, nothing measured."""
    done = check("--folder", tmp_path)
    assert (done.returncode, done.stdout) == (0, "no GPU\n")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_checks_of_gpu_check_run_on_a_cpu(tmp_path):
    """Each has a row: a save behind which the optimizer steps at once, a killed run; what needs a GPU is skipped by name."""
    names = ["gate: overlapped", "copies: pinned", "kill and resume: plain"]
    done = check("--device", "cpu", "--folder", tmp_path, *(part for name in names for part in ("--only", name)))
    assert done.returncode == 0, done.stdout
    rows = {row["check"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(names, "passed") | {names[1]: "skipped"}
    assert "bit for bit" in rows[names[2]]["text"]


@pytest.mark.slow
def test_gpu_check_refuses_a_name_that_is_no_check(tmp_path):
    """With the names that there are."""
    done = check("--device", "cpu", "--folder", tmp_path, "--only", "gates")
    assert done.returncode == 2
    assert "gate: eager" in done.stdout
