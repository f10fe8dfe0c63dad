"""``python -m programs_of``, in ``tests``: programs of one kind or of all; see docs/simulator.md."""

from __future__ import annotations

import argparse
import sys
import time

from programs_of import runner


def main() -> int:
    """Returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m programs_of", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(runner.kinds())}; without, all")
    parser.add_argument("--count", type=int, default=100, help="how many of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one, print its choices, and cut it down if it fails")
    parser.add_argument(
        "--fixed", default="", help="with --seed: choices, such as workers=2,accumulate=0 (the option's number)"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--until-wrong", action="store_true", help="stop at the first that is")
    parser.add_argument(
        "--stock", action="store_true", help="with the framework's own checkpoints in the place of ours"
    )
    parser.add_argument("--coverage", action="store_true", help="print how often each option was taken")
    options = parser.parse_args()
    known = runner.kinds()
    failed = 0
    for name in options.kinds or known:
        if name not in known:
            parser.error(f"there is no kind {name}: one of {', '.join(known)}")
        if options.stock and name not in runner.WITH_STOCK:
            parser.error(f"--stock is for {', '.join(runner.WITH_STOCK)}")
        kind = known[name](**({"stock": True} if options.stock else {}))
        if options.seed is not None:
            failed += _one(kind, options.seed, options.fixed)
        else:
            failed += _many(name, kind, options)
    return int(bool(failed))


def _one(kind: runner.Kind, seed: int, fixed: str) -> int:
    chosen = {name: int(number) for name, _, number in (one.partition("=") for one in fixed.split(",") if one)}
    result = runner.run(kind, seed, chosen)
    print("\n".join(runner.lines_of(result, every=True)))
    if result.verdict.wrong:
        print("this is enough:", *runner.lines_of(runner.shrink(kind, result)), sep="\n")
    return int(bool(result.verdict.wrong))


def _many(name: str, kind: runner.Kind, options: argparse.Namespace) -> int:
    total, told = runner.Total(), time.monotonic()
    for result in runner.many(kind, range(options.first, options.first + options.count), options.processes):
        total.add(result)
        if result.verdict.wrong:
            print(f"{name}: seed {result.seed}: {result.verdict.wrong}", flush=True)
            if options.until_wrong:
                break
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{name}: {total.programs} of {options.count}", flush=True)
    print(f"{name}:", "\n".join(total.lines()))
    if options.coverage:
        for (choice, option), number in sorted(total.options.items()):
            print(f"  {choice:<30} {option:<40} {number}")
    return len(total.failed)


if __name__ == "__main__":
    sys.exit(main())
