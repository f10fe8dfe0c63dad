"""What ``make test-full`` says of tests that fail beside others and pass alone."""

import subprocess
import sys
from pathlib import Path

import pytest

TWICE = Path(__file__).parents[1] / "kit/twice.py"
ONCE = """
import pathlib

def test_race():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        print("what it was about to do")
        raise ValueError("a damaged digest")

def test_other():
    pass
"""


def run(root, where):
    (root / where).mkdir(parents=True)
    (root / where / "test_race.py").write_text(ONCE)
    words = [sys.executable, str(TWICE), "-q", "-n", "1", where]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["tests/faults", "tests/multirank"])
def test_a_fault_that_shows_itself_once_is_a_finding(tmp_path, where):
    """A test of tests/faults that fails once is printed with its log, and the command fails; others may pass alone."""
    done = run(tmp_path, where)
    assert "run once more, one at a time" in done.stdout
    assert "1 passed" in done.stdout
    if where == "tests/faults":
        assert done.returncode == 1, done.stdout + done.stderr
        finding = done.stdout.partition("FINDING: tests.faults.test_race::test_race")[2]
        assert "a damaged digest" in finding
        assert "what it was about to do" in finding
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FINDING" not in done.stdout
