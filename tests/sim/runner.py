"""Runs many histories, in several processes; shrinks the faults of one that fails; adds up what they met."""

from __future__ import annotations

import collections
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim import history
from sim.loader import Slots

_COLLECT_EVERY = 25
_slots = Slots()
_BEGIN, _END = "<!-- histories: begin -->", "<!-- histories: end -->"


@dataclass
class Total:
    """What many histories came to.

    Attributes:
        failed: seeds to what was violated.
        coverage: how often each fault met each phase.
    """

    histories: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    steps: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    coverage: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, result: history.Result) -> None:
        """One more."""
        self.histories += 1
        self.virtual_s += result.virtual_s
        self.steps += result.steps
        self.counts.update(result.counts)
        self.coverage.update(result.coverage)
        if result.violations:
            self.failed[result.seed] = list(dict.fromkeys(result.violations))

    def merge(self, other: Total) -> None:
        """Those of another process."""
        self.histories += other.histories
        self.cpu_s += other.cpu_s
        self.virtual_s += other.virtual_s
        self.steps += other.steps
        self.counts.update(other.counts)
        self.coverage.update(other.coverage)
        self.failed.update(other.failed)

    def lines(self) -> list[str]:
        """In words."""
        faults = collections.Counter[str]()
        for (kind, _), count in self.coverage.items():
            faults[kind] += count
        told = [
            f"{self.histories} histories of {self.virtual_s / 3600:.1f} simulated hours in {self.cpu_s:.0f} CPU seconds",
            f"{self.counts['commits']} commits, {self.counts['resumes']} resumes, {sum(faults.values())} faults",
            "faults: " + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()),
            "outcomes: "
            + ", ".join(f"{k.removeprefix('outcome ')} {n}" for k, n in self.counts.most_common() if "outcome" in k),
            f"violations: {len(self.failed)}",
        ]
        return told + [f"  seed {seed}: {'; '.join(self.failed[seed])[:600]}" for seed in sorted(self.failed)]


def here_only(seeds: Iterable[int]) -> Total:
    """Run these in this process."""
    total, began = Total(), time.process_time()
    for number, seed in enumerate(seeds):
        total.add(history.run(seed, _slots))
        if number % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            gc.collect()
            gc.freeze()  # the modules stay: the next time they need not be looked through
    total.cpu_s = time.process_time() - began
    return total


def _part(seeds: tuple[int, int]) -> Total:
    return here_only(range(*seeds))


def many(
    first: int, count: int, processes: int, told: Callable[[str], None], note: Callable[[Total], None] = lambda _: None
) -> Total:
    """Run seeds ``first`` and the ``count - 1`` after it, in so many processes; ``note`` gets what there is so far."""
    step = max(1, min(250, -(-count // processes)))
    parts = [(at, min(at + step, first + count)) for at in range(first, first + count, step)]
    total = Total()
    # A process that has run some thousand histories has become large.
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=4) as pool:
        for part in pool.imap_unordered(_part, parts):
            total.merge(part)
            told(f"{total.histories} of {count}, {total.cpu_s:.0f} CPU seconds, {len(total.failed)} with violations")
            for seed in sorted(part.failed):
                told(f"  seed {seed}: {'; '.join(part.failed[seed])[:600]}")
            note(total)
    return total


def into_page(page: Path, total: Total) -> None:
    """Write what histories came to into a page, between its two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    told = "\n".join(f"- {line}" for line in total.lines()[:4])
    text = f"{before}{_BEGIN}\n{told}\n- violations: {len(total.failed)}\n\n{coverage_table(total)}\n{_END}{after}"
    page.write_text(text, encoding="utf-8")


def shrink(seed: int, slots: Slots) -> tuple[list[str], history.Result]:
    """Leave out faults as long as one of the rules is still violated. Returns those that are left, and what they do."""
    last = history.run(seed, slots)
    rules = {one.partition(":")[0] for one in last.violations}
    kept = list(range(len(last.faults)))
    faults = list(last.faults)
    for number in list(kept):
        fewer = [one for one in kept if one != number]
        result = history.run(seed, slots, faults=fewer)
        if rules & {one.partition(":")[0] for one in result.violations}:
            kept, last = fewer, result
    return [f"{number}: {faults[number]}" for number in kept], last


def with_fixed_hashes() -> None:
    """Start this program anew with a hash of text that is the same each time: sets are walked in its order."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "sim", *sys.argv[1:]])


def limit_memory(most_bytes: int = 3 << 30) -> None:
    """A history that loops fails by itself, and takes nothing else with it."""
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def coverage_table(total: Total) -> str:
    """How often each fault met each phase, as Markdown."""
    kinds = sorted({kind for kind, _ in total.coverage})
    phases = sorted({phase for _, phase in total.coverage})
    rows = ["| Phase | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for phase in phases:
        cells = (str(total.coverage.get((kind, phase), 0) or "") for kind in kinds)
        rows.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def as_json(total: Total) -> str:
    """To be read again by ``from_json``."""
    facts: dict[str, Any] = {key: getattr(total, key) for key in ("histories", "cpu_s", "virtual_s", "steps")}
    facts["counts"] = dict(total.counts)
    facts["coverage"] = [[kind, phase, count] for (kind, phase), count in sorted(total.coverage.items())]
    facts["failed"] = {str(seed): lines for seed, lines in total.failed.items()}
    return json.dumps(facts, indent=1)


def from_json(text: str) -> Total:
    """What ``as_json`` has written."""
    facts = json.loads(text)
    total = Total(**{key: facts[key] for key in ("histories", "cpu_s", "virtual_s", "steps")})
    total.counts.update(facts["counts"])
    total.coverage.update({(kind, phase): count for kind, phase, count in facts["coverage"]})
    total.failed.update({int(seed): lines for seed, lines in facts["failed"].items()})
    return total
