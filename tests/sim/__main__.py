"""``python -m sim``, in ``tests``: one history as a readable log, or many; see docs/simulator.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sim import runner


def main() -> int:
    """Returns 1 where something was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m sim", description="histories of the real modules on simulated hosts"
    )
    parser.add_argument("--seed", type=int, help="run this one; a violation is shrunk to the faults that it needs")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument(
        "--faults", help="with --seed: these faults of its plan alone, such as 0,2; an empty text for none"
    )
    parser.add_argument("--count", type=int, default=1500, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what they came to into this file")
    parser.add_argument(
        "--page", type=Path, nargs="+", help="a page, and files of --json: write what these came to into it"
    )
    parser.add_argument("--coverage", action="store_true", help="print how often each fault met each phase")
    parser.add_argument("--planted", nargs="*", help="find the planted bugs, or these, and print the seeds that do")
    options = parser.parse_args()
    runner.with_fixed_hashes()
    runner.limit_memory()
    if options.planted is not None:
        from sim import planted

        return planted.print_table(options.planted, options.count if options.count != 1500 else 2000, options.processes)
    if options.seed is not None:
        return _one(options.seed, options.faults, trace=options.trace)
    if options.page:
        total = runner.Total()
        for file in options.page[1:]:
            total.merge(runner.from_json(file.read_text(encoding="utf-8")))
        runner.into_page(options.page[0], total)
        return 0

    def note(so_far: runner.Total) -> None:
        if options.json:
            options.json.write_text(runner.as_json(so_far), encoding="utf-8")

    total = runner.many(options.first, options.count, options.processes, lambda line: print(line, flush=True), note)
    print("\n".join(total.lines()))
    if options.coverage:
        print(runner.coverage_table(total))
    return int(bool(total.failed))


def _one(seed: int, faults: str | None, *, trace: bool) -> int:
    from sim import history
    from sim.loader import Slots

    slots = Slots()
    chosen = None if faults is None else [int(one) for one in faults.split(",") if one]
    result = history.run(seed, slots, trace=print if trace else None, faults=chosen)
    print(f"seed {seed}: {result.virtual_s:.1f} simulated seconds, {result.steps} steps, digest {result.digest}")
    for number, fault in enumerate(result.faults):
        print(f"  fault {number}: {fault}")
    for violation in dict.fromkeys(result.violations):
        print(f"  VIOLATION {violation}")
    if result.violations and faults is None:
        kept, last = runner.shrink(seed, slots)
        print("these faults are enough:", *(kept or ["none"]), sep="\n  ")
        print("\n".join(f"  VIOLATION {one}" for one in dict.fromkeys(last.violations)))
    return int(bool(result.violations))


if __name__ == "__main__":
    sys.exit(main())
