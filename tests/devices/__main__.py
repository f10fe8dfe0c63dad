"""``python -m devices``, in ``tests``: programs on the accelerator that runs late."""

from __future__ import annotations

import argparse
import sys
import time

from devices import runner


def main() -> int:
    """Returns 1 where something was wrong, or a planted bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m devices", description="programs on an accelerator that runs late")
    parser.add_argument(
        "--kind",
        choices=runner.KINDS,
        default="saved",
        help="whole programs, snapshots alone, two ranks, or a framework",
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=500, help="how many programs")
    parser.add_argument("--seed", type=int, help="print this program, and run it alone")
    parser.add_argument("--bug", help="with this planted bug")
    parser.add_argument("--planted", nargs="*", help="find the planted bugs, or these, and print the seeds that do")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        runner.inside(options.first, options.count, options.kind, options.bug)
        return 0
    if options.planted is not None:
        from devices import planted

        return planted.print_table(options.planted, options.count)
    first, count = options.first, options.count
    if options.seed is not None:
        from devices import draw

        drawn = {"saved": draw.drawn, "pair": draw.drawn_pair}.get(options.kind)
        if options.kind in runner.FRAMEWORKS:
            print(draw.drawn_fit(options.seed, options.kind))
        elif drawn is not None:
            print(drawn(options.seed))
        first, count = options.seed, 1
    began, wrong = time.monotonic(), 0
    for seed, what in runner.many(first, count, options.kind, options.bug):
        if what:
            wrong += 1
            print(f"seed {seed}: {what}", flush=True)
    print(f"{count} programs, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
