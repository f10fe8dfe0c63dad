"""All kill points of ckpt-chaos, a package of others, against programs with ours: each goes on from its newest checkpoint."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support import program_path

pytest.importorskip("ckpt_chaos", reason="pip install ckpt-chaos")
NAMES = {
    "Checkpointer": "step-*",
    "Accelerate": "checkpoints/checkpoint_*",
    "Lightning": "step=*.ckpt",
    "Transformers": "checkpoint-*",
}


def crashed(folder, kind, whose):
    """What ckpt-chaos says of each of its kill points. Manifests vary in length: of ours the names of files are compared."""
    program = [sys.executable, str(program_path("saves_thrice_for_chaos")), kind, whose, "{out}"]
    command = [
        *(sys.executable, "-m", "ckpt_chaos", "run", "--modes", "before,torn", "--max-points", "100000", "--jobs", "2"),
        *("--checkpoint-glob", f"{{out}}/{NAMES[kind]}", "--step-regex", r"resumed from step (\d+)"),
        *("--result-file", "{out}.result", "--work", str(folder), *(["--ckpt-ignore-size"] if whose == "ours" else [])),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([*command, "--", *program], env=environment, capture_output=True, check=False, timeout=3500)
    from ckpt_chaos.runner import rejudge

    return [row for row in rejudge(Path(folder)) if not row.label.startswith("no crash")]


@pytest.mark.thorough  # each kill point is two starts of the framework
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", NAMES)
def test_no_kill_point_of_ckpt_chaos_harms_a_run(tmp_path, kind, matrix):
    """Whatever file it was about to make, and half of it: the same weights at the end, from the newest whole checkpoint."""
    rows = crashed(tmp_path / "chaos", kind, "ours")
    verdicts = Counter(row.verdict for row in rows)
    matrix("ckpt-chaos", kind, verdicts)
    assert [(row.label, row.verdict) for row in rows if row.verdict != "PASS"] == []
    assert verdicts["PASS"] >= 20
    assert all(row.crashed for row in rows)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_ckpt_chaos_finds_what_a_stock_save_loses(tmp_path):
    """``torch.save`` into the final name: the files that it tears end the resume, so the harness sees what it should."""
    rows = crashed(tmp_path / "chaos", "Checkpointer", "stock")
    assert {row.verdict for row in rows if "[torn]" in row.label} == {"HARD_FAIL"}
