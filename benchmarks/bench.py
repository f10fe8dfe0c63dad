"""Everything that is measured about speed: a table, JSON, plots. What ``make bench`` runs.

Every way to save runs in a fresh process, in every round, in two training loops, with the other cores quiet and loaded, in
shuffled order; what the disk and the memory can do is measured in the same rounds. A way that cannot run is listed with its
error.

    python benchmarks/bench.py --quick
    python benchmarks/bench.py --load quiet --load "2 burners" --training memory-bound
    python benchmarks/bench.py --only "safe_ckpt eager" --only "DCP async_save thread"
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import backends
import machine
import plots
import runner
from figures import Figures
from machine import LOADS
from report import markdown
from training import KINDS

REFERENCE = "reference"


def extra_commands(options: argparse.Namespace) -> dict[str, tuple[object, ...]]:
    """The measurements that are scripts of their own, with their arguments."""
    folder = ("--folder", options.folder)
    sized = ("--mebibytes", options.mebibytes, "--rounds", options.rounds)
    few = ("--sizes", 32, 64) if options.quick else ()
    return {
        "resume": (*sized, *folder),
        "many_tensors": folder,
        "imports": (),
        "scaling": (*sized, "--saves", options.saves, *few, *folder),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=768, help="parameters and Adam state together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="per round and way, after the first one")
    parser.add_argument("--only", action="append", metavar="NAME", help="a way to save, or a script beside this one")
    parser.add_argument("--load", action="append", choices=LOADS, help="what else the machine does; all if not given")
    parser.add_argument("--training", action="append", choices=KINDS, help="which loop; all if not given")
    parser.add_argument("--quick", action="store_true", help="128 MiB, one round: to see that it works")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="for bench.json, bench.md and img/"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="on the disk that is measured")
    parser.add_argument("--timeout-s", type=float, default=600, help="for one process; twenty times that for scaling")
    options = parser.parse_args()
    if options.quick:
        options.mebibytes, options.rounds, options.saves = 128, 1, 2
        options.load = options.load or ["quiet", "1 burner"]
    options.load, options.training = options.load or list(LOADS), options.training or list(KINDS)
    known = [*backends.ENTRIES, *extra_commands(options)]
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: expected one of {', '.join(known)}")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    options.folder.mkdir(parents=True, exist_ok=True)
    extras = extra_commands(options)
    wanted = options.only or [*backends.ENTRIES, *extras]
    ways = [way for way in backends.ENTRIES if way in wanted]
    results: dict[str, Any] = {
        "machine": machine.facts(options.folder),
        "settings": {name: getattr(options, name) for name in ("mebibytes", "rounds", "saves")},
        "loops": [],
        "references": [],
        "extras": {},
    }
    if ways:
        measure_loops(options, ways, results)
    for name in extras:
        if name in wanted:
            say(name)
            results["extras"][name] = runner.run(f"{name}.py", *extras[name], timeout_s=20 * options.timeout_s)
    return results


def measure_loops(options: argparse.Namespace, ways: list[str], results: dict[str, Any]) -> None:
    sized = ("--mebibytes", options.mebibytes, "--folder", options.folder)
    calibrated = runner.run("reference.py", *sized, "--times", 1, "--calibrate", timeout_s=options.timeout_s)
    if "error" in calibrated:
        raise SystemExit(calibrated["error"])
    failed: set[str] = set()
    for number in range(options.rounds):
        jobs = [(way, kind, load) for way in ways for kind in options.training for load in options.load]
        jobs += [(REFERENCE, "", load) for load in options.load]
        for way, kind, load in random.sample(jobs, len(jobs)):
            if way in failed:
                continue
            say(f"round {number + 1} of {options.rounds}: {way}, {kind}, {load}")
            with machine.burning(LOADS[load].burners):
                if way == REFERENCE:
                    run = runner.run("reference.py", *sized, "--times", options.saves, timeout_s=options.timeout_s)
                    results["references"].append({**run, "way": way, "round": number, "load": load})
                else:
                    sizes = (*sized, "--batch", calibrated["batch"], "--saves", options.saves)
                    loop = ("--way", way, "--training", kind, "--workers", LOADS[load].workers, *sizes)
                    run = runner.run("loop.py", *loop, timeout_s=options.timeout_s)
                    results["loops"].append({**run, "way": way, "round": number, "training": kind, "load": load})
            if "error" in run:
                say(run["error"])
                failed.add(way)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = arguments()
    results = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    figures = Figures(results)
    drawn = [] if options.no_plots else plots.draw(figures, options.out / "img")
    text = markdown(figures, [str(path.relative_to(options.out)) for path in drawn])
    (options.out / "bench.md").write_text(text, encoding="utf-8")
    print(text)
    ours = [way for way in figures.errors() if backends.ENTRIES[way].kind == "ours"]
    if ours:
        raise SystemExit(f"could not run: {', '.join(ours)}")


if __name__ == "__main__":
    main()
