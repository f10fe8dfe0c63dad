"""The objects that the calls in a pickle of ``torch.save`` would return, without making the calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from typing_extensions import Self

from safe_ckpt.core.formats.dtypes import STORAGES
from safe_ckpt.core.formats.pickles import Made, Named, Names


class Global(Named):
    """A class or function that the pickle names. Those of one name are equal."""

    names: Bounded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class Opaque(Made):
    """The result of a class or function that was not called: its name, its arguments, and what was put into it later."""

    __slots__ = ("args", "items", "state")
    names: ClassVar[Bounded]
    args: object
    items: list[Any]
    state: object

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Make it, or in its place what can be understood: a shape, or a tensor."""
        cls.names.spend(_WORK_OF_OBJECT + max(0, len(args) - _FEW))
        made = object_made_by(str(cls), args)
        if made is None:
            made = super().__new__(cls, *args, **kwargs)
            made.args, made.state, made.items = args, None, []
        return made

    @property
    def made_by(self) -> Global:
        """Its class, or what would return it."""
        return cast("Global", type(self))

    def append(self, item: Any, /) -> None:
        """As a list's, and a set's."""
        self.extend([item])

    add = append

    def extend(self, items: Any, /) -> None:
        """As a list's."""
        self.go_on_to(0)
        self.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.items.append((key, value))

    def __setstate__(self, state: object) -> None:
        super().__setstate__(state)
        self.state = state


class Ordered(dict[Any, Any]):
    """A dict of a class of its own, with its attributes: a module's state dict has ``_metadata``."""

    names: ClassVar[Bounded]
    state: object = None

    def __new__(cls, *args: object, **_: object) -> Self:
        """Make it of its pairs."""
        made = super().__new__(cls)
        pairs = args[0] if args and isinstance(args[0], list | tuple) else ()  # none, or one list of them
        if pairs and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            cls.names.spend(len(pairs))
            made.update((key_of(key), value) for key, value in pairs)
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state


class Bounded(Names):
    """Gives the stand-ins, and counts the work against its bound: a few bytes can demand much of it."""

    def __init__(self) -> None:
        super().__init__(anywhere=True)
        self.left = 0

    def make(self, facts: dict[str, Any]) -> Any:
        """Make a stand-in."""
        self.spend(_WORK_OF_NAME)
        made = Global("Global", (Opaque,), facts)
        return Global("Global", (Ordered,), facts) if str(made) in _DICTS else made

    def spend(self, work: int) -> None:
        """Count work.

        Raises:
            TooLong: it is too much.
        """
        self.left -= work
        if self.left < 0:
            raise TooLong


class TooLong(Exception):
    """A pickle takes more work than it may."""


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


_MOST_ELEMENTS = 1 << 62
_WORK_OF_OBJECT = 3  # of which each takes 10 times the memory of a number
_WORK_OF_NAME = 100
_FEW = 16  # arguments that are not counted: a tensor has less


def key_of(key: object) -> Any:
    """A key for a dict."""
    # A hostile pickle chooses its keys. So none may take long to hash, as deep tuples do, or collide by design.
    if isinstance(key, str | bytes | bool | float | Global | Opaque) or key is None:
        return key  # an Opaque is compared by identity
    if isinstance(key, int):
        return key if key.bit_length() <= 53 else f"<{key:#x}>" if key.bit_length() <= 256 else f"<int {id(key):#x}>"
    if isinstance(key, tuple) and len(key) <= 16 and all(map(_is_short, key)):
        return str(key)
    return f"<{type(key).__name__} {id(key):#x}>"


def _is_short(part: object) -> bool:
    if isinstance(part, str):
        return len(part) <= 400
    return isinstance(part, float) or (isinstance(part, int) and part.bit_length() <= 256)


def storage_of(key: object) -> Storage | None:
    """The storage that one of torch's persistent ids stands for."""
    if isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage" and isinstance(key[1], Global):
        name, count = key[1].name, key[4]
        if isinstance(key[2], str) and isinstance(count, int) and count >= 0:
            return Storage(key[2], STORAGES.get(name, "uint8"), count)
    return None


def object_made_by(name: str, args: tuple[Any, ...]) -> Any:
    """The object that a call would return, if that is a shape or a tensor; None for others."""
    if name == "torch.Size" and len(args) == 1:
        return counts_of(args[0])
    rebuild = _TENSORS.get(name)
    return None if rebuild is None else rebuild(args)


def counts_of(value: object) -> tuple[int, ...] | None:
    """A shape, a stride or offsets: at most 64 whole numbers that are not negative; None for anything else."""
    if not isinstance(value, tuple | list) or len(value) > 64:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 62 for n in value) else None


def _shape(value: object) -> tuple[int, ...] | None:
    shape = counts_of(value)
    return shape if shape is not None and math.prod(shape) < _MOST_ELEMENTS else None


def _tensor(args: tuple[Any, ...], dtype: str | None = None) -> Tensor | None:
    if len(args) < 4 or not isinstance(args[0], Storage) or not isinstance(args[1], int) or args[1] < 0:
        return None
    shape, stride = _shape(args[2]), counts_of(args[3])
    if shape is None or stride is None or len(shape) != len(stride):
        return None
    return Tensor(args[0], dtype or args[0].dtype, shape, args[1], stride)


def _typed(args: tuple[Any, ...]) -> Tensor | None:
    dtype = args[6] if len(args) > 6 else None
    return _tensor(args, dtype.name) if isinstance(dtype, Global) else None


def _parameter(args: tuple[Any, ...]) -> Tensor | None:
    return args[0] if args and isinstance(args[0], Tensor) else None


def _meta(args: tuple[Any, ...]) -> Tensor | None:
    shape = _shape(args[1]) if len(args) > 1 else None
    if shape is None or not isinstance(args[0], Global):
        return None
    return Tensor(None, args[0].name, shape, note="no data (meta)")


def _subclass(args: tuple[Any, ...]) -> Tensor | None:
    rebuild = _TENSORS.get(str(args[0])) if len(args) > 2 and isinstance(args[0], Global) else None
    if rebuild is None or rebuild is _subclass or not isinstance(args[2], tuple):
        return None
    inner = rebuild(args[2])
    if inner is None:
        return None
    kind = args[1] if isinstance(args[1], Global) else ""
    return replace(inner, note=f"subclass {kind}".strip())


_DICTS = {"collections.OrderedDict", "collections.defaultdict", "builtins.dict"}
_TENSORS: dict[str, Callable[[tuple[Any, ...]], Tensor | None]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
