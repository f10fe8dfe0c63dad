"""Fingerprints of all that the plan of an item depends on, gathered in a fraction of the time that planning takes.

Where two fingerprints have equal facts, both states are planned alike, to the byte, but for their values: the same names in
the same order, types, shapes, strides and devices, in the same memory; so the same tensors share memory, too. Addresses are
compared and nothing is held, so a remembered fingerprint keeps no tensor alive. What is asked of every tensor goes through
``map``: a loop of Python would take longer than the answers.

There are fingerprints of modules and optimizers whose state is torch's own, and of data of exact dicts, lists, tuples, numbers,
text and tensors. What has none is planned anew each time.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter, eq, itemgetter
from typing import Any, TypeVar

import torch

from safe_ckpt.core.formats.file_plan import is_unresolved
from safe_ckpt.core.formats.safetensors import SAFETENSORS_DTYPES
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.state.overlap import KNOWN

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_SCALARS = frozenset({int, str, bool, type(None)})
_DTYPES = frozenset(dtype for dtype in SAFETENSORS_DTYPES if not dtype.is_complex)
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_OWN_WAYS = frozenset({"state_dict", "_save_to_state_dict", "get_extra_state"})
_Tensor: Any = torch.Tensor
_BYTES: Any = torch.UntypedStorage.nbytes
_MODULES_OWN: Mapping[str, Any] = {way: getattr(torch.nn.Module, way) for way in _OWN_WAYS}
_OPTIMIZERS_OWN: Mapping[str, Any] = {"state_dict": torch.optim.Optimizer.state_dict}


# Of every tensor. What is compared on the way is not kept: so many small objects would set the garbage collector going.
_ASKED: tuple[Callable[[Any], Any], ...] = (
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("shape"),
    _Tensor.is_contiguous,
    _Tensor.storage_offset,
    _Tensor.data_ptr,
    _Tensor.is_neg,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fingerprint:
    """See above. It holds tensors; ``remember`` gives what may be kept.

    Attributes:
        facts: what a plan depends on besides the tensors.
        tensors: those of the state, of sharded ones this rank's parts.
        floats: numbers that a plan holds at known places, in the order in which they are pickled.
        sharded: whether some are parts of larger ones.
        whole: a module's tensors, or an optimizer's parameters, as they are.
        normed: whether a forward pass may change a parameter (``max_norm`` of an embedding).
    """

    facts: tuple[Any, ...]
    tensors: Sequence[torch.Tensor]
    whole: Sequence[torch.Tensor] = ()
    normed: bool = False
    floats: Sequence[float] = ()
    sharded: bool = False

    @property
    def float_bytes(self) -> bytes:
        """The floats, to the bit: what is no number equals itself here, and 0.0 is not -0.0."""
        return struct.pack(f">{len(self.floats)}d", *self.floats)

    def remember(self) -> Remembered | None:
        """Return what tells whether a later one is the same, without the tensors; None where nothing tells."""
        if not _DTYPES.issuperset(map(attrgetter("dtype"), self.tensors)):
            return None
        if any(tensor.is_meta or is_unresolved(tensor) or tensor.is_inference() for tensor in self.tensors):
            return None
        try:
            asked = tuple(list(map(ask, self.tensors)) for ask in _ASKED)
            return Remembered(facts=self.facts, asked=asked, strides=_strides(self.tensors), room=_room(self.tensors))
        except (RuntimeError, TypeError):  # such as of a sparse tensor, which has no address
            return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Remembered:
    """The part of a fingerprint that is kept.

    Attributes:
        facts: its facts.
        asked: the answers of its tensors.
        strides: of those tensors that are not contiguous.
        room: bytes of their storages: a file may have them whole, and a tensor may not be read beyond.
    """

    facts: tuple[Any, ...]
    asked: tuple[list[Any], ...]
    strides: list[Any]
    room: list[int]

    def same_as(self, now: Fingerprint) -> bool:
        """Whether a plan that was made then is what would be made now."""
        if len(now.tensors) != len(self.asked[0]) or now.facts != self.facts:
            return False
        try:
            answers = zip(_ASKED, self.asked, strict=True)
            same = all(all(map(eq, map(ask, now.tensors), known)) for ask, known in answers)
            same = same and _room(now.tensors) == self.room
            return same and (all(self.asked[3]) or _strides(now.tensors) == self.strides)
        except (RuntimeError, TypeError):  # such as of a tensor that is sparse now
            return False


def _strides(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [tensor.stride() for tensor in tensors if not tensor.is_contiguous()]


def _room(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(_BYTES, map(_Tensor.untyped_storage, tensors)))


class _Unknown(Exception):
    """There is something that this module cannot answer for."""


_V = TypeVar("_V")


def of(find: Callable[[_V], Fingerprint], value: _V) -> Fingerprint | None:
    """Return the fingerprint that one of the functions below finds; None where there is none."""
    try:
        return find(value)
    # RuntimeError and TypeError: such as of a tensor that has no address.
    except (_Unknown, RuntimeError, TypeError, AttributeError, ValueError, pickle.PicklingError):
        return None


def of_module(module: torch.nn.Module) -> Fingerprint:
    """The fingerprint of a module whose state is torch's own.

    Of one that FSDP2 has sharded this undoes what a forward pass without a backward pass has left behind, as asking for its
    ``state_dict`` does.
    """
    modules = list(module.modules())
    classes = list(map(type, modules))
    if not all(_is_torchs(kind, way, _MODULES_OWN) for kind in set(classes) for way in _OWN_WAYS):
        raise _Unknown
    if any(map(attrgetter("_state_dict_hooks"), modules)) or not all(map(_OWN_WAYS.isdisjoint, map(vars, modules))):
        raise _Unknown
    for part in modules:
        if part._state_dict_pre_hooks:
            _run_known_hooks(part)
    parameters, buffers, children = (
        list(map(attrgetter(kind), modules)) for kind in ("_parameters", "_buffers", "_modules")
    )
    held = [*_values(parameters), *_values(buffers)]
    numbers = dict(zip(map(id, modules), count(), strict=False))
    whole = [tensor for tensor in held if tensor is not None]
    tensors, kinds, sharded = _parts(whole)
    versions = list(map(attrgetter("_version"), modules))
    if not {int}.issuperset(map(type, versions)):
        raise _Unknown
    embeds = any(issubclass(kind, _EMBEDDINGS) for kind in set(classes))
    normed = embeds and any(getattr(part, "max_norm", None) is not None for part in modules)
    facts = (
        classes,
        *(list(chain.from_iterable(named)) for named in (parameters, buffers, children)),
        *(list(map(len, named)) for named in (parameters, buffers, children)),
        list(map(numbers.get, map(id, _values(children)))),
        list(map(frozenset, map(attrgetter("_non_persistent_buffers_set"), modules))),
        versions,
        list(map(type, held)),
        list(map(attrgetter("requires_grad"), whole)),
        *kinds,
    )
    return Fingerprint(facts=facts, tensors=tensors, sharded=sharded, whole=whole, normed=normed)


def _is_torchs(kind: type, way: str, own: Mapping[str, Any]) -> bool:
    """Whether a class saves its state as torch has it, and not in another way that it, or somebody else, has given it."""
    return getattr(kind, way) is own[way] and own[way].__module__.startswith("torch.")


def _run_known_hooks(module: torch.nn.Module) -> None:
    for hook in module._state_dict_pre_hooks.values():
        if not hook.__module__.startswith("torch.distributed.fsdp._fully_shard."):
            raise _Unknown
        hook(module, "", False)  # noqa: FBT003 - as torch calls it


def _values(named: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, named))


def of_optimizer(optimizer: torch.optim.Optimizer) -> Fingerprint:
    """The fingerprint of an optimizer whose state is torch's own."""
    if type(optimizer) not in KNOWN or "state_dict" in vars(optimizer):
        raise _Unknown
    if not _is_torchs(type(optimizer), "state_dict", _OPTIMIZERS_OWN):
        raise _Unknown
    if optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:
        raise _Unknown
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = dict(zip(map(id, reversed(owned)), range(len(owned) - 1, -1, -1), strict=True))
    stepped = list(map(numbers.get, map(id, optimizer.state)))
    if None in stepped:
        raise _Unknown
    walk = _Walk()
    walk.rows(list(optimizer.state.values()))
    walk.value([{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups])
    tensors, kinds, sharded = _parts(walk.tensors, picklable=True)
    facts = (
        type(optimizer),
        list(map(len, map(itemgetter("params"), optimizer.param_groups))),
        list(map(numbers.get, map(id, owned))),
        stepped,
        walk.facts,
        *kinds,
    )
    sharded = sharded or not _PLAIN.issuperset(map(type, owned))
    return Fingerprint(facts=facts, tensors=tensors, floats=walk.floats, sharded=sharded, whole=owned)


def of_data(value: object) -> Fingerprint:
    """The fingerprint of exact dicts, lists, tuples, numbers, text and tensors."""
    walk = _Walk()
    walk.value(value)
    tensors, kinds, sharded = _parts(walk.tensors, picklable=True)
    return Fingerprint(facts=(walk.facts, *kinds), tensors=tensors, floats=walk.floats, sharded=sharded)


class _Walk:
    """Goes through nested data in the order in which it is pickled."""

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.floats: list[float] = []
        self.tensors: list[torch.Tensor] = []
        self._kinds = {*_PLAIN, *dtensor.dtensor_class()}
        self._seen: set[int] = set()

    def value(self, value: Any) -> None:
        """Take in one value and what is in it."""
        kind = type(value)
        self.facts.append(kind)
        if kind in self._kinds:
            self.tensors.append(value)
        elif kind is float:
            self.floats.append(value)
        elif kind in _SCALARS:
            self.facts.append(value)
        elif kind is dict or kind is OrderedDict:
            self._mapping(value, kind)
        elif kind is list:
            self._once(value)
            self._values(value)
        elif kind is tuple:  # where it lies does not matter: it cannot change
            self._values(value)
        else:
            raise _Unknown

    def rows(self, rows: Sequence[Any]) -> None:
        """Many small dicts, such as an optimizer's state has one for each parameter."""
        if not {dict}.issuperset(map(type, rows)):
            raise _Unknown
        self.facts += [list(map(len, rows)), list(chain.from_iterable(rows))]
        self._values(list(_values(rows)))

    def _mapping(self, value: Mapping[Any, Any], kind: type) -> None:
        self._once(value)
        keys = list(value)
        if not {str, int}.issuperset(map(type, keys)):
            raise _Unknown
        self.facts.append(keys)
        if kind is OrderedDict and vars(value):
            if vars(value).keys() != {"_metadata"}:
                raise _Unknown
            self.facts.append(pickle.dumps(vars(value)["_metadata"]))  # to the last type and order
        self._values(list(value.values()))

    def _once(self, value: object) -> None:
        # What is in two places is pickled once: such data is planned anew.
        if id(value) in self._seen:
            raise _Unknown
        self._seen.add(id(value))

    def _values(self, values: Sequence[Any]) -> None:
        kinds = list(map(type, values))
        self.facts.append(kinds)
        if self._kinds.issuperset(kinds):
            self.tensors += values
            return
        for value, kind in zip(values, kinds, strict=True):
            if kind in self._kinds:
                self.tensors.append(value)
            else:
                self.value(value)


def _parts(
    tensors: Sequence[torch.Tensor], *, picklable: bool = False
) -> tuple[Sequence[torch.Tensor], tuple[Any, ...], bool]:
    """Return this rank's parts, what else of the tensors a plan depends on, and whether some are parts.

    Args:
        tensors: of the state.
        picklable: they may be pickled as they are, which says more of them than their bytes.
    """
    kinds = list(map(type, tensors))
    sharded = not _PLAIN.issuperset(kinds)
    spread: list[Any] = []
    if sharded:
        if not {*_PLAIN, *dtensor.dtensor_class()}.issuperset(kinds):
            raise _Unknown
        spread = [tensor._spec for tensor in tensors if type(tensor) not in _PLAIN]  # type: ignore[attr-defined]
        tensors = [t if type(t) in _PLAIN else t._local_tensor for t in tensors]  # type: ignore[attr-defined]
        if not _PLAIN.issuperset(map(type, tensors)):
            raise _Unknown
    if picklable and (any(map(attrgetter("requires_grad"), tensors)) or any(map(attrgetter("__dict__"), tensors))):
        raise _Unknown
    return tensors, (kinds, spread), sharded
