"""The structure of a torch archive: ``data.pkl`` with tensors replaced by references to storages.

``strict`` admits only what ``torch.load(weights_only=True)`` admits, and names what it does not. Otherwise anything goes that
``torch.save`` takes. Follows ``torch.serialization`` (protocol 2, ``persistent_id`` tuples), which reads the result.
"""

from __future__ import annotations

import codecs
import io
import logging
import pickle
import secrets
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch._tensor import _rebuild_from_type_v2
from torch.storage import TypedStorage, UntypedStorage

from safe_ckpt.core.formats import dtypes, zip_archive
from safe_ckpt.core.formats.file_plan import FilePlan, is_unresolved
from safe_ckpt.core.formats.refusals import changed_meanwhile, refuse_short, unchanging
from safe_ckpt.core.formats.zip_archive import Record
from safe_ckpt.errors import StateError

logger = logging.getLogger(__name__)

_MOST_INT_BITS = 255 * 8 - 1  # the weights_only unpickler knows integers of up to 255 bytes
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_FACTS = {torch.Size, torch.dtype, torch.device, torch.layout, torch.qscheme}
_ALLOWED = {*_FACTS, OrderedDict, Counter, complex, bytearray, set}
_CLASSES = {*_ALLOWED, *_TENSOR_TYPES, *torch._storage_classes}
_WITHOUT_STORAGE = ("meta", "xla", "maia", "mtia", "lazy")  # torch has another form for their tensors
_SHARE_BYTES = (torch.quint4x2, torch.quint2x4)
_unpickler: Any = torch.serialization._weights_only_unpickler  # type: ignore[attr-defined]
_FUNCTION_HOMES = ("torch._utils", "torch._tensor", "torch.serialization", "_codecs")


# The types of storage that the format knows by name; other dtypes go as bytes with a dtype beside them.
STORAGES: Mapping[torch.dtype, Any] = {
    getattr(torch, dtype): getattr(torch, name) for name, dtype in dtypes.STORAGES.items() if name != "UntypedStorage"
}
_NEVER_STORAGES = frozenset({str, float, bool, type(None), tuple, list, dict, OrderedDict, torch.Tensor})
_SMALL_INT = 1 << 62
ARCHIVE = "archive"
_MOST_MARKS = 1000
_MOST_STORAGES = 150_000  # with more, the directory of the archive is larger than ``manifest.open_archive`` reads


class _Storage(NamedTuple):
    """Stands for a storage in the structure; only its reference is pickled."""

    untyped: UntypedStorage
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True, kw_only=True)
class Pickled:
    """``data.pkl`` and the storages it refers to, by key, each storage once."""

    data: bytes
    storages: Mapping[str, UntypedStorage]


class _EmptyBytes(Exception):
    """There are empty bytes, which protocol 2 writes in a way that weights_only refuses."""


class _MixedDtypes(Exception):
    """Two tensors view one storage with different dtypes."""


def pickle_state(obj: object, *, strict: bool, key: str) -> Pickled:
    """Pickle ``obj`` apart from the bytes of its tensors.

    Args:
        obj: what to pickle.
        strict: refuse what ``torch.load(weights_only=True)`` would refuse.
        key: the name of ``obj``, for messages.

    Raises:
        StateError: something in it cannot be saved; names where it is.
    """
    untyped = False
    for _ in range(3):
        try:
            return _pickle(obj, strict=strict, untyped=untyped)
        except _MixedDtypes:
            untyped = True
        except _EmptyBytes:
            obj = _without_empty_bytes(obj)
        except RecursionError as error:
            raise StateError(key=key, message="it is nested too deeply") from error
        except Exception as error:
            where, cause = _locate(obj, key, error, strict=strict)
            message = cause.message if isinstance(cause, StateError) else str(cause)
            told = StateError(key=where, message=message or type(cause).__name__)
            raise changed_meanwhile(cause, where) or changed_meanwhile(error, key) or told from error
    message = "empty bytes lie where they cannot be replaced: inside an object or as a dict key"
    raise StateError(key=key, message=message)


def saved_bytes(obj: object, *, strict: bool, key: str) -> bytes:
    """Return the bytes that ``torch.save`` writes, of an object that is small.

    Raises:
        StateError: as ``pickle_state``.
    """
    pickle_state(obj, strict=strict, key=key)  # says what cannot be saved, and where it is
    buffer = io.BytesIO()
    try:
        torch.save(_without_empty_bytes(obj) if strict else obj, buffer)
    except Exception as error:  # several dtypes of one memory, which only our own archive has
        raise StateError(key=key, message=str(error)) from error
    return buffer.getvalue()


def _pickle(obj: object, *, strict: bool, untyped: bool) -> Pickled:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, strict=strict, untyped=untyped)
    pickler.dump(obj)
    return Pickled(data=buffer.getvalue(), storages=pickler.storages)


class _Refused(Exception):
    pass


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, *, strict: bool, untyped: bool) -> None:
        super().__init__(buffer, protocol=2)
        self.storages: dict[str, UntypedStorage] = {}
        self._strict = strict
        self._untyped = untyped
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        # Asked for every object of the structure, so the frequent ones come first.
        kind = type(obj)
        if kind in _NEVER_STORAGES or (kind is int and -_SMALL_INT < obj < _SMALL_INT):
            return None
        if kind is _Storage:
            return self._reference(obj.untyped, obj.dtype, STORAGES[obj.dtype], obj.elements)
        if kind is TypedStorage:
            named = getattr(torch, obj._pickle_storage_type())
            return self._reference(obj._untyped_storage, obj.dtype, named, obj._size())
        if kind is UntypedStorage:
            return self._reference(obj, torch.uint8, UntypedStorage, obj.nbytes())
        if self._strict:
            if kind is bytes and not obj:
                raise _EmptyBytes
            if kind is int and obj.bit_length() > _MOST_INT_BITS:
                raise _Refused(f"an integer of {obj.bit_length()} bits; the most is {_MOST_INT_BITS}: save it as text")
            if kind is frozenset:
                raise _Refused("a frozenset; torch.load(weights_only=True) refuses it: save a set")
        return None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if self._strict:
            _admit(obj, kind)
        if isinstance(obj, torch.Tensor):
            refuse_short(kind.__qualname__, obj)
        if kind is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        storage = obj.untyped_storage()
        hooks: OrderedDict[Any, Any] = OrderedDict()
        facts = (obj.storage_offset(), tuple(obj.size()), obj.stride(), obj.requires_grad, hooks)
        left: tuple[Any, ...] = ()
        if is_unresolved(obj):
            left = (torch._utils.get_tensor_metadata(obj),)  # type: ignore[no-untyped-call]
        if (self._untyped or obj.dtype not in STORAGES) and obj.requires_grad:
            # torch's own form requires the gradient before the tensor has its memory, and no torch.load takes it.
            inner = (storage, *facts[:3], False, hooks, obj.dtype, *left)
            facts_of_type = (torch._utils._rebuild_tensor_v3, torch.Tensor, inner, {"requires_grad": True})
            return _rebuild_from_type_v2, facts_of_type
        if self._untyped:
            return torch._utils._rebuild_tensor_v3, (storage, *facts, obj.dtype, *left)
        if obj.dtype not in STORAGES:
            return NotImplemented
        # What torch's own reduction comes to, at a fraction of its time: there are tens of thousands in a state.
        typed = _Storage(storage, obj.dtype, storage.nbytes() // obj.element_size())
        return torch._utils._rebuild_tensor_v2, (typed, *facts, *left)

    def _reference(self, storage: UntypedStorage, dtype: torch.dtype, kind: type, count: int) -> tuple[Any, ...]:
        device = storage.device.type
        address = storage.data_ptr() if device != "meta" else 0
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise _MixedDtypes
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[key] = storage
        place = "cpu" if device == "cpu" else torch.serialization.location_tag(storage)
        return ("storage", kind, key, place, count)


def _is_plain(tensor: torch.Tensor) -> bool:
    odd = tensor.is_quantized or tensor.is_nested or tensor._backward_hooks
    if odd or tensor.layout is not torch.strided or (not tensor.is_cpu and tensor.device.type in _WITHOUT_STORAGE):
        return False
    return not getattr(tensor, "__dict__", None)


def _admit(obj: Any, kind: type) -> None:
    if isinstance(obj, torch.Tensor):
        if kind not in _TENSOR_TYPES:
            raise _Refused(f"a tensor subclass {kind.__qualname__}; save a plain tensor (a DTensor's full_tensor())")
        if obj.is_meta:
            raise _Refused("a tensor on the meta device: it has no data. Materialise it first")
        if obj.dtype in _SHARE_BYTES:
            raise _Refused(f"a {obj.dtype} tensor, which torch can not copy: save its dequantize()")
        return
    if kind in _ALLOWED or kind is _Empty or (isinstance(obj, type) and obj in _CLASSES):
        return
    hint = ""
    if isinstance(obj, FunctionType | BuiltinFunctionType) and obj.__module__ in _FUNCTION_HOMES:
        name = f"{obj.__module__}.{obj.__qualname__}"  # rebuilds tensors of a kind, or bytes
        if name in _unpickler._get_allowed_globals() or name in _unpickler._get_user_allowed_globals():
            return
        raise _Refused(f"a tensor of a kind that needs {name}: this release's torch.load(weights_only=True) refuses it")
    if kind.__module__.split(".")[0] == "numpy":
        hint = ": convert it, an array with torch.from_numpy(), a number with .item()"
    raise _Refused(f"a {kind.__module__}.{kind.__qualname__}; torch.load(weights_only=True) refuses it{hint}")


class _Empty:
    """Pickles as empty bytes in the form that weights_only admits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def _without_empty_bytes(obj: Any, done: dict[int, Any] | None = None) -> Any:
    kind = type(obj)
    if kind is bytes and not obj:
        return _Empty()
    if kind not in (dict, OrderedDict, list, tuple):
        return obj
    done = {} if done is None else done  # what lies in several places does so in the copy
    if id(obj) not in done:
        done[id(obj)] = _copied_without(obj, kind, done)
    return done[id(obj)]


def _copied_without(obj: Any, kind: Any, done: dict[int, Any]) -> Any:
    if kind in (list, tuple):
        return kind(_without_empty_bytes(value, done) for value in obj)
    copied = kind((key, _without_empty_bytes(value, done)) for key, value in obj.items())
    if kind is OrderedDict:
        vars(copied).update(vars(obj))
    return copied


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"[{key!r}]", value
    elif isinstance(obj, Sequence) and not isinstance(obj, str | bytes | bytearray):
        for index, value in enumerate(obj):
            yield f"[{index}]", value


def _locate(obj: Any, key: str, error: Exception, *, strict: bool) -> tuple[str, Exception]:
    """Find the innermost element that fails by itself. Slow, and only used to say where."""
    for step, child in _children(obj):
        try:
            _pickle(child, strict=strict, untyped=True)
        except _EmptyBytes:
            continue
        except Exception as cause:
            return _locate(child, key + step, cause, strict=strict)
    return key, error


def torch_plan(path: str, obj: object, *, strict: bool, key: str, floats: bool = False) -> FilePlan:
    """A torch archive. Storages first, at page-aligned offsets where they are large, then the pickled structure.

    Args:
        path: relative to the checkpoint.
        obj: what is saved.
        strict: refuse what ``torch.load(weights_only=True)`` would refuse.
        key: the name of ``obj``, for messages.
        floats: find out where in the file the floats of ``obj`` lie, which is plain data then; see ``FilePlan.floats``.

    Raises:
        StateError: something in ``obj`` cannot be saved; names where it is.
    """
    with unchanging(key):
        pickled, places = _pickle_with_places(obj, strict=strict, key=key, floats=floats)
    if len(pickled.storages) > _MOST_STORAGES:
        message = f"{len(pickled.storages)} tensors are more than the {_MOST_STORAGES} that one file is read with"
        raise StateError(key=key, message=message)
    records: list[Record] = []
    pieces: list[tuple[int, bytes]] = []
    tensors: list[tuple[int, torch.Tensor]] = []
    at = 0

    def add(name: str, size: int) -> Record:
        nonlocal at
        record = zip_archive.place_record(f"{ARCHIVE}/{name}", size, at)
        pieces.append((record.header_offset, zip_archive.local_header(record)))
        records.append(record)
        at = record.end
        return record

    for name, storage in pickled.storages.items():
        record = add(f"data/{name}", storage.nbytes())
        if storage.nbytes():
            as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            tensors.append((record.data_offset, as_bytes))
    structure = add("data.pkl", len(pickled.data)).data_offset
    for name, data in (("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        pieces.append((add(name, len(data)).data_offset, data))
    pieces.append((structure, pickled.data))  # last: it may be another one in the next file of this layout
    return FilePlan(
        path=path,
        length=at,
        pieces=pieces,
        tensors=tensors,
        records=tuple(records),
        floats=places,
        fixed=len(pieces) - 1,
    )


def _pickle_with_places(obj: object, *, strict: bool, key: str, floats: bool) -> tuple[Pickled, Sequence[int] | None]:
    """Pickled, and where in ``data.pkl`` its floats lie, in the order in which they are pickled; None if that is not known."""
    found: list[float] = []
    marks: list[bytes] = []
    if floats:
        marked = _with_marks(obj, found, marks)
    if not 0 < len(found) <= _MOST_MARKS:
        return pickle_state(obj, strict=strict, key=key), () if floats and not found else None
    pickled = pickle_state(marked, strict=strict, key=key)
    # A float is pickled as the letter G and its 8 bytes.
    if any(pickled.data.count(b"G" + mark) != 1 for mark in marks):
        return pickle_state(obj, strict=strict, key=key), None
    places = [pickled.data.index(b"G" + mark) + 1 for mark in marks]
    data = with_floats(pickled.data, places, struct.pack(f">{len(found)}d", *found))
    return Pickled(data=data, storages=pickled.storages), places


def _with_marks(obj: Any, found: list[float], marks: list[bytes]) -> Any:
    """A copy of plain nested data with a number in the place of each float that is nowhere else."""
    kind = type(obj)
    if kind is float:
        found.append(obj)
        marks.append(b"C" + secrets.token_bytes(7))  # any such bytes are a finite number
        return struct.unpack(">d", marks[-1])[0]
    if kind is dict:
        return {key: _with_marks(value, found, marks) for key, value in obj.items()}
    if kind is OrderedDict:
        copied = OrderedDict((key, _with_marks(value, found, marks)) for key, value in obj.items())
        vars(copied).update(vars(obj))
        return copied
    if kind is list or kind is tuple:
        return kind(_with_marks(value, found, marks) for value in obj)
    return obj


def with_floats(data: bytes, places: Sequence[int], floats: bytes) -> bytes:
    """The same bytes with other floats.

    Args:
        data: pickled.
        places: of the floats in it.
        floats: 8 bytes for each, big-endian.
    """
    changed = bytearray(data)
    for number, place in enumerate(places):
        changed[place : place + 8] = floats[8 * number : 8 * number + 8]
    return bytes(changed)
