"""What a program does, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

AFTER_A_SAVE = ("step", "touch", "free", "switch", "other device", "wait", "replace", "again")
"""What follows a save at once: the next step; what was copied is changed in place; memory is freed, and taken and written by
others; another stream goes on; the thread stands on another device; the copy is waited for; a parameter gets other memory;
another save of the same state."""


@dataclass(frozen=True)
class Plan:
    """A program.

    Attributes:
        seed: of all numbers in it.
        chance_percent: of the device's scheduler.
        pageable_is_late: asynchronous copies to pageable memory do not wait.
        refuses_registration: staging memory stays pageable.
        devices: where the halves of the model lie.
        beside: where the tensors lie that no optimizer steps, which are copied at once: on "both", the "first", the "second" of
            these, or on the "host"; a copy that is waited for lets a whole stream go on.
        stands_on: the device on which the thread stands.
        on_streams: the trainer works on streams of its own.
        snapshot: of the saves.
        max_in_flight: saves.
        streams_to_writer: the state is larger than a snapshot may be, so files are written straight from it.
        through_writer: a process writes, not a thread.
        prepares: memory for snapshots is made before the first save.
        optimizer: its name.
        reads: after each step the trainer waits for a number, and so for its stream.
        exports: weights are written alone, too, before the last step.
        steps: for each, what follows its save; "" for no save.
        fails: what fails on demand: "", "allocation", "operation", or "copy", with which training goes on.
    """

    seed: int
    chance_percent: int
    pageable_is_late: bool
    refuses_registration: bool
    devices: tuple[int, int]
    beside: str
    stands_on: int
    on_streams: bool
    snapshot: str
    max_in_flight: int
    streams_to_writer: bool
    through_writer: bool
    prepares: bool
    optimizer: str
    reads: bool
    exports: bool
    steps: tuple[str, ...]
    fails: str


def drawn(seed: int) -> Plan:
    """The program of a seed."""
    chance = random.Random(seed)
    last = len(AFTER_A_SAVE) - 1
    first = chance.randrange(3)
    plan = {
        "chance_percent": chance.choice((0, 0, 0, 10, 40, 80)),
        "refuses_registration": chance.random() < 0.3,
        "devices": (first, first if chance.random() < 0.6 else chance.randrange(3)),
        "beside": chance.choice(("both", "first", "second", "host", "host")),
        "stands_on": first if chance.random() < 0.6 else chance.randrange(3),
        "on_streams": chance.random() < 0.5,
        "snapshot": chance.choice(("eager", "overlapped", "overlapped")),
        "max_in_flight": chance.choice((1, 1, 2)),
        "streams_to_writer": chance.random() < 0.05,
        "through_writer": chance.random() < 0.02,
        "prepares": chance.random() < 0.2,
        "optimizer": chance.choice(("AdamW", "AdamW", "SGD")),
        "reads": chance.random() < 0.4,
        "exports": chance.random() < 0.2,
        "steps": tuple(
            AFTER_A_SAVE[min(last, int(chance.expovariate(0.35)))] if chance.random() < 0.6 else ""
            for _ in range(chance.randint(2, 5))
        ),
        "fails": chance.choice(("allocation", "operation", "copy", "copy", "copy")) if chance.random() < 0.2 else "",
    }
    return Plan(seed=seed, pageable_is_late=chance.random() < 0.5, **plan)


AFTER_A_PAIRS_SAVE = ("step", "touch", "free", "gather", "switch", "export", "other device", "wait", "again")
"""The same of two ranks; and whole tensors are gathered on rank 0, or weights exported, over the group of the devices."""


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """A program of two ranks. What is named as in ``Plan`` is the same here.

    Attributes:
        wrap: "ddp", whose halves may lie on two devices; "fsdp" (fully_shard), on one device.
        resumes: after so many steps other objects, with other numbers, go on from the newest checkpoint.
        staging_bytes: of gathers.
        lags: the rank that waits for its device after each step while the other does not; 2: neither.
    """

    seed: int
    chance_percent: int
    pageable_is_late: bool
    refuses_registration: bool
    wrap: str
    devices: tuple[int, int]
    stands_on: int
    on_streams: bool
    snapshot: str
    max_in_flight: int
    optimizer: str
    resumes: int
    staging_bytes: int
    lags: int
    steps: tuple[str, ...]


def drawn_pair(seed: int) -> PairPlan:
    """The program of two ranks of a seed."""
    chance = random.Random(seed)
    wrap = chance.choice(("ddp", "fsdp", "fsdp"))
    first = chance.randrange(3)
    return PairPlan(
        seed=seed,
        chance_percent=chance.choice((0, 0, 0, 10, 40)),
        pageable_is_late=chance.random() < 0.5,
        refuses_registration=chance.random() < 0.3,
        wrap=wrap,
        devices=(first, chance.randrange(3)),
        stands_on=first if chance.random() < 0.5 else chance.randrange(3),
        on_streams=chance.random() < 0.6,
        snapshot=chance.choice(("eager", "overlapped", "overlapped")),
        max_in_flight=chance.choice((1, 1, 2)),
        optimizer=chance.choice(("AdamW", "AdamW", "SGD")),
        resumes=chance.choice((0, 1, 2, 3)),
        staging_bytes=chance.choice((64, 300, 1 << 20)),
        lags=chance.randrange(3),
        steps=tuple(
            chance.choice(AFTER_A_PAIRS_SAVE) if chance.random() < 0.8 else "" for _ in range(chance.randint(2, 4))
        ),
    )


WHERE = ("next", "committed", "forward", "stepping")
"""Where a run is killed: at the start of a batch; there, when the last save is committed; when the forward pass is queued;
before the optimizer changes anything. A run of Lightning may also raise at the start of a batch: it saves then.
"""


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """A run of a framework that is killed and started again. What is named as in ``Plan`` is the same here.

    Attributes:
        kind: the framework.
        wait_us: each wait for the device takes so long at least: what waits on a thread is overtaken by the next step.
        ranks: 1, or 2 with DDP, one of which is killed, and then the other.
        device: where the first rank trains; the second has the next one.
        on_stream: the trainer works on a stream of its own.
        every: steps from save to save.
        logs: a number is logged at each step, which a save or the framework waits for.
        acts: the module changes a buffer once more when its step is done, if the framework has a hook for that.
        drops: there is dropout, for whose mask the accelerator waits.
        large: there is a parameter of some size, so that a copy takes some time.
        stops: for each start but the last: after how many steps, and where, it is killed.
    """

    seed: int
    kind: str
    chance_percent: int
    pageable_is_late: bool
    refuses_registration: bool
    wait_us: int
    ranks: int
    device: int
    on_stream: bool
    snapshot: str
    through_writer: bool
    optimizer: str
    every: int
    logs: bool
    acts: bool
    drops: bool
    large: bool
    stops: tuple[tuple[int, str], ...]


STEPS = 8
"""Of each such run: two epochs of three, and two."""


def drawn_fit(seed: int, kind: str) -> FitPlan:
    """The run of a framework of a seed."""
    chance = random.Random(f"{kind} {seed}")
    starts = chance.choice((1, 1, 2))
    where = (*WHERE, "raises") if kind == "lightning" else WHERE
    return FitPlan(
        seed=seed,
        kind=kind,
        chance_percent=chance.choice((0, 0, 0, 10, 40)),
        pageable_is_late=chance.random() < 0.5,
        refuses_registration=chance.random() < 0.3,
        wait_us=chance.choice((0, 0, 1000, 10_000)),
        ranks=chance.choice((1, 1, 1, 2)),
        device=chance.randrange(3),
        on_stream=chance.random() < 0.3,
        snapshot=chance.choice(("eager", "overlapped", "overlapped")),
        through_writer=chance.random() < 0.1,
        optimizer=chance.choice(("AdamW", "AdamW", "SGD")),
        every=chance.choice((1, 1, 2)),
        logs=chance.random() < 0.3,
        acts=chance.random() < 0.3,
        drops=chance.random() < 0.3,
        large=chance.random() < 0.3,
        stops=tuple(sorted((chance.randrange(1, STEPS), chance.choice(where)) for _ in range(starts))),
    )
