"""What the documentation counts is run by some target: ``make test-thorough`` and ``make faults`` have one switch."""

import ast
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


NAMES = re.compile(r"`(test_\w+)`")


def promises():
    """The rows of the guarantees: the names of each one's tests."""
    rows = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").splitlines()
    return [names for row in rows if row.startswith("| ") and (names := NAMES.findall(row.split(" | ")[-1]))]


def files_of(names):
    """The files that define tests of these names."""
    defined = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if not names.isdisjoint(defined.findall(path.read_text(encoding="utf-8")))
    )


def of_own_environments():
    """The tests of ``make test-deepspeed``, ``-torchtitan`` and ``-ray``, which this one cannot import, but those marked."""
    files = [file for word in ("deepspeed", "torchtitan", "ray") for file in (ROOT / "tests").rglob(f"test_{word}*.py")]
    return {
        node.name
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and "pytest.mark.thorough" not in map(ast.unparse, node.decorator_list)
    }


def collected(*options):
    """The node ids that pytest collects."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SAFE_CKPT_THOROUGH"))
        },
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


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
    lines = collected("--all", *files)
    for said, (page, file, test, count) in COUNTED.items():
        assert said in (ROOT / page).read_text(encoding="utf-8"), said
        found = [line for line in lines if line.startswith(file) and test in line]
        assert len(found) == count, (said, lines[-20:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_promise_keeps_a_test_without_the_switch():
    """What is marked thorough leaves at least one case of one test of each row of the guarantees to ``make test-full``."""
    rows = promises()
    assert len(rows) >= 60
    names = {name for row in rows for name in row}
    ran = {line.partition("::")[2].partition("[")[0] for line in collected(*files_of(names))}
    assert len(ran & names) > 100
    ran |= of_own_environments()
    assert [row for row in rows if ran.isdisjoint(row)] == []
