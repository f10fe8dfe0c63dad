"""Runs a framework's own checkpoint tests twice, with its own parts and with ours, and explains how they differ.

    python tests/upstream/run.py lightning PATH/TO/A/CHECKOUT

Exits with 1 when a difference is not in the table, or a row of the table is not needed any more; with 2 when the tests cannot
be run. README.md beside this says what has to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outcomes import (
    Comparison,
    Difference,
    Outcome,
    Table,
    compare,
    differences,
    left_out,
    not_compared,
    read_junit,
    read_table,
)
from saves import counted
from suites import SUITES, Suite

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "migrating.md"
_AGAIN_AT_MOST = 40  # more than that is not chance


def main() -> int:
    options = _options()
    suite = SUITES[options.framework]
    checkout = options.checkout.resolve()
    table = read_table(HERE / f"expected_{options.framework}.yaml", PAGE, suite.variants)
    unfit = _unfit(suite, checkout, options)
    if unfit:
        print(unfit)
        return 2
    keep = Path(options.keep or tempfile.mkdtemp(prefix="upstream-")).resolve()
    keep.mkdir(parents=True, exist_ok=True)
    print(f"logs and results: {keep}")
    runs = Runs(options.framework, suite, checkout, keep, options)
    stock = runs.run("stock")
    bad = sum(outcome.kind in ("failed", "error") for outcome in stock.values())
    print(f"stock: {_counts(stock)}")
    if 2 * bad >= len(stock):
        print(f"most of these tests fail without ours: see {keep}/stock.log and README.md for what they need")
        return 2
    complete = _all_compared(stock, table)
    good = [complete, *(_judge(runs, variant, stock, table) for variant in options.variant or suite.variants)]
    return 0 if all(good) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted(SUITES))
    parser.add_argument("checkout", type=Path, help="a checkout of its repository, of the installed version")
    parser.add_argument("--variant", action="append", help="only this one; can be given again")
    parser.add_argument("--only", help="of the tests only those that pytest's -k selects; rows for others are let be")
    parser.add_argument("--slow", action="store_true", help="also the tests that take long and save little")
    parser.add_argument("--keep", help="a folder for logs and results")
    parser.add_argument(
        "--reuse", action="store_true", help="take the results that --keep has instead of running again"
    )
    parser.add_argument("--limit-s", type=int, default=3600, help="a run that takes longer is killed (%(default)s)")
    parser.add_argument("--any-version", action="store_true", help="run also where checkout and package differ")
    return parser.parse_args()


def _unfit(suite: Suite, checkout: Path, options: argparse.Namespace) -> str | None:
    try:
        wanted, installed = suite.version(checkout), version(suite.package).partition("+")[0]
    except FileNotFoundError as error:
        return f"{checkout} is no checkout of {options.framework}: {error.filename} is missing"
    except PackageNotFoundError:
        return f"{suite.package} is not installed for {sys.executable}"
    near = wanted.split(".")[:2] == installed.split(".")[:2]
    if not near and not options.any_version:
        return f"the checkout is of {suite.package} {wanted}, installed is {installed}: check out that version"
    if wanted != installed:
        print(f"WARNING: the checkout is of {suite.package} {wanted}, installed is {installed}")
    if not suite.paths(checkout):
        return f"{checkout / suite.folder} has none of the tests"
    print(f"{suite.package} {installed}, tests of {wanted} in {checkout}")
    return None


class Runs:
    """Runs of one framework's tests."""

    def __init__(self, framework: str, suite: Suite, checkout: Path, keep: Path, options: argparse.Namespace) -> None:
        self.framework, self.suite, self.checkout, self.keep, self.options = framework, suite, checkout, keep, options

    def run(self, variant: str, tests: list[str] | None = None) -> dict[str, Outcome]:
        """Run all tests, or these, as ``variant``: ``stock``, or one of ours."""
        name = variant if tests is None else f"{variant}-again"
        junit = self.keep / f"{name}.xml"
        if not (self.options.reuse and junit.exists()):
            junit.unlink(missing_ok=True)
            self.saves(name).unlink(missing_ok=True)
            with (self.keep / f"{name}.log").open("wb") as log:
                self._pytest(name, variant, junit, log, tests)
        if not junit.exists():
            print(f"{name}: pytest left no result: see {self.keep}/{name}.log")
            return {}
        return read_junit(junit, self.suite.folder)

    def saves(self, name: str) -> Path:
        """Where the saves of a run are counted."""
        return self.keep / f"{name}.saves"

    def _pytest(self, name: str, variant: str, junit: Path, log: object, tests: list[str] | None) -> None:
        suite = self.suite
        paths = [str(HERE), str(self.checkout / suite.importable), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",  # nothing is fetched
            **os.environ,
            **suite.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "UPSTREAM_VARIANT": variant,
            "UPSTREAM_SAVES": str(self.saves(name)),
        }
        environment.pop("PYTEST_PLUGINS", None)
        if variant != "stock" or suite.plugin_for_stock:  # not -p: a worker of xdist would load it after the conftest
            environment["PYTEST_PLUGINS"] = f"swap_{self.framework}"
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *self._given(tests)]
        command += [f"--rootdir={self.checkout}", "-o", "junit_family=xunit1", f"--junitxml={junit}"]
        command += [f"--timeout={suite.timeout_s}", "--timeout-method=signal"]
        print(f"{variant}: running …", flush=True)
        process = subprocess.Popen(
            command,
            cwd=self.checkout / suite.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(self.options.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{variant}: ended after {self.options.limit_s} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _given(self, tests: list[str] | None) -> list[str]:
        if tests is not None:
            return tests
        workers = ["-n", str(self.suite.workers)] if self.suite.workers else []
        slow = "" if self.options.slow or not self.suite.slow else f"not ({self.suite.slow})"
        only = f"({self.options.only})" if self.options.only else ""
        chosen = " and ".join(filter(None, (slow, only)))
        return [*workers, *(["-k", chosen] if chosen else []), *self.suite.paths(self.checkout)]


def _all_compared(stock: dict[str, Outcome], table: Table) -> bool:
    for why, tests in left_out(stock, table).items():
        print(f"\n  left out ({len(tests)}): {why}")
    missing = not_compared(stock, table)
    for test in missing:
        print(f"\n  NOT COMPARED: {test}: {stock[test].kind}\n    {stock[test].message[:400]}")
    failed = sorted(test for test, outcome in stock.items() if outcome.kind in ("failed", "error"))
    for test in failed:
        if test not in missing:
            print(f"\n  fails without ours: {test}\n    {stock[test].message[:200]}")
    print(f"\nstock: {len(missing)} not compared that should be, {len(failed)} fail without ours")
    return not missing


def _judge(runs: Runs, variant: str, stock: dict[str, Outcome], table: Table) -> bool:
    ours = runs.run(variant)
    if not ours:
        return False
    rows = [row for row in table.rows if variant in row.variants]
    if runs.options.only:
        rows = [row for row in rows if any(row.means(test) for test in stock)]
    comparison = compare(differences(stock, ours), rows)
    notes = _look_again(runs, variant, comparison.unexplained)
    unsteady = {test for test, note in notes.items() if note is None}
    _print(variant, ours, comparison, table, notes)
    saves = counted(runs.saves(variant))
    print(f"{variant}: {saves} saves went through ours")
    if not saves:
        print(f"NOTHING WAS COMPARED: swap_{runs.framework}.py has no effect, or no test saves")
    left = [difference for difference in comparison.unexplained if difference.test not in unsteady]
    return bool(saves) and not left and not comparison.obsolete


def _look_again(runs: Runs, variant: str, found: Sequence[Difference]) -> dict[str, str | None]:
    """Run what is not explained once more, alone: test -> what is to be said of it; None: it is unsteady without ours."""
    tests = [difference.test for difference in found]
    if not tests or len(tests) > _AGAIN_AT_MOST:
        return {}
    before, after = runs.run("stock", tests), runs.run(variant, tests)
    notes: dict[str, str | None] = {}
    for difference in found:
        first, second = before.get(difference.test), after.get(difference.test)
        if first is not None and first.kind != difference.stock.kind:
            notes[difference.test] = None
        elif first is not None and second is not None and first.kind == second.kind:
            notes[difference.test] = "not when run again alone"
    return notes


def _print(
    variant: str, ours: dict[str, Outcome], comparison: Comparison, table: Table, notes: dict[str, str | None]
) -> None:
    print(f"\n{variant}: {_counts(ours)}")
    for reason, (why, see) in table.reasons.items():
        met = [difference for row, difference in comparison.explained if row.reason == reason]
        if met:
            print(f"\n  expected, {reason} ({len(met)}): {why} See docs/migrating.md#{see}")
            for difference in met:
                print(f"    {_line(difference)}")
    for difference in comparison.unexplained:
        word = "UNSTEADY WITHOUT OURS, TOO" if notes.get(difference.test, "") is None else "NOT EXPLAINED"
        print(f"\n  {word}: {_line(difference)}\n    {difference.ours.message[:400]}")
        if notes.get(difference.test):
            print(f"    {notes[difference.test]}")
    for row in comparison.obsolete:
        print(f"\n  NO DIFFERENCE ANY MORE: {row.test} ({row.reason}): remove the row for {variant}")
    print(
        f"\n{variant}: {len(comparison.explained)} expected differences, {len(comparison.unexplained)} unexplained, "
        f"{len(comparison.obsolete)} rows to remove"
    )


def _line(difference: Difference) -> str:
    return f"{difference.test}: {difference.stock.kind} -> {difference.ours.kind}"


def _counts(outcomes: dict[str, Outcome]) -> str:
    kinds = [outcome.kind for outcome in outcomes.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


if __name__ == "__main__":
    sys.exit(main())
