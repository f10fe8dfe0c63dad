"""``time``, ``datetime``, ``uuid``, ``secrets`` and ``random`` of the simulated processes: the world's clock and chance."""

from __future__ import annotations

import datetime as real_datetime
import random as real_random
import time as real_time
import types
import uuid as real_uuid
from typing import Any

from sim.world import here, hub


class _Now(real_datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return real_datetime.datetime.fromtimestamp(here().proc.host.time(), tz)


def _time() -> float:
    return here().proc.host.time()  # type: ignore[no-any-return]


def _monotonic() -> float:
    if hub.task is None and hub.loading:
        return 0.0
    return here().proc.host.monotonic()  # type: ignore[no-any-return]


def _sleep(seconds: float) -> None:
    here().sleep(seconds)


def _uuid4() -> real_uuid.UUID:
    return real_uuid.UUID(int=here().world.names.getrandbits(128), version=4)


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    made = {}
    for real in (real_time, real_datetime, real_uuid, real_random):
        made[real.__name__] = types.ModuleType(real.__name__)
        vars(made[real.__name__]).update(vars(real))
    clocks = {"time": _time, "monotonic": _monotonic, "perf_counter": _monotonic, "process_time": _monotonic}
    clocks |= {"sleep": _sleep, "thread_time": _monotonic}
    clocks |= {f"{name}_ns": lambda own=own: int(own() * 1e9) for name, own in list(clocks.items()) if name != "sleep"}
    vars(made["time"]).update(clocks)
    made["datetime"].datetime = _Now  # type: ignore[attr-defined]
    made["uuid"].uuid4 = made["uuid"].uuid1 = _uuid4  # type: ignore[attr-defined]
    chance = {
        name: lambda *given, name=name: getattr(here().world.names, name)(*given)
        for name in ("random", "uniform", "randrange", "randint", "choice", "shuffle", "sample", "getrandbits")
    }
    vars(made["random"]).update(chance)
    secrets = types.ModuleType("secrets")
    secrets.token_hex = lambda count=32: here().world.names.randbytes(count).hex()  # type: ignore[attr-defined]
    secrets.token_bytes = lambda count=32: here().world.names.randbytes(count)  # type: ignore[attr-defined]
    return {**made, "secrets": secrets}
