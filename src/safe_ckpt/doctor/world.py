"""Whether this process is one of several ranks: what a launcher such as torchrun leaves in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safe_ckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that were started together.

    Attributes:
        rank: this process's.
        size: how many there are; more than one.
        address: the host where they meet.
        port: the port there.
        hosted: the launcher has a store there already; otherwise rank 0 makes it.
        attempt: how often the launcher has started over.
    """

    rank: int
    size: int
    address: str
    port: int
    hosted: bool
    attempt: str


def world_of(environment: Mapping[str, str]) -> World | None:
    """The ranks that ``environment`` tells of; None for a process alone.

    Raises:
        ConfigError: it tells only a part, or something that is no number.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    numbers = {}
    for key in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        text = environment.get(key, "")
        if not text.isdigit():
            message = (
                f"expected a number, got {text!r}: start the ranks with torchrun, or unset WORLD_SIZE for one process"
            )
            raise ConfigError(key=key, message=message)
        numbers[key] = int(text)
    if not environment.get("MASTER_ADDR"):
        raise ConfigError(key="MASTER_ADDR", message="expected the host of rank 0: start the ranks with torchrun")
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ConfigError(key="RANK", message=f"expected below WORLD_SIZE, got {numbers['RANK']}")
    return World(
        rank=numbers["RANK"],
        size=numbers["WORLD_SIZE"],
        address=environment["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
