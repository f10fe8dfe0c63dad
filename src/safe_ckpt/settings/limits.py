"""What a setting may be beyond its type: written once beside the field, then checked, explained, and put into the schema."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "safe_ckpt.limits"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one value; for a list, of each of its entries. None where there is no such bound.

    Attributes:
        above: it must be greater than this.
        at_least: it must not be less than this.
        at_most: it must not be greater than this.
        multiple_of: it must be a multiple of this.
        pattern: a regular expression that must be found in the text.
        words: what ``pattern`` means, for people; goes on from "expected".
    """

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    multiple_of: int | None = None
    pattern: str | None = None
    words: str = ""

    def allows(self, value: Any) -> bool:
        """Whether ``value``, which has the right type already, is within all bounds."""
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.multiple_of is None or value % self.multiple_of == 0)
            and (self.pattern is None or re.search(self.pattern, value) is not None)
        )

    def __str__(self) -> str:
        parts = [self.words] if self.words else []
        if self.above is not None:
            parts.append(f"above {self.above}")
        if self.at_least is not None:
            both = self.at_most is not None
            parts.append(f"{self.at_least} to {self.at_most}" if both else f"at least {self.at_least}")
        elif self.at_most is not None:
            parts.append(f"at most {self.at_most}")
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        return ", ".join(parts)


def limits(
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    multiple_of: int | None = None,
    pattern: str | None = None,
    words: str = "",
) -> Mapping[str, Limits]:
    """Give this to a dataclass field as its ``metadata``; see ``Limits`` for the arguments."""
    bounds = Limits(
        above=above, at_least=at_least, at_most=at_most, multiple_of=multiple_of, pattern=pattern, words=words
    )
    return {_KEY: bounds}


def limits_of(item: dataclasses.Field[Any]) -> Limits:
    """The bounds that were given to a field; without any, bounds that allow everything."""
    found: Limits = item.metadata.get(_KEY, Limits())
    return found
