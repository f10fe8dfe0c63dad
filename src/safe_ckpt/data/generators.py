"""Random generators as short text, and borrowing those of this process for a moment."""

from __future__ import annotations

import array
import base64
import contextlib
import ctypes
import io
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from safe_ckpt.core.state.rng import get_rng_state, set_rng_state

TORCH, PYTHON, NUMPY = "torch", "python", "numpy"
"""The generators of a process, by name."""


def to_text(state: torch.Tensor) -> str:
    """The state of a generator as text."""
    return _packed(_bytes(state))


def put_back(generator: torch.Generator | None, text: str) -> None:
    """Set a generator to what ``to_text`` gave."""
    state = torch.frombuffer(bytearray(_unpacked(text)), dtype=torch.uint8)
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


def all_to_text() -> str:
    """The generators of this process: Python's, numpy's and torch's."""
    buffer = io.BytesIO()
    torch.save({name: value for name, value in get_rng_state().items() if name != "cuda"}, buffer)
    return _packed(buffer.getvalue())


def put_all_back(text: str) -> None:
    """Set them to what ``all_to_text`` gave."""
    loaded: Mapping[str, Any] = torch.load(io.BytesIO(_unpacked(text)), weights_only=True)
    set_rng_state(loaded)


def snapshot(names: Iterable[str] = (TORCH, PYTHON, NUMPY)) -> dict[str, Any]:
    """Some generators of this process, as values that can be compared and sent. Without numpy's, where it is not in use."""
    taken: dict[str, Any] = {}
    for name in names:
        if name == TORCH:
            taken[name] = _bytes(torch.default_generator.get_state())
        elif name == PYTHON:
            taken[name] = random.getstate()
        elif (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            taken[name] = (kind, keys.tobytes(), *rest)
    return taken


def snapshot_to_text(taken: Mapping[str, Any]) -> dict[str, Any]:
    """What ``snapshot`` gave, as plain data."""
    text: dict[str, Any] = {}
    for name, state in taken.items():
        if isinstance(state, str | list):
            text[name] = state  # it is
        elif name == TORCH:
            text[name] = _packed(state)
        elif name == PYTHON:
            version, words, gauss = state
            text[name] = [version, _packed(array.array("I", words).tobytes()), gauss]
        else:
            kind, keys, position, has_gauss, cached = state
            text[name] = [str(kind), _packed(keys), int(position), int(has_gauss), float(cached)]
    return text


def put_snapshot_back(text: Mapping[str, Any]) -> None:
    """Set the generators of this process to what ``snapshot_to_text`` gave."""
    for name, state in text.items():
        if name == TORCH:
            put_back(None, state)
        elif name == PYTHON:
            version, words, gauss = state
            random.setstate((version, tuple(array.array("I", _unpacked(words))), gauss))
        else:
            import numpy

            kind, keys, *rest = state
            words_ = numpy.frombuffer(_unpacked(keys), dtype=numpy.uint32)
            numpy.random.set_state((kind, words_, *rest))  # noqa: NPY002 (it is the global one that data sets use)


@contextlib.contextmanager
def borrowed() -> Iterator[None]:
    """Within this block the generators of this process may be used; after it they are as before. Not those of devices."""
    before = taken()
    try:
        yield
    finally:
        set_to(before)


def taken() -> tuple[Any, Any, Any]:
    """What the generators of this process are, for ``set_to``."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None


def set_to(before: tuple[Any, Any, Any]) -> None:
    """Set them to what ``taken`` returned."""
    numpy = sys.modules.get("numpy")
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    if numpy is not None and before[2] is not None:
        numpy.random.set_state(before[2])


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _packed(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))
