"""Draws mutants of a room of the package and runs the room's tests against each, until one fails.

    python -m mutants ROOM [--seed 1] [--count 50] [--limit-s SECONDS]

Each runs in a fork and a copy of the tree, against the tests that enter its line: a run without a mutant records them. What
only a process that a test started enters is not recorded. It prints a line for each mutant, and the difference of each that
survived: read these. Some change nothing that anybody sees; of the others each is a test that is missing. Exit status: 1 if
one survived.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants.change import Change, changes
from mutants.forked import Chosen, Record, Recorder, passes

ROOT = Path(__file__).parents[2]
SRC = Path("src/safe_ckpt")
_SAVING = ["tests/unit/saving/test_checkpointer.py", "tests/unit/saving/test_resume.py"]
# Which tests are those of a room. They are what is quick of it: see ``pytest --quick``.
ROOMS = {
    "core/home": ["tests/unit/home"],
    "core/saving": ["tests/unit/saving"],
    "core/resuming": [*_SAVING, "tests/unit/saving/test_starts.py", "tests/unit/saving/test_reading_frameworks.py"],
    "core/state": ["tests/unit/state", *_SAVING],
    "core/formats": ["tests/unit/formats", "tests/unit/tools/inspection", *_SAVING],
    "core/staging": ["tests/unit/staging", "tests/unit/test_cuda.py", *_SAVING],
    "core/storage": ["tests/unit/storage", "tests/unit/home/test_file_home.py"],
    "core/writer": ["tests/unit/writer", *_SAVING],
    "core/sharding": ["tests/unit/sharding", "tests/multirank/test_sharded.py"],
    "extensions": ["tests/unit/extensions", "tests/unit/saving"],
    "data": ["tests/unit/data"],
    "offload": ["tests/unit/offload", "tests/multirank/test_offload.py"],
}


def drawn(room: str, count: int, seed: int) -> list[tuple[Path, Change]]:
    """So many mutants of a room, by chance: every one of all its modules is as likely."""
    everything = []
    for path in sorted((ROOT / SRC / room).rglob("*.py")):
        name = path.relative_to(ROOT)
        everything += [(name, change) for change in changes(path.read_text(encoding="utf-8"))]
    print(f"{room}: {len(everything)} mutants, {min(count, len(everything))} drawn with the seed {seed}", flush=True)
    return random.Random(seed).sample(everything, min(count, len(everything)))


def copied(folder: Path) -> Path:
    """What git has of the tree, and what it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def noticing(record: Record, name: Path, change: Change) -> list[str]:
    """The tests that enter the statement, the quickest first: all, where the import of the module runs it."""
    module = str(name.relative_to(SRC))
    if not change.entered:
        return list(record)
    return [test for test, lines in record.items() if any(line in change.entered for line in lines.get(module, ()))]


def run(room: str, count: int, seed: int, limit_s: float | None) -> int:
    """Run them all. Returns how many survived."""
    mutants, survived = drawn(room, count, seed), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = copied(Path(scratch).resolve() / "tree")
        begun, written = time.monotonic(), Path(scratch) / "record.json"
        if not passes(tree, ROOMS[room], Recorder(tree / SRC, written), limit_s or 3600):
            sys.exit(f"the tests of {room} fail without a mutant")
        record, usual_s = json.loads(written.read_text()), time.monotonic() - begun
        print(f"without a mutant the {len(record)} tests take {usual_s:.0f} s, recorded", flush=True)
        for number, (name, change) in enumerate(mutants, 1):
            original = (ROOT / name).read_text(encoding="utf-8")
            (tree / name).write_text(change.source, encoding="utf-8")
            tests = noticing(record, name, change)
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            alive = not tests or passes(tree, files, Chosen(tests), limit_s or 60 + 3 * usual_s)
            (tree / name).write_text(original, encoding="utf-8")
            survived += alive
            end = f"SURVIVED {len(tests)} tests" if tests else "SURVIVED, no test enters it in its own process"
            print(f"{number:3} {end if alive else 'killed'}: {change.kind}, {name}:{change.line}", flush=True)
            if alive:
                lines = difflib.unified_diff(original.splitlines(), change.source.splitlines(), lineterm="", n=2)
                print("\n".join(list(lines)[2:]), flush=True)
    print(f"{room}, seed {seed}: {len(mutants) - survived} of {len(mutants)} were killed, {survived} survived")
    return survived


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("room", choices=sorted(ROOMS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument(
        "--limit-s", type=float, help="of one run of the tests; else three times what they take, and a minute"
    )
    asked = parser.parse_args()
    sys.exit(run(asked.room, asked.count, asked.seed, asked.limit_s) > 0)


if __name__ == "__main__":
    main()
