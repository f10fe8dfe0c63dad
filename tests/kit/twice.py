"""``python tests/kit/twice.py OPTIONS PATHS``: pytest, and what failed once more, one at a time.

A test that fails beside others and passes alone may have met the limits of the machine: then the run is green. A test of
``tests/faults`` fails at random where a race is, and passes alone. It is printed as a finding with its log, and the run fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

FAULTS = "tests/faults/"
_MOST_AT_ONCE = 5  # of the second run: more than these are no accident


def main(options: Sequence[str]) -> int:
    """Run pytest with ``options``. Returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first.xml"
        pytest = [sys.executable, "-m", "pytest"]
        status = subprocess.run([*pytest, "--cache-clear", f"--junitxml={first}", *options], check=False).returncode
        if status != 1:  # all passed, or it could not run
            return status
        print("what failed is run once more, one at a time", flush=True)
        alone = ["--last-failed", "--last-failed-no-failures=none", f"--maxfail={_MOST_AT_ONCE}", "-n", "0"]
        status = subprocess.run([*pytest, *options, *alone], check=False).returncode
        found = failures(first, FAULTS)
    for name, log in found.items():
        print(
            f"\n=== FINDING: {name} failed. A fault that shows itself at random is no accident of the machine. Its log:\n{log}"
        )
    if found:
        print(f"\n{len(found)} finding(s) in {FAULTS}: this run is not green", flush=True)
    return status or bool(found)


def failures(report: Path, below: str) -> Mapping[str, str]:
    """Test -> its log, of those in files ``below`` a folder that failed, from pytest's JUnit report."""
    package = below.rstrip("/").replace("/", ".") + "."
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error")]
        if bad and case.get("classname", "").startswith(package):
            told = [part.text or "" for part in case if part.tag in ("failure", "error", "system-out", "system-err")]
            found[f"{case.get('classname')}::{case.get('name')}"] = "\n".join(told)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
