"""What a pickle is read into: plain containers, and inert stand-ins for what only running it would build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Opaque:
    """What a class or function would have made: which one, of what, and what was put into it afterwards."""

    made_by: Global
    args: object = ()
    state: object = None
    items: list[Any] = field(default_factory=list)


class Ordered(dict[Any, Any]):
    """A dict that was made by a class of its own, with what was put on it: a module's state dict has ``_metadata``."""

    state: object = None


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """The memory that tensors are views of: a record of the archive."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A tensor: a view of a storage. ``dtype`` as torch names it, without ``torch.``; offset and stride in elements."""

    storage: Storage | None
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    stride: tuple[int, ...] = ()
    note: str = ""
