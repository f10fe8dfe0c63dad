"""What readers cost a save: one run, in turns, of a directory without readers, with one, and with many that hold what is due.

The readers' pins are renewed by a process of their own, as readers do. A figure is a median: of the call that
training waits for, of the time until the handle has its result, with the deletion, and of the deletion alone::

    python benchmarks/readers.py --rounds 40 --mib 8
    python benchmarks/readers.py --rounds 40 --mib 8 --before OTHER_CHECKOUT/src   # the same saves by another version
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAVER = """
import json, sys, time, torch
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, events
folder, mib = sys.argv[1], int(sys.argv[2])
config = CheckpointConfig(retention=Retention(keep_last=1), record_events=False)
state = {"w": {"t": torch.randn(mib << 18)}, "step": 0}
deleting = []
def note(event):
    if isinstance(event, events.Retained):
        deleting.append(event.seconds)
with Checkpointer(folder, config, hooks=[note]) as ckpt:
    print("ready", flush=True)
    step = 0
    for line in sys.stdin:
        step += 1
        state["step"] = step
        begun = time.perf_counter()
        handle = ckpt.save(step, state)
        called = time.perf_counter() - begun
        handle.result(timeout_s=60)
        took = time.perf_counter() - begun
        print(json.dumps([called, took, deleting[-1] if deleting else 0.0]), flush=True)
"""
READERS = """
import sys, time
from pathlib import Path
from safe_ckpt.core.home.pins.hold import Hold
folder, count = Path(sys.argv[1]), int(sys.argv[2])
holds = [Hold(title=f"reader {number}", ttl_s=60.0) for number in range(count)]
for hold in holds:
    assert hold.take(next(folder.glob("step-*")), lambda: True, ours=True)
print("ready", flush=True)
sys.stdin.readline()
for hold in holds:
    hold.close()
"""


class Saver:
    """A process that saves when it is told to."""

    def __init__(self, folder: Path, mib: int, source: str) -> None:
        environment = {**os.environ, "PYTHONPATH": source}
        command = [sys.executable, "-c", SAVER, str(folder), str(mib)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def save(self) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        figures: list[float] = json.loads(self._line())
        return figures

    def close(self) -> None:
        self.process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 200])
    parser.add_argument("--before", default="", help="the sources of another version, which saves without readers, too")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    here = str(Path(__file__).resolve().parents[1] / "src")
    with tempfile.TemporaryDirectory(dir=args.folder) as top:
        ways = {"without readers": (0, here), "without readers, again": (0, here)}
        ways |= {"without readers, before": (0, args.before)} if args.before else {}
        ways |= {f"{count} readers": (count, here) for count in args.readers}
        savers = {name: Saver(Path(top, str(at)), args.mib, ways[name][1]) for at, name in enumerate(ways)}
        readers = []
        for at, (name, (count, source)) in enumerate(ways.items()):
            savers[name].save()
            if count:
                command = [sys.executable, "-c", READERS, str(Path(top, str(at))), str(count)]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": source},
                )
                assert process.stdout is not None
                process.stdout.readline()
                readers.append(process)
        for saver in savers.values():  # the first ones are slower
            saver.save()
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(args.rounds):
            order = list(ways) if number % 2 else list(ways)[::-1]
            for name in order:
                found[name].append(savers[name].save())
            time.sleep(0.02)
        for process in readers:
            process.communicate("\n", timeout=60)
        for saver in savers.values():
            saver.close()
    base = [statistics.median(column) for column in zip(*found["without readers"], strict=True)]
    print(f"{args.mib} MiB, {args.rounds} rounds, medians; in brackets the ratio to the first line")
    print("| | the call | until it has its result | deletion alone |\n|---|---|---|---|")
    for name, rows in found.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        cells = [f"{one * 1e3:.2f} ms ({one / was:.2f})" for one, was in zip(medians, base, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
