"""The content of a checkpoint: tensors, the places of their bytes, and the plain values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safe_ckpt.core.formats.dtypes import ITEM_BYTES
from safe_ckpt.errors import HostileCheckpointError
from safe_ckpt.tools.inspection.pickle_objects import Global, Opaque, Storage, Tensor

_MOST_WORK = 6_000_000  # in nodes, and 16 characters of names and texts
_WORK_OF_LEAF = 6
_MOST_DEPTH = 64
_LONGEST_TEXT = 80
_CONTAINERS = (dict, list, tuple)
# A few bytes make a tuple of tuples whose whole text would never end.
_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 9
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPiece:
    """A part of a tensor, as it lies in a file.

    Attributes:
        file: the file.
        offset: of its first element, in bytes.
        stride: in elements.
        starts: where in the tensor the part begins, one number per dimension.
        shape: of the part.
    """

    file: Path
    offset: int
    stride: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        name: its place in the structure, joined by dots; in a directory behind the file's, or item's, name and a colon.
        dtype: as torch names it, without ``torch.``.
        shape: of the whole.
        pieces: where its bytes are; none when the checkpoint has no bytes of it, or not as plain numbers.
        note: how it is divided, or what is special about it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...] = ()
    note: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A number, a text, or an object of some class. Of an object only the structure is known."""

    name: str
    text: str
    value: object = None
    is_plain: bool = True


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """All of a checkpoint, or of one of its files."""

    tensors: tuple[Entry, ...] = ()
    values: tuple[Value, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[TensorTable]) -> TensorTable:
        """Join all of them into one."""
        tensors = tuple(entry for part in parts for entry in part.tensors)
        return cls(tensors=tensors, values=tuple(value for part in parts for value in part.values))

    def under(self, prefix: str) -> TensorTable:
        """The same with a name in front of each."""
        return TensorTable(
            tensors=tuple(replace(entry, name=f"{prefix}:{entry.name}") for entry in self.tensors),
            values=tuple(replace(value, name=f"{prefix}:{value.name}") for value in self.values),
        )


def leaves(root: object, path: str) -> Iterator[tuple[str, object]]:
    """The leaves of a structure with their names: tensors, storages, plain values, and objects that hold neither.

    Raises:
        HostileCheckpointError: it is deeper or has more parts than any checkpoint, as when it contains itself.
    """
    left = _MOST_WORK
    stack: list[tuple[str, Iterator[tuple[str, object]]]] = [("", iter([("", root)]))]
    while stack:
        prefix, parts = stack[-1]
        key, value = next(parts, (None, None))
        if key is None:
            stack.pop()
            continue
        name = f"{prefix}.{key}" if prefix else key
        # Whatever one part holds costs as often as it is referred to: a few bytes can refer to a long list a million times.
        left -= _WORK_OF_LEAF + len(name) // 16 + _work(value)
        if left < 0 or len(stack) > _MOST_DEPTH:
            raise HostileCheckpointError(path=path, message="its structure is too large, or contains itself")
        below = _parts(value)
        if below is None:
            yield name, value
        else:
            stack.append((name, below))


def _work(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value) // 16
    if isinstance(value, dict | list | tuple):
        return len(value)
    if isinstance(value, Opaque):
        return len(value.items) + sum(len(part) for part in (value.args, value.state) if isinstance(part, _CONTAINERS))
    return value.bit_length() // 64 if isinstance(value, int) else 0


def _parts(value: object) -> Iterator[tuple[str, object]] | None:
    """The parts of a value; None for a leaf."""
    if isinstance(value, dict) and value:
        return zip(map(_text, value), value.values(), strict=True)
    if isinstance(value, list | tuple) and not all(isinstance(part, bool | int | float | str) for part in value):
        return ((str(index), part) for index, part in enumerate(value))  # a row of plain values counts as one value
    if isinstance(value, Opaque):
        held = [("args", value.args), ("state", value.state), ("items", value.items)]
        below = [(key, part) for key, part in held if _holds_tensors(part)]
        return iter(below) if below else None
    return None


def _holds_tensors(value: object) -> bool:
    # What an object of an unknown class holds is shown only as far as tensors are in it; two levels are enough for states.
    if isinstance(value, Tensor | Storage):
        return True
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    return any(isinstance(part, Tensor | Opaque | dict) for part in inner)


def _text(key: object) -> str:
    if isinstance(key, str | bytes):
        return str(key[:400])
    return "<object>" if isinstance(key, Opaque) else str(key)[:400]


def describe(value: object) -> str:
    """A value as text of one line at most."""
    if isinstance(value, Opaque):
        return f"<{value.made_by}>"
    if isinstance(value, Global):
        return f"<{value}>"
    if isinstance(value, list | tuple):
        if len(value) > 8:
            return f"{type(value).__name__} of {len(value)}"
        inner = ", ".join(map(_plain, value))
        return _cut(f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})")
    return _cut(_plain(value))


def _plain(value: object) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:200])
    if isinstance(value, int) and value.bit_length() > 256:
        return f"integer of {value.bit_length()} bits"
    return _REPR.repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
