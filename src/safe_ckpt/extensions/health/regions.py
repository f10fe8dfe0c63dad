"""The places of a file's floating-point numbers, read from the file itself.

A safetensors file says it in its header, a torch archive in its ``data.pkl``. Nothing of a pickle is executed: whatever it
names, a stand-in takes its place. The writer process uses this, so neither torch nor numpy is needed.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from safe_ckpt.core.formats.dtypes import DTYPES, ITEM_BYTES, STORAGES
from safe_ckpt.core.formats.file_plan import KnownBytes
from safe_ckpt.core.formats.zip_archive import Record

if TYPE_CHECKING:
    import torch

_FLOAT_TYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
FLOATS = {name: ITEM_BYTES[name] for name in _FLOAT_TYPES}
"""Types whose numbers are looked at -> bytes of one."""
_COMPLEX = {"complex64": "float32", "complex128": "float64"}  # a number is two of them
_DATA = "data/"
_REBUILDING = ("torch._utils", "torch._tensor")
_CONTAINERS = ("collections", "types", "UserDict", "UserList")  # the last two as Python 2 called them: pickle does


class Region(NamedTuple):
    """Floating-point numbers in a row.

    Attributes:
        name: of the tensor within its file.
        dtype: one of ``FLOATS``.
        offset: of the first byte in the file.
        length: in bytes.
        of_optimizer: whether it has the place of an optimizer's state: below ``state``, beside ``param_groups``.
    """

    name: str
    dtype: str
    offset: int
    length: int
    of_optimizer: bool = False


def of_file(frame: memoryview | KnownBytes, records: Sequence[Record] | None) -> list[Region]:
    """The regions of a file, by offset. None in a file of another kind.

    Args:
        frame: the file; its tensors need not be there yet.
        records: for a torch archive, where its members lie; None for any other file.

    Raises:
        Exception: anything, where the file is not what it seems to be.
    """
    found = _of_safetensors(frame) if records is None else _of_archive(frame, records)
    found.sort(key=lambda region: (region.offset, -region.length))
    kept: list[Region] = []
    for region in found:  # of what lies in two tensors the larger one is looked at
        if not kept or region.offset >= kept[-1].offset + kept[-1].length:
            kept.append(region)
    return kept


def _of_safetensors(frame: memoryview | KnownBytes) -> list[Region]:
    size = int.from_bytes(frame[:8], "little")
    if len(frame) < 10 or size > len(frame) - 8 or frame[8:9] != b"{":
        return []
    header = json.loads(bytes(frame[8 : 8 + size]))
    header.pop("__metadata__", None)
    groups = {name.partition("param_groups.")[0] for name in header if "param_groups." in name}
    regions, states = [], tuple(f"{start}state." for start in groups)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = _numbers_of(DTYPES.get(entry["dtype"], ""))
        if dtype and end > begin:
            regions.append(Region(name, dtype, 8 + size + begin, end - begin, name.startswith(states)))
    return regions


def _of_archive(frame: memoryview | KnownBytes, records: Sequence[Record]) -> list[Region]:
    places = {record.name.partition("/")[2]: record for record in records}
    structure = places["data.pkl"]
    pickled = bytes(frame[structure.data_offset : structure.data_offset + structure.size])
    whole = _Structure(io.BytesIO(pickled)).load()
    found: dict[tuple[int, int], Region] = {}
    for name, tensor, of_optimizer in _tensors(whole):
        place, dtype = places.get(_DATA + tensor.storage.key), _numbers_of(tensor.dtype)
        if place is None or not dtype:
            continue
        item_bytes = ITEM_BYTES[tensor.dtype]
        begin, length = tensor.offset * item_bytes, tensor.extent * item_bytes
        if 0 < length <= place.size - begin:
            region = Region(name, dtype, place.data_offset + begin, length, of_optimizer)
            found.setdefault((region.offset, region.length), region)
    return list(found.values())


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    extent: int
    dtype: str


class _Named(NamedTuple):
    """A global that says no more than its name, such as a dtype."""

    name: str


class _Anything:
    """Stands for any class and function, and for what they make. It keeps the items that are put into it."""

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        """Take any arguments."""
        made = super().__new__(cls)
        made.arguments = _pairs(arguments[0] if len(arguments) == 1 else arguments)
        made.items = []
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.arguments: list[tuple[Any, Any]]
        self.items: list[tuple[Any, Any]]

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return self

    def __setstate__(self, _: Any) -> None:
        pass  # attributes of an object of somebody's own

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """As a list's."""
        self.items.append((len(self.items), value))

    def extend(self, values: Any) -> None:
        """As a list's."""
        for value in values:
            self.append(value)

    def add(self, value: Any) -> None:
        """As a set's."""
        self.append(value)

    def parts(self) -> list[tuple[Any, Any]]:
        """Its parts, by keys or numbers."""
        return [*self.arguments, *self.items]


class _Container(_Anything):
    """Stands for a class of Python's own that keeps its items in an attribute."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            self.items += _pairs(state["data"] if state.keys() == {"data"} else state)


class _Odd(_Anything):
    """Stands for what rebuilds a tensor that is not looked at, and for that tensor."""

    def parts(self) -> list[tuple[Any, Any]]:
        """None: its parts are no tensors of the state."""
        return []


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a container, by keys or numbers. A value that is no container is its own part."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return list(value.items())
    if kind in (list, tuple):
        return list(enumerate(value))
    return [(0, value)]


class _Structure(pickle.Unpickler):  # unpickles: stand-ins alone
    """Gives the structure with ``_Tensor`` in the place of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in _REBUILDING and name in _REBUILT:
            return _REBUILT[name]
        if module == "torch" and (name in STORAGES or name in ITEM_BYTES):
            return _Named(name)
        if module == "torch.nn.parameter" and name == "Parameter":
            return _parameter
        if module in _CONTAINERS:
            return _Container
        return _Odd if module in _REBUILDING else _Anything

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[1]
        return _Storage(STORAGES.get(kind.name, "") if isinstance(kind, _Named) else "", str(pid[2]))


def _tensor(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *more: Any) -> Any:
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    if extent > math.prod(size):  # what lies between its elements is not its own, and may be anything
        return None
    named = more[2] if len(more) > 2 else None  # ``_rebuild_tensor_v3`` says the type
    if len(more) > 2 and not isinstance(named, _Named):
        return None
    return _Tensor(storage, offset, extent, named.name if isinstance(named, _Named) else storage.dtype)


def _parameter(data: Any = None, *_: Any) -> Any:
    return data


def _of_a_type(rebuild: Any = None, _: Any = None, arguments: Sequence[Any] = (), *__: Any) -> Any:
    """A tensor of a subclass, or with attributes of its own."""
    return rebuild(*arguments) if rebuild in _REBUILT.values() else None


_REBUILT: dict[str, Any] = {
    "_rebuild_tensor_v2": lambda storage, offset, size, stride, *_: _tensor(storage, offset, size, stride),
    "_rebuild_tensor_v3": _tensor,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_from_type_v2": _of_a_type,
}


def _tensors(whole: Any) -> Iterator[tuple[str, _Tensor, bool]]:
    """The tensors by name, and whether each is of an optimizer. Each container is walked once: else this might never end."""
    seen: set[int] = set()
    waiting = [("", whole, False)]
    while waiting:
        name, value, within = waiting.pop()
        kind = type(value)
        if kind is _Tensor:
            yield name, value, within
        elif kind in (dict, OrderedDict, list, tuple, _Anything, _Container) and id(value) not in seen:
            seen.add(id(value))
            pairs = value.parts() if isinstance(value, _Anything) else _pairs(value)
            optimizer = any(key == "param_groups" for key, _ in pairs)
            waiting += [
                (f"{name}.{key}" if name else str(key), inner, within or (optimizer and key == "state"))
                for key, inner in reversed(pairs)
            ]


def _numbers_of(dtype: str) -> str:
    """The type of the numbers in a tensor of this one; "" where they are not looked at."""
    return dtype if dtype in FLOATS else _COMPLEX.get(dtype, "")


def rows_of(name: str, tensor: torch.Tensor, offset: int) -> list[Region]:
    """The region of a tensor whose elements lie in a row from ``offset`` on; none where it is not looked at.

    What lies beside it is not known, so its name says whether it is an optimizer's: ``state``, a parameter, and what of it.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = _numbers_of(dtype)
    of_optimizer = "state" in name.split(".")[:-2]
    return [Region(name, kind, offset, tensor.numel() * tensor.element_size(), of_optimizer)] if kind else []
