"""``python -m lives --first 0 --count 1000`` in ``tests``: lives made from these seeds; one that goes wrong is cut down."""

import argparse
import sys

from lives.run import failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lives", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many")
    given = parser.parse_args()
    found = failures(range(given.first, given.first + given.count))
    for failure in found:
        print(failure)
    print(f"{given.count} lives from seed {given.first} on: {'at least ' if found else ''}{len(found)} went wrong")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
