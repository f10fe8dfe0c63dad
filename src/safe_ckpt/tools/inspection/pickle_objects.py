"""The objects that the calls in a pickle of ``torch.save`` would return, without making the calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from safe_ckpt.core.formats.dtypes import STORAGES


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_getattr(self) -> bool:
        """Whether it is Python's own function of this name."""
        return self.name == "getattr" and self.module in ("builtins", "__builtin__")


@dataclass(eq=False, slots=True)
class Opaque:
    """The result of a class or function that was not called: its name, its arguments, and what was put into it later.

    How far it is with that: ``core.formats.pickles.next_stage``.
    """

    made_by: Global
    args: object = ()
    state: object = None
    items: list[Any] = field(default_factory=list)
    stage: int = 0


class Ordered(dict[Any, Any]):
    """A dict of a class of its own, with its attributes: a module's state dict has ``_metadata``."""

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


_MOST_ELEMENTS = 1 << 62


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


def storage_of(key: object) -> object:
    """The storage that one of torch's persistent ids stands for."""
    if isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage" and isinstance(key[1], Global):
        name, count = key[1].name, key[4]
        if isinstance(key[2], str) and isinstance(count, int) and count >= 0:
            return Storage(key[2], STORAGES.get(name, "uint8"), count)
    return Opaque(Global("torch", "storage"), args=())


def object_made_by(made_by: object, args: object) -> object:
    """The object that a call would return: a shape, a tensor, or an ``Opaque``."""
    if not isinstance(made_by, Global):
        return Opaque(Global("builtins", "object"), args=args)
    name = str(made_by)
    if name == "torch.Size" and isinstance(args, tuple) and len(args) == 1:
        shape = counts_of(args[0])
        return Opaque(made_by, args=args) if shape is None else shape
    rebuild = _TENSORS.get(name)
    if rebuild is not None and isinstance(args, tuple):
        made = rebuild(args)
        if made is not None:
            return made
    return Opaque(made_by, args=args)


def pairs_of(args: object) -> list[Any] | tuple[Any, ...]:
    """The pairs that an ordered or defaulting dict is made of: none, or one list of them."""
    pairs = args[0] if isinstance(args, tuple) and args and isinstance(args[0], list | tuple) else []
    return pairs if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs) else []


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


DICTS = {"collections.OrderedDict", "collections.defaultdict", "builtins.dict"}
_TENSORS: dict[str, Callable[[tuple[Any, ...]], Tensor | None]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
