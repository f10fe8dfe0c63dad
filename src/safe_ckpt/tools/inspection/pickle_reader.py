"""The structure of a pickle, without running it: no class of it is imported, no function is called.

A pickle is a program for a stack machine. This one knows its opcodes (from ``pickletools``, Python's own description) and
builds plain containers. For a class or a function it builds an inert ``Opaque`` with its name. It understands what
``torch.save`` writes for tensors. It notes what would run code, and what that is ``core.formats.pickles`` says.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from safe_ckpt.core.formats.pickles import Names, Odd, is_asked, next_stage
from safe_ckpt.errors import HostileCheckpointError, UnsupportedFormatError
from safe_ckpt.tools.inspection.pickle_objects import (
    DICTS,
    Global,
    Opaque,
    Ordered,
    key_of,
    object_made_by,
    pairs_of,
    storage_of,
)

MOST_BYTES = 64 << 20
"""A larger pickle is refused: 20,000 tensors take 4 MiB."""
_MOST_WORK = 4_000_000  # opcodes, and elements that one opcode copies
_LARGE_BYTES = 8 << 20  # a smaller one that takes so much work is no tool's; a larger one may have 30,000 tensors
_WORK_OF_OBJECT = 3  # of which each takes 10 times the memory of a number
_MARK = object()


class _Machine:
    def __init__(self, data: bytes, path: str, names: Names) -> None:
        self._path = path
        self._names = names
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
        """Count work against its bound: a few bytes can demand much of it, such as copies of a long list."""
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

    def get(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def add_items(self, target: object, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
            return
        self.changes(target, 0)
        if isinstance(target, Opaque):
            target.items.extend(items)

    def set_items(self, target: object, items: list[Any]) -> None:
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, dict):
            target.update((key_of(key), value) for key, value in pairs)
            return
        self.changes(target, 1)
        if isinstance(target, Opaque):
            target.items.extend(pairs)
            target.stage = 3 if is_asked(items[::2]) else target.stage

    def build(self, _: object) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Ordered):
            target.state = state
            return
        self.changes(target, 2)
        if isinstance(target, Opaque):
            target.state, target.stage = state, 3

    def changes(self, target: object, stage: int) -> None:
        """Note a change of an object, or refuse it: it would call methods that the pickle may have put into the object."""
        if isinstance(target, Opaque):
            target.stage = next_stage(target.stage, stage, str(target.made_by))
        elif isinstance(target, Global | Ordered):
            raise Odd(f"changes {target if isinstance(target, Global) else 'a dict as if it were something else'}")

    def reduce(self, _: object) -> None:
        args = self.stack.pop()
        self.stack.append(self.called(self.stack.pop(), args))

    def new(self, _: object) -> None:
        args = self.stack.pop()
        self.stack.append(self.made(self.stack.pop(), args))

    def new_with_keywords(self, _: object) -> None:
        given, args = self.stack.pop(), self.stack.pop()
        made = self.made(self.stack.pop(), args)
        if isinstance(made, Opaque) and isinstance(given, dict) and is_asked(given):
            made.stage = 3
        self.stack.append(made)

    def make(self, _: object) -> None:
        made_by, *args = self.since_mark()
        self.stack.append(self.called(made_by, tuple(args)))

    def make_named(self, name: str) -> None:
        self.stack.append(self.called(self.named(_global(name)), tuple(self.since_mark())))

    def named(self, found: Global) -> Global:
        self._names.add(found.module, found.name)
        return found

    def called(self, made_by: object, args: object) -> object:
        """Return what a call would return, and note that the pickle makes it."""
        first = args[0] if isinstance(args, tuple) and args else None
        if isinstance(made_by, Opaque):
            raise Odd(f"calls what it makes of {made_by.made_by}")
        if isinstance(made_by, Global):
            if made_by.is_getattr and isinstance(first, Global) and isinstance(args, tuple) and len(args) == 2:
                # A class within a class; a value of an enum.
                return self.named(Global(first.module, f"{first.name}.{args[1]}"[:200]))
            self._names.called.add(self._names.add(made_by.module, made_by.name))
            if made_by.name == "_rebuild_from_type_v2" and isinstance(first, Global):
                self._names.called.add(self._names.add(first.module, first.name))
        return self.made(made_by, args)

    def opaque(self, made_by: Global, items: list[Any]) -> Opaque:
        self.spend(_WORK_OF_OBJECT)
        return Opaque(made_by, items=items)

    def made(self, made_by: object, args: object) -> object:
        self.spend(_WORK_OF_OBJECT)
        if isinstance(made_by, Global) and str(made_by) in DICTS:
            pairs = pairs_of(args)
            self.spend(len(pairs))
            return Ordered((key_of(pair[0]), pair[1]) for pair in pairs)
        made = object_made_by(made_by, args)
        if isinstance(made, Opaque) and isinstance(args, tuple):
            made.stage = 3 if any(isinstance(one, dict) and is_asked(one) for one in args) else 0
        return made

    def name(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.refused("the name of a class in it is no text")
        self.stack.append(self.named(Global(module[:200], name[:200])))

    def refer(self, key: object) -> None:
        self.stack.append(storage_of(key))

    def take(self, count: int) -> list[Any]:
        start = len(self.stack) - count
        if start < 0:
            raise self.refused("it takes what it never put")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def dict_of(self, _: object) -> None:
        items = self.since_mark()
        self.stack.append({})
        self.set_items(self.stack[-1], items)


_Step = Callable[[_Machine, Any], object]
_SET, _FROZENSET = Global("builtins", "set"), Global("builtins", "frozenset")
_EXTENSION = Global("copyreg", "extension")


def _push(make: Callable[[_Machine], object]) -> _Step:
    return lambda machine, _: machine.stack.append(make(machine))


def _fill(act: Callable[[_Machine, object, list[Any]], None], count: int | None = None) -> _Step:
    """Put the last ``count`` items, or all since the mark, into what lies below them."""

    def step(machine: _Machine, _: object) -> None:
        items = machine.since_mark() if count is None else machine.take(count)
        act(machine, machine.stack[-1], items)

    return step


_CONSTANTS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "FLOAT",
    "BINFLOAT",
})  # fmt: skip
_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda *_: None),
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
    "TUPLE1": _push(lambda machine: tuple(machine.take(1))),
    "TUPLE2": _push(lambda machine: tuple(machine.take(2))),
    "TUPLE3": _push(lambda machine: tuple(machine.take(3))),
    "DICT": _Machine.dict_of,
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "APPEND": _fill(_Machine.add_items, count=1),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _fill(_Machine.add_items)),
    "SETITEM": _fill(_Machine.set_items, count=2),
    "SETITEMS": _fill(_Machine.set_items),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": lambda machine, name: machine.stack.append(machine.named(_global(name))),
    "STACK_GLOBAL": _Machine.name,
    "INST": _Machine.make_named,
    "OBJ": _Machine.make,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new,
    "NEWOBJ_EX": _Machine.new_with_keywords,
    "BUILD": _Machine.build,
    "PERSID": _Machine.refer,
    "BINPERSID": lambda machine, _: machine.refer(machine.stack.pop()),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _push(lambda _: _EXTENSION)),
}


def read_pickle(data: bytes, path: str, *, records: bool = False) -> Any:
    """Return what a pickle would build, as plain containers, ``Opaque``, ``Storage`` and ``Tensor``.

    Args:
        data: the pickle.
        path: what an error calls it.
        records: it is DCP's ``.metadata``: nothing else has a place in it.

    Raises:
        HostileCheckpointError: it is no pickle, or none that a checkpoint would hold: it would run code.
        UnsupportedFormatError: it is too long to be read.
    """
    return read_pickles(data, path, count=1, records=records)[0][0]


def read_pickles(data: bytes, path: str, *, count: int, records: bool = False) -> tuple[list[Any], int]:
    """The first ``count`` of several pickles that follow each other, as torch wrote them before its zip format.

    Returns:
        What they would build, and how many bytes they take.

    Raises:
        HostileCheckpointError: one is no pickle, or none that a checkpoint would hold.
        UnsupportedFormatError: one is too long to be read.
    """
    if len(data) > MOST_BYTES:
        raise HostileCheckpointError(path=path, message=f"its pickle is refused: larger than {MOST_BYTES >> 20} MiB")
    values, at, names = [], 0, Names(anywhere=True)
    for _ in range(count):
        machine = _Machine(data[at:] if at else data, path, names)
        try:
            value, length = machine.run()
        except Odd as error:
            raise machine.refused(f"it {error}") from error
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            if isinstance(error, HostileCheckpointError | UnsupportedFormatError):
                raise
            raise machine.refused(f"it is damaged ({str(error)[:200]})") from error
        values.append(value)
        at += length
    for problem in (names.other_than_records() if records else names.problems())[:1]:
        raise machine.refused(f"it {problem}")
    return values, at


def _global(text: str) -> Global:
    module, _, name = text.partition(" ")
    return Global(module[:200], name[:200])
