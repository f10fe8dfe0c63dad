"""Draws mutants of a room of the package and runs the room's tests against each, until one fails.

    python -m mutants ROOM [--seed 1] [--count 50] [--only NUMBER ...]

Each runs in a fork and a copy of the tree, against the tests that enter its line: a run without a mutant records them. What
only a process that a test started enters is not recorded: where few enter it, a few tests that start a writer, or enter most of
the module, are run, too. It prints a line for each mutant, and the difference of each that survived: read these. Some change
nothing that anybody sees; of the others each is a test that is missing. Exit status: 1 if one survived.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import hashlib
import importlib.util
import itertools
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mutants.change import Change, changes
from mutants.forked import Chosen, End, Record, Recorder, tested

ROOT = Path(__file__).parents[2]
SRC = Path("src/safe_ckpt")
_MOST_FAILED = 5  # more are no accident of the machine
_STARTS_A_WRITER, _SAVING_TESTS = "core/writer/workers.py", 8
_NEAR_TESTS = 24
_SAVING = ["tests/unit/saving/test_checkpointer.py", "tests/unit/saving/test_resume.py"]
# Which tests are those of a room. They are what is quick of it: see ``pytest --quick``.
ROOMS = {
    "core/home": [
        "tests/unit/home",
        "tests/unit/saving/test_commit_order.py",
        "tests/unit/saving/test_failing_saves.py",
        "tests/unit/saving/test_mirror.py",
        "tests/unit/saving/test_mirror_behind.py",
        "tests/unit/saving/test_objects_in_memory.py",
        "tests/unit/saving/test_paths_that_mean_something_else.py",
        "tests/unit/tools/cli/test_standing.py",
        "tests/unit/tools/cli/test_unlock.py",
        "tests/unit/tools/inspection/test_listing.py",
        *_SAVING,
    ],
    "core/saving": [
        "tests/unit/saving",
        "tests/multirank/test_set_up_directory.py",
        "tests/unit/staging",
        "tests/unit/state/test_overlap.py",
        "tests/unit/state/test_overlap_detector.py",
        "tests/unit/writer/test_closing.py",
    ],
    "core/resuming": [
        "tests/unit/saving",
        "tests/unit/adapters/test_newest.py",
        "tests/unit/state/test_one_rank_of_a_group.py",
        "tests/unit/storage/test_host_cache.py",
        "tests/unit/tools/cli/test_stores.py",
    ],
    "core/state": [
        "tests/unit/state",
        "tests/unit/saving/test_as_it_was.py",
        "tests/unit/saving/test_trained.py",
        "tests/unit/saving/test_unchanged.py",
        *_SAVING,
    ],
    "core/formats": [
        "tests/unit/formats",
        "tests/unit/adapters/test_pickles.py",
        "tests/unit/state/test_changing.py",
        "tests/unit/state/test_planner.py",
        "tests/unit/saving/test_unchanged.py",
        "tests/unit/tools/inspection",
        "tests/unit/saving/test_as_it_was.py",
        *_SAVING,
    ],
    "core/staging": ["tests/unit/staging", *_SAVING],
    "core/storage": ["tests/unit/storage", "tests/unit/home/test_file_home.py"],
    "core/writer": ["tests/unit/writer", *_SAVING],
    "core/sharding": ["tests/unit/sharding", "tests/multirank/test_sharded.py"],
    "extensions": ["tests/unit/extensions", "tests/unit/saving", "tests/unit/writer/test_content_bytes.py"],
    "data": ["tests/unit/data"],
    "offload": ["tests/unit/offload", "tests/multirank/test_offload.py"],
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A changed module: where it lies in the tree, what was changed, and its text."""

    name: Path
    change: Change
    source: str


def drawn(room: str, count: int, seed: int) -> list[Mutant]:
    """So many mutants of a room, by chance: every one of all its modules is as likely."""
    names = [path.relative_to(ROOT) for path in sorted((ROOT / SRC / room).rglob("*.py"))]
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    everything = [(name, change) for name in names for change in changes(sources[name])]
    shuffled = random.Random(seed).sample(everything, len(everything))
    mutants = (Mutant(name=name, change=one, source=one.of(sources[name])) for name, one in shuffled)
    taken = list(itertools.islice((one for one in mutants if one.source != sources[one.name]), count))
    print(f"{room}: {len(everything)} mutants, {len(taken)} drawn with the seed {seed}", flush=True)
    return taken


def copied(folder: Path, root: Path) -> Path:
    """What git has of the tree, and what it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
    return folder


def measure_patience() -> None:
    """Once for all that is forked: see ``kit/patience.py``."""
    measure = [sys.executable, "-c", "from kit import patience; print(patience.factor())"]
    found = subprocess.run(measure, cwd=ROOT / "tests", check=True, capture_output=True, text=True)
    os.environ["RANKS_PATIENCE"] = found.stdout.strip()


def noticing(record: Record, mutant: Mutant) -> list[str]:
    """The tests that enter the statement, the quickest first: all, where the import of the module runs it.

    Where few do in their own process, a few that start a writer, in whose process it may be run, and those that enter most
    of its module, as a process that they fork, such as a loader's worker, may run it.
    """
    if len(found := _entering(record, mutant)) >= _NEAR_TESTS:
        return found
    module = str(mutant.name.relative_to(SRC))
    near = [test for test, ran in record.items() if module in ran.lines]
    near.sort(key=lambda test: -len(record[test].lines[module]))
    starting = [test for test, ran in record.items() if _STARTS_A_WRITER in ran.lines][:_SAVING_TESTS]
    return list(dict.fromkeys([*found, *starting, *near[:_NEAR_TESTS]]))


def _entering(record: Record, mutant: Mutant) -> list[str]:
    module, entered = str(mutant.name.relative_to(SRC)), mutant.change.entered
    if not entered:
        return list(record)
    return [test for test, ran in record.items() if not ran.lines.get(module, frozenset()).isdisjoint(entered)]


class Bench:
    """A copy of the tree in which one mutant at a time is tried.

    Attributes:
        record: how the tests of the room went without one, the quickest first.
    """

    def __init__(self, scratch: Path, tests: list[str], root: Path = ROOT) -> None:
        """Copy the tree, and run the tests without a mutant, as far as no earlier run did with the same files."""
        self._scratch, self._root = scratch, root
        self.tree = copied(scratch.resolve() / "tree", root)
        for folder in (SRC, "tests/kit"):
            # A run writes no bytecode: it could be that of a mutant.
            compileall.compile_dir(self.tree / folder, quiet=2)
        measure_patience()
        files = sorted({file for name in tests for file in [self.tree / name, *(self.tree / name).rglob("test_*.py")]})
        known = {str(file.relative_to(self.tree)): kept for file, kept in self._kept(files).items()}
        if missing := [file for file, kept in known.items() if not kept.exists()]:
            self._record(missing, known)
        ran = [one for kept in known.values() for one in pickle.loads(kept.read_bytes()).items()]
        self.record: Record = {
            test: one for test, one in sorted(ran, key=lambda each: each[1].took_s) if not one.failed
        }
        if failed := [test for test, one in ran if one.failed]:
            print(f"left out, for they fail without a mutant: {', '.join(failed)}", flush=True)
        if len(failed) > _MOST_FAILED:
            sys.exit("mend these first")

    def _kept(self, files: list[Path]) -> dict[Path, Path]:
        """Where the record of each file of tests is kept: by what it and all that it may use consists of."""
        used = hashlib.sha256()
        for path in sorted((*(self.tree / SRC).rglob("*"), *(self.tree / "tests").rglob("*.py"))):
            is_used = not path.name.startswith("test_") and path.parent.name not in ("mutants", "__pycache__")
            if is_used and path.is_file():
                used.update(str(path.relative_to(self.tree)).encode() + path.read_bytes())
        folder = self._root / ".pytest_cache/mutants"
        folder.mkdir(parents=True, exist_ok=True)
        files = [file for file in files if file.is_file()]
        return {
            file: folder
            / hashlib.sha256(used.digest() + str(file.relative_to(self.tree)).encode() + file.read_bytes()).hexdigest()
            for file in files
        }

    def _record(self, files: list[str], into: dict[str, Path]) -> None:
        written = self._scratch / "record.pickle"
        end = tested(self.tree, files, Recorder(self.tree / SRC, written), {}, self._scratch)
        ran: Record = pickle.loads(written.read_bytes()) if written.exists() else {}
        if not ran:
            sys.exit(f"the tests do not run without a mutant:\n{end.output[-4000:]}")
        for file in files:
            of_file = {test: one for test, one in ran.items() if test.partition("::")[0] == file}
            into[file].write_bytes(pickle.dumps(of_file))

    def tried(self, mutant: Mutant) -> tuple[list[str], End]:
        """The tests that may notice a mutant, and how they ended with it.

        One that fails and then passes alone has met the limits of the machine, and has noticed nothing.
        """
        tests = left = noticing(self.record, mutant)
        place = self.tree / mutant.name
        original = place.read_text(encoding="utf-8")
        place.write_text(mutant.source, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(place))).unlink(missing_ok=True)
        try:
            while left:
                end = self._tested(left)
                if end.passed or end.by not in left or not self._tested([end.by]).passed:
                    return tests, end
                left = left[left.index(end.by) + 1 :]
        finally:
            place.write_text(original, encoding="utf-8")
        return tests, End(passed=True)

    def _tested(self, tests: list[str]) -> End:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return tested(self.tree, files, Chosen(tests), self.record, self._scratch)


def run(room: str, count: int, seed: int, only: set[int]) -> int:
    """Run them all, or only those of these numbers. Returns how many survived."""
    mutants, survived, ran = drawn(room, count, seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        begun = time.monotonic()
        bench = Bench(Path(scratch), ROOMS[room])
        print(f"without a mutant {len(bench.record)} tests take {time.monotonic() - begun:.0f} s, recorded", flush=True)
        for number, mutant in enumerate(mutants, 1):
            if only and number not in only:
                continue
            begun = time.monotonic()
            tests, end = bench.tried(mutant)
            ran, survived = ran + 1, survived + end.passed
            print(f"{number:3} {_told(bench.record, mutant, tests, end)}, {time.monotonic() - begun:.0f} s", flush=True)
            if end.passed:
                print(difference((bench.tree / mutant.name).read_text(encoding="utf-8"), mutant.source), flush=True)
    print(f"{room}, seed {seed}: {ran - survived} of {ran} were killed, {survived} survived")
    return survived


def _told(record: Record, mutant: Mutant, tests: list[str], end: End) -> str:
    what = f"{mutant.change.kind}, {mutant.name}:{mutant.change.line}"
    return (
        f"SURVIVED: {what}: {len(tests)} tests" if end.passed else f"killed: {what}: by {end.by} of {len(tests)} tests"
    )


def difference(before: str, after: str) -> str:
    """The lines that differ, with two around them."""
    return "\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("room", choices=sorted(ROOMS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", type=int, nargs="+", default=[], help="of those drawn, the mutants of these numbers")
    asked = parser.parse_args()
    sys.exit(run(asked.room, asked.count, asked.seed, set(asked.only)) > 0)


if __name__ == "__main__":
    main()
