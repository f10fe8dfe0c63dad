"""The choices of a program: each has a name and is made from the seed and that name alone; taking one back changes no other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


class Draw:
    """What a program is made of.

    Args:
        seed: of the program.
        fixed: name of a choice -> which of its options; what is not in here comes from the seed.

    Attributes:
        made: name -> which option was taken, in the order in which the program asked.
        told: name -> that option as text.
    """

    def __init__(self, seed: int, fixed: Mapping[str, int] | None = None) -> None:
        self.seed = seed
        self._fixed = dict(fixed or {})
        self.made: dict[str, int] = {}
        self.told: dict[str, str] = {}

    def among(self, name: str, *options: Any) -> Any:
        """One of the options. The first is the simplest: a program that fails is cut down towards it."""
        if name in self.made:
            raise ValueError(f"{name} is asked for twice")
        number = self._fixed.get(name, self.random(name).randrange(len(options)))
        self.made[name] = number = min(number, len(options) - 1)
        self.told[name] = str(getattr(options[number], "__name__", options[number]))
        return options[number]

    def number(self, name: str, least: int, most: int) -> int:
        """A whole number, of which ``least`` is the simplest."""
        return int(self.among(name, *range(least, most + 1)))

    def flag(self, name: str, *, of: int = 2) -> bool:
        """True once in ``of`` programs."""
        return bool(self.among(name, *[False] * (of - 1), True))

    def random(self, name: str) -> random.Random:
        """For values that are no choices, such as the numbers in a tensor."""
        return random.Random(f"{self.seed}/{name}")
