"""What is promised, and whether the figures of one run keep it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from figures import ASYNCHRONOUS, PEERS, Figures

MIB = 1 << 20
OVERLAPPED, EAGER = "safe_ckpt overlapped", "safe_ckpt eager"
# A method that no tutorial mentions, and an option that is documented to require CUDA.
BEYOND_THEIR_DOCUMENTATION = ("prewarmed", "async staging")
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
    return [*found, *_durable(figures), *_memory(figures), *_extras(figures)]


def _training(figures: Figures, mode: str) -> list[Target]:
    lost = figures.best_peer("lost", mode, ASYNCHRONOUS)
    first = figures.best_peer("first call + gate", mode, PEERS)
    usual = figures.best_peer("first call + gate", mode, PEERS, without=BEYOND_THEIR_DOCUMENTATION)
    memcpy = figures.reference("memcpy_s", mode)
    stop = figures.seconds(OVERLAPPED, mode, "call + gate")
    name = "first call + gate"
    return [
        Target(
            f"lost per save x best async peer, {mode}",
            figures.ratio(OVERLAPPED, mode, "lost", lost and lost[1]),
            0.8,
            note=lost[0] if lost else "",
        ),
        Target(
            f"{name} x best peer as its documentation has it, {mode}",
            figures.ratio(OVERLAPPED, mode, name, usual and usual[1]),
            0.2,
            note=usual[0] if usual else "",
        ),
        Target(
            f"{name} x best peer, prewarmed by hand or staging on a thread, {mode}",
            figures.ratio(OVERLAPPED, mode, name, first and first[1]),
            0.2,
            note=first[0] if first else "",
        ),
        Target(
            f"overlapped call + gate, {mode}",
            stop.median * 1000 if stop else None,
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


def _durable(figures: Figures) -> list[Target]:
    peer = figures.best_peer("durable", "quiet", ASYNCHRONOUS)
    found = []
    for way in (OVERLAPPED, EAGER):
        found += [
            _against_the_disk(figures, way, 1.25),
            Target(
                f"{way}: durable x best async peer",
                figures.ratio(way, "quiet", "durable", peer and peer[1]),
                0.6,
                note=peer[0] if peer else "",
            ),
        ]
    return [*found, *(_against_the_disk(figures, way, 1.4) for way in ADAPTERS)]


def _against_the_disk(figures: Figures, way: str, limit: float) -> Target:
    spread = figures.seconds(way, "quiet", "durable x O_DIRECT")
    note = f"{spread.low:.2f} to {spread.high:.2f}" if spread else ""
    return Target(f"{way}: durable x O_DIRECT", spread.median if spread else None, limit, note=note)


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
