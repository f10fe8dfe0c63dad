"""The structure of a pickle, without running it: no class is imported, no function is called.

A pickle is a program for a stack machine. This one knows its opcodes (from ``pickletools``, Python's own description) and
builds plain containers; where the program asks for a class or a function it builds an inert ``Opaque`` that says which. What
``torch.save`` writes for tensors is understood.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from safe_ckpt.errors import HostileCheckpointError, UnsupportedFormatError

MOST_BYTES = 64 << 20
"""A larger pickle is refused: 20,000 tensors take 4 MiB."""
_MOST_WORK = 4_000_000  # opcodes, and elements that one opcode copies
_LARGE_BYTES = 8 << 20  # a smaller one that takes so much work is no tool's; a larger one may have 30,000 tensors
_WORK_OF_OBJECT = 3  # of which each takes 10 times the memory of a number
_MOST_ELEMENTS = 1 << 62
_MARK = object()


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


class _Machine:
    def __init__(self, data: bytes, path: str) -> None:
        self._path = path
        self._data = data
        self._left = _MOST_WORK
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> tuple[Any, int]:
        """The object, and how many bytes were read."""
        for opcode, arg, position in pickletools.genops(self._data):
            self.spend(1)
            if opcode.name == "STOP":
                return self.stack.pop(), (position or 0) + 1
            if opcode.name in _CONSTANTS:
                self.stack.append(arg)
                continue
            step = _STEPS.get(opcode.name)
            if step is None:
                raise self.refused(f"no tool writes the opcode {opcode.name} into a checkpoint")
            step(self, arg)
        raise self.refused("it does not end")

    def spend(self, work: int) -> None:
        """A few bytes can ask for much: for a copy of a long list, again and again."""
        self._left -= work
        if self._left >= 0:
            return
        if len(self._data) < _LARGE_BYTES:
            raise self.refused("it is too long")
        message = f"its pickle of {len(self._data) >> 20} MiB is longer than is looked at"
        raise UnsupportedFormatError(path=self._path, message=message)

    def refused(self, why: str) -> HostileCheckpointError:
        return HostileCheckpointError(path=self._path, message=f"its pickle is refused: {why}")

    def since_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                items = self.stack[index + 1 :]
                del self.stack[index:]
                return items
        raise self.refused("it takes what it never put")

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def add_items(self, target: object, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Opaque):
            target.items.extend(items)

    def set_items(self, target: object, items: list[Any]) -> None:
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, dict):
            target.update((_key(key), value) for key, value in pairs)
        elif isinstance(target, Opaque):
            target.items.extend(pairs)

    def build(self, _: object) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Opaque | Ordered):
            self.stack[-1].state = state

    def reduce(self, _: object) -> None:
        args = self.stack.pop()
        self.stack.append(self.made(self.stack.pop(), args))

    def new_with_keywords(self, _: object) -> None:
        del self.stack[-1:]
        self.reduce(None)

    def make(self, _: object) -> None:
        made_by, *args = self.since_mark()
        self.stack.append(self.made(made_by, tuple(args)))

    def make_named(self, name: str) -> None:
        self.stack.append(self.made(_global(name), tuple(self.since_mark())))

    def opaque(self, made_by: Global, items: list[Any]) -> Opaque:
        self.spend(_WORK_OF_OBJECT)
        return Opaque(made_by, items=items)

    def made(self, made_by: object, args: object) -> object:
        self.spend(_WORK_OF_OBJECT)
        if isinstance(made_by, Global) and _acts(made_by):
            raise self.refused(f"it would run {made_by} when it is loaded")
        if isinstance(made_by, Global) and str(made_by) in _DICTS:
            pairs = _pairs(args)
            self.spend(len(pairs))
            return Ordered((_key(pair[0]), pair[1]) for pair in pairs)
        return _made(made_by, args)

    def name(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.refused("the name of a class in it is no text")
        self.stack.append(Global(module[:200], name[:200]))

    def refer(self, key: object) -> None:
        self.stack.append(_storage(key))

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise self.refused("it takes what it never put")
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.stack.append(items)

    def dict_of(self, _: object) -> None:
        made: dict[Any, Any] = {}
        self.set_items(made, self.since_mark())
        self.stack.append(made)


def _acts(made_by: Global) -> bool:
    # No such list can be complete, and none is needed here, where nothing is run: it is for whoever loads the file next.
    module = made_by.module.partition(".")[0]
    if module in ("builtins", "__builtin__"):
        return made_by.name in _ACTING
    return module in _ACTING_MODULES and not made_by.name.endswith(("_result", "_size"))


_ACTING = frozenset({"eval", "exec", "compile", "open", "__import__", "execfile", "input", "breakpoint"})
_ACTING_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "pty", "runpy", "socket", "ctypes", "shutil", "importlib", "sys", "pdb", "webbrowser",
})  # fmt: skip
_Step = Callable[[_Machine, Any], object]
_SET, _FROZENSET = Global("builtins", "set"), Global("builtins", "frozenset")
_EXTENSION = Global("copyreg", "extension")


def _push(make: Callable[[_Machine], object]) -> _Step:
    return lambda machine, _: machine.stack.append(make(machine))


def _with_rest(act: Callable[[_Machine, object, list[Any]], None]) -> _Step:
    def step(machine: _Machine, _: object) -> None:
        items = machine.since_mark()
        act(machine, machine.stack[-1], items)

    return step


def _append(machine: _Machine, _: object) -> None:
    item = machine.stack.pop()
    machine.add_items(machine.stack[-1], [item])


def _set_item(machine: _Machine, _: object) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items(machine.stack[-1], [key, value])


_CONSTANTS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "FLOAT",
    "BINFLOAT",
})  # fmt: skip
_STEPS: dict[str, _Step] = {
    "PROTO": lambda *_: None,
    "FRAME": lambda *_: None,
    "MARK": _push(lambda _: _MARK),
    "NONE": _push(lambda _: None),
    "NEWTRUE": _push(lambda _: True),
    "NEWFALSE": _push(lambda _: False),
    "EMPTY_LIST": _push(lambda _: []),
    "EMPTY_DICT": _push(lambda _: {}),
    "EMPTY_TUPLE": _push(lambda _: ()),
    "EMPTY_SET": _push(lambda machine: machine.opaque(_SET, [])),
    "LIST": _push(lambda machine: machine.since_mark()),
    "TUPLE": _push(lambda machine: tuple(machine.since_mark())),
    "FROZENSET": _push(lambda machine: machine.opaque(_FROZENSET, machine.since_mark())),
    "DUP": _push(lambda machine: machine.stack[-1]),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "DICT": _Machine.dict_of,
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "APPEND": _append,
    "APPENDS": _with_rest(_Machine.add_items),
    "ADDITEMS": _with_rest(_Machine.add_items),
    "SETITEM": _set_item,
    "SETITEMS": _with_rest(_Machine.set_items),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "GET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "BINGET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "GLOBAL": lambda machine, name: machine.stack.append(_global(name)),
    "STACK_GLOBAL": _Machine.name,
    "INST": _Machine.make_named,
    "OBJ": _Machine.make,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "NEWOBJ_EX": _Machine.new_with_keywords,
    "BUILD": _Machine.build,
    "PERSID": _Machine.refer,
    "BINPERSID": lambda machine, _: machine.refer(machine.stack.pop()),
    "EXT1": _push(lambda _: _EXTENSION),
    "EXT2": _push(lambda _: _EXTENSION),
    "EXT4": _push(lambda _: _EXTENSION),
}


def read_pickle(data: bytes, path: str) -> Any:
    """What a pickle would build, as plain containers, ``Opaque``, ``Storage`` and ``Tensor``.

    Raises:
        HostileCheckpointError: it is no pickle, or none that a checkpoint would hold.
        UnsupportedFormatError: it is too long to be looked at.
    """
    return read_pickles(data, path, count=1)[0][0]


def read_pickles(data: bytes, path: str, *, count: int) -> tuple[list[Any], int]:
    """The first ``count`` of several pickles that follow each other, as torch wrote them before its zip format.

    Returns:
        What they would build, and how many bytes they take.

    Raises:
        HostileCheckpointError: one is no pickle, or none that a checkpoint would hold.
        UnsupportedFormatError: one is too long to be looked at.
    """
    if len(data) > MOST_BYTES:
        raise HostileCheckpointError(path=path, message=f"its pickle is refused: larger than {MOST_BYTES >> 20} MiB")
    found, at = [], 0
    for _ in range(count):
        machine = _Machine(data[at:] if at else data, path)
        try:
            value, length = machine.run()
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            if isinstance(error, HostileCheckpointError | UnsupportedFormatError):
                raise
            raise machine.refused(f"it is damaged ({str(error)[:200]})") from error
        found.append(value)
        at += length
    return found, at


def _global(text: str) -> Global:
    module, _, name = text.partition(" ")
    return Global(module[:200], name[:200])


def _key(key: object) -> Any:
    # Whoever made the pickle chooses the keys: none may take long to hash, as deep tuples do, or collide by design.
    if isinstance(key, str | bytes | bool | float | Global | Opaque) or key is None:
        return key  # an Opaque is told from others by identity
    if isinstance(key, int):
        return key if key.bit_length() <= 53 else f"<{key:#x}>" if key.bit_length() <= 256 else f"<int {id(key):#x}>"
    if isinstance(key, tuple) and len(key) <= 16 and all(map(_is_short, key)):
        return str(key)
    return f"<{type(key).__name__} {id(key):#x}>"


def _is_short(part: object) -> bool:
    if isinstance(part, str):
        return len(part) <= 400
    return isinstance(part, float) or (isinstance(part, int) and part.bit_length() <= 256)


def _storage(key: object) -> object:
    if isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage" and isinstance(key[1], Global):
        name, count = key[1].name, key[4]
        if isinstance(key[2], str) and isinstance(count, int) and count >= 0:
            return Storage(key[2], _STORAGES.get(name, "uint8"), count)
    return Opaque(Global("torch", "storage"), args=())


def _made(made_by: object, args: object) -> object:
    if not isinstance(made_by, Global):
        return Opaque(Global("builtins", "object"), args=args)
    name = str(made_by)
    if name == "torch.Size" and isinstance(args, tuple) and len(args) == 1:
        shape = _numbers(args[0])
        return Opaque(made_by, args=args) if shape is None else shape
    rebuild = _TENSORS.get(name)
    if rebuild is not None and isinstance(args, tuple):
        made = rebuild(args)
        if made is not None:
            return made
    return Opaque(made_by, args=args)


def _pairs(args: object) -> list[Any] | tuple[Any, ...]:
    """What an ordered or defaulting dict is made of: nothing, or one list of pairs."""
    pairs = args[0] if isinstance(args, tuple) and args and isinstance(args[0], list | tuple) else []
    return pairs if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs) else []


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple | list) or len(value) > 64:
        return None
    return tuple(value) if all(isinstance(n, int) and 0 <= n < 1 << 62 for n in value) else None


def _shape(value: object) -> tuple[int, ...] | None:
    shape = _numbers(value)
    return shape if shape is not None and math.prod(shape) < _MOST_ELEMENTS else None


def _tensor(args: tuple[Any, ...], dtype: str | None = None) -> Tensor | None:
    if len(args) < 4 or not isinstance(args[0], Storage) or not isinstance(args[1], int) or args[1] < 0:
        return None
    shape, stride = _shape(args[2]), _numbers(args[3])
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
    return Tensor(
        inner.storage,
        inner.dtype,
        inner.shape,
        inner.offset,
        inner.stride,
        f"subclass {args[1] if isinstance(args[1], Global) else ''}".strip(),
    )


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
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
