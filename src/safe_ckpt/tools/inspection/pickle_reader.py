"""The structure of a pickle, without running it: no class of it is imported, no function is called.

A pickle is a program for a stack machine. Here it runs on the one that Python has in Python, with stand-ins for what it names.
Each step is counted, and those are replaced in which a few bytes demand much memory or time: C's machine, which a resume looks
with, lets nobody do that. What would run code ``core.formats.pickles`` says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from safe_ckpt.core.formats.pickles import Made, Named, Odd
from safe_ckpt.errors import HostileCheckpointError, UnsupportedFormatError
from safe_ckpt.tools.inspection.pickle_objects import Bounded, Ordered, TooLong, key_of, storage_of

MOST_BYTES = 64 << 20
"""A larger pickle is refused: 20,000 tensors take 4 MiB."""
_MOST_WORK = 4_000_000  # opcodes, and elements that one opcode copies
_LARGE_BYTES = 8 << 20  # a smaller one that takes so much work is no tool's; a larger one may have 30,000 tensors
_LONGEST_NAME = 200


class _Machine(pickle._Unpickler):  # unpickles: stand-ins alone
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    memo: dict[int, Any]

    def __init__(self, stream: io.BytesIO, names: Bounded) -> None:
        super().__init__(stream, encoding="latin-1")
        self._names = names
        names.left = _MOST_WORK
        self.dispatch = _Steps(names)  # type: ignore[misc]

    def find_class(self, module: str, name: str) -> Any:
        return self._names.find(module[:_LONGEST_NAME], name[:_LONGEST_NAME])

    def persistent_load(self, pid: Any) -> Any:
        return storage_of(pid) or self.opaque("torch", "storage")

    def opaque(self, module: str, name: str) -> Any:
        kind = self._names.stand_in(module, name)
        return kind.__new__(kind)

    def refuse(self) -> None:
        raise ValueError("no tool writes such an opcode into a checkpoint")

    def length(self) -> int:
        return int.from_bytes(self.read(8), "little")

    def byte_array(self) -> None:
        self.append(bytearray(self.read(self.length())))

    def put(self) -> None:
        key = int(self.readline())
        if not 0 <= key < 1 << 32:  # else a pickle could choose numbers that collide
            raise ValueError("it keeps more than it has")
        self.memo[key] = self.stack[-1]

    def pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self.set_items(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key_of(key)] = value

    def frozen_set(self) -> None:
        items = self.pop_mark()
        self.append(self.opaque("builtins", "frozenset"))
        self.stack[-1].items = items

    def reduce(self) -> None:
        call, args = self.pop(2)
        self.append(call(*_row(args)))

    def new(self, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        kind, args = self.pop(2)
        if not isinstance(kind, Named):
            raise TypeError("an object of no class")
        make: Any = kind.__new__
        self.append(make(kind, *_row(args), **given))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Named | Made | Ordered):  # of others the attributes do not matter
            target.__setstate__(state)


def _row(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, tuple):  # a long text would become as many objects
        raise TypeError("arguments that are none")
    return args


class _Steps(dict[int, Callable[[Any], Any]]):
    """The machine's steps by opcode. Each is counted."""

    def __init__(self, names: Bounded) -> None:
        super().__init__(_STEPS)
        self._names = names

    def __getitem__(self, opcode: int) -> Callable[[Any], Any]:
        self._names.spend(1)
        return super().__getitem__(opcode)


_UNUSED = pickle.EXT1 + pickle.EXT2 + pickle.EXT4 + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER
_STEPS: dict[int, Callable[[Any], Any]] = {
    **pickle._Unpickler.dispatch,
    **dict.fromkeys(_UNUSED, _Machine.refuse),
    pickle.FRAME[0]: _Machine.length,
    pickle.PUT[0]: _Machine.put,
    pickle.BYTEARRAY8[0]: _Machine.byte_array,
    pickle.DICT[0]: _Machine.make_dict,
    pickle.SETITEM[0]: lambda machine: machine.set_items(machine.pop(2)),
    pickle.SETITEMS[0]: lambda machine: machine.set_items(machine.pop_mark()),
    pickle.EMPTY_SET[0]: lambda machine: machine.append(machine.opaque("builtins", "set")),
    pickle.FROZENSET[0]: _Machine.frozen_set,
    pickle.REDUCE[0]: _Machine.reduce,
    pickle.NEWOBJ[0]: _Machine.new,
    pickle.NEWOBJ_EX[0]: lambda machine: machine.new(*machine.pop(1)),
    pickle.BUILD[0]: _Machine.build,
}
"""Python's own, but that a pickle chooses neither what is called nor how long something takes."""


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
        raise _refused(path, f"larger than {MOST_BYTES >> 20} MiB")
    values, stream, names = [], io.BytesIO(data), Bounded()
    for _ in range(count):
        left_bytes = len(data) - stream.tell()
        try:
            values.append(_Machine(stream, names).load())
        except TooLong:
            if left_bytes < _LARGE_BYTES:
                raise _refused(path, "it is too long") from None
            message = f"its pickle of {left_bytes >> 20} MiB is longer than is looked at"
            raise UnsupportedFormatError(path=path, message=message) from None
        except Odd as error:
            raise _refused(path, f"it {error}") from error
        except EOFError as error:
            raise _refused(path, "it does not end") from error
        except Exception as error:  # whatever a pickle machine makes of bytes that are none
            raise _refused(path, f"it is damaged ({str(error)[:200]})") from error
    for problem in (names.other_than_records() if records else names.problems())[:1]:
        raise _refused(path, f"it {problem}")
    return values, stream.tell()


def _refused(path: str, why: str) -> HostileCheckpointError:
    return HostileCheckpointError(path=path, message=f"its pickle is refused: {why}")
