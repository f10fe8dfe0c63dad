"""What is promised, and whether the figures of one run keep it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from figures import ASYNCHRONOUS, FIRST_SAVE, Figures, Mode

MIB = 1 << 20
OVERLAPPED, EAGER = "safe_ckpt overlapped", "safe_ckpt eager"
ADAPTERS = (
    "safe_ckpt Lightning .ckpt overlapped",
    "safe_ckpt Lightning .ckpt eager",
    "safe_ckpt accelerator.save_state overlapped",
    "safe_ckpt accelerator.save_state eager",
)


@dataclass(frozen=True)
class Target:
    """One promise.

    Attributes:
        measured: None when this run does not decide it.
        at_most: the limit; with ``at_least`` it is one from below.
    """

    name: str
    measured: float | None
    at_most: float
    unit: str = "x"
    note: str = ""
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not decided"
        met = self.measured >= self.at_most if self.at_least else self.measured <= self.at_most
        return "met" if met else "not met"


def all_targets(figures: Figures) -> list[Target]:
    found = []
    for mode in figures.modes:
        found += _training(figures, mode)
        found += _durable(figures, mode)
    return [*found, *_memory(figures), *_extras(figures)]


def _training(figures: Figures, mode: Mode) -> list[Target]:
    lost = figures.best_peer("lost", mode, ASYNCHRONOUS)
    copying = figures.best_peer("lost", mode, ASYNCHRONOUS, copying_first=True)
    first = figures.best_peer(FIRST_SAVE, mode, ASYNCHRONOUS)
    memcpy = figures.reference("memcpy_s", mode)
    stop = figures.seconds(OVERLAPPED, mode, "call + gate")
    found = [
        _against(f"{way}: lost per save x best async peer, {mode}", figures, (way, mode, "lost"), lost, 0.8)
        for way in (OVERLAPPED, EAGER)
    ]
    return [
        *found,
        _against(
            f"{EAGER}: the same x best async peer that copies first, {mode}",
            figures,
            (EAGER, mode, "lost"),
            copying,
            1.0,
        ),
        _against(
            f"first save: call + first step x best async peer, {mode}",
            figures,
            (OVERLAPPED, mode, FIRST_SAVE),
            first,
            0.5,
        ),
        # Where forward and backward are shorter than the copy, the gate waits for the rest of it.
        Target(
            f"overlapped call + gate, {mode}",
            stop.median * 1000 if stop and mode.training == "compute-bound" else None,
            5,
            "ms",
            note=f"longest {stop.high * 1000:.1f} ms" if stop else "",
        ),
        Target(
            f"eager call x memcpy, {mode}",
            figures.ratio(EAGER, mode, "call", memcpy.median if memcpy else None),
            1.3,
        ),
    ]


def _against(
    name: str, figures: Figures, which: tuple[str, Mode, str], peer: tuple[str, float] | None, limit: float
) -> Target:
    return Target(name, figures.ratio(*which, peer and peer[1]), limit, note=peer[0] if peer else "")


def _durable(figures: Figures, mode: Mode) -> list[Target]:
    peer = figures.best_peer("durable", mode, ASYNCHRONOUS)
    found = []
    for way in (OVERLAPPED, EAGER):
        found.append(_against(f"{way}: durable x best async peer, {mode}", figures, (way, mode, "durable"), peer, 0.6))
        if mode.is_quiet:
            found.append(_against_the_disk(figures, way, mode, 1.25))
            continue
        quiet = figures.seconds(way, mode._replace(load="quiet"), "durable")
        ratio = figures.ratio(way, mode, "durable", quiet.median if quiet else None)
        found.append(Target(f"{way}: durable x its own when quiet, {mode}", ratio, 3))
    return [*found, *(_against_the_disk(figures, way, mode, 1.4) for way in ADAPTERS if mode.is_quiet)]


def _against_the_disk(figures: Figures, way: str, mode: Mode, limit: float) -> Target:
    spread = figures.seconds(way, mode, "durable x O_DIRECT")
    note = f"{spread.low:.2f} to {spread.high:.2f}" if spread else ""
    return Target(f"{way}: durable x O_DIRECT, {mode}", spread.median if spread else None, limit, note=note)


def _memory(figures: Figures) -> list[Target]:
    shared = [figures.memory(way, "shared_bytes") for way in (OVERLAPPED, EAGER) if way in figures.ways]
    writers = [figures.memory(way, "largest_child_bytes") for way in (OVERLAPPED, EAGER) if way in figures.ways]
    return [
        Target(
            "shared memory beyond the state",
            (max(filter(None, shared)) - figures.state_bytes) / MIB if any(shared) else None,
            64,
            "MiB",
        ),
        Target(
            "writer process without the arena", max(filter(None, writers)) / MIB if any(writers) else None, 300, "MiB"
        ),
    ]


def _extras(figures: Figures) -> list[Target]:
    extras = figures.results["extras"]
    resume, many, imports = (extras.get(name, {}) for name in ("resume", "many_tensors", "imports"))
    ranks = extras.get("scaling", {}).get("ranks", {}).get("throughput_x_direct", {})
    return [
        Target("verified resume x fastest unverified load, cold cache", resume.get("ratio"), 1.2),
        Target("the same, in memory that was touched before", resume.get("ratio_backed"), 1.2),
        Target("the same, and the first step after it", resume.get("ratio_with_first_step"), 1.2),
        Target("20,000 tensors: call x torch.save into nothing", many.get("ratio"), 2.0),
        Target("import and first use", imports.get("added_s"), 0.15, "s", note=_collected(imports)),
        Target(
            "throughput of 1, 2, 4 ranks x O_DIRECT, the lowest",
            min(ranks.values(), default=None),
            0.8,
            at_least=True,
            note=", ".join(f"{count}: {value:.2f}" for count, value in ranks.items()),
        ),
    ]


def _collected(imports: Mapping[str, Any]) -> str:
    with_it = imports.get("added_with_garbage_collector_s")
    return f"{with_it:.2f} s with the collection that is due after import torch" if with_it else ""
