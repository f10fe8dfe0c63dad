"""What the documentation counts is run by some target: ``make test-thorough`` and ``make faults`` have one switch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a page says -> the page, the tests, and how many of them there are with --all.
COUNTED = {
    "200 random programs": (
        "docs/guarantees.md",
        "tests/unit/saving/test_unchanged.py",
        "whatever_a_program_does",
        200,
    ),
    "20,200 saves in each mode": (
        "docs/guarantees.md",
        "tests/faults/test_never_torn.py",
        "changed_after_each_of_thousands",
        8,
    ),
    "30 random combinations": ("docs/guarantees.md", "tests/multirank/test_sharded.py", "four_ranks_save_and_die", 1),
}


def recipe(target):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)[1]


def test_the_targets_have_one_switch():
    """Nothing else than ``--all`` tells a whole sweep from a sample, and both targets give it."""
    assert "MORE=--all" in recipe("test-thorough")
    assert "--all" in recipe("faults")
    others = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if "SAFE_CKPT_THOROUGH" in path.read_text(encoding="utf-8")
    ]
    assert sorted(others) == [
        "tests/kit/thorough.py",
        "tests/unit/test_thorough.py",
    ]


@pytest.mark.slow
def test_every_count_of_the_pages_is_collected():
    """With the switch, the tests that a page counts are there, as many as it says."""
    files = sorted({file for _, file, _, _ in COUNTED.values()})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--all", "--collect-only", "-q", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    for said, (page, file, test, count) in COUNTED.items():
        assert said in (ROOT / page).read_text(encoding="utf-8"), said
        found = [line for line in done.stdout.splitlines() if line.startswith(file) and test in line]
        assert len(found) == count, (said, done.stdout[-2000:])
