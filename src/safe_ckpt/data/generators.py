"""Random generators as short text, and borrowing those of this process for a moment."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from safe_ckpt.core.state.rng import get_rng_state, set_rng_state


def to_text(state: torch.Tensor) -> str:
    """The state of a generator as text."""
    return base64.b85encode(zlib.compress(bytes(state.tolist()))).decode()


def put_back(generator: torch.Generator | None, text: str) -> None:
    """Set a generator to what ``to_text`` gave."""
    state = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=torch.uint8)
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


def all_to_text() -> str:
    """The generators of this process: Python's, numpy's and torch's."""
    buffer = io.BytesIO()
    torch.save({name: value for name, value in get_rng_state().items() if name != "cuda"}, buffer)
    return base64.b85encode(zlib.compress(buffer.getvalue())).decode()


def put_all_back(text: str) -> None:
    """Set them to what ``all_to_text`` gave."""
    set_rng_state(_loaded(text))


def fingerprint() -> int:
    """Another number after any of the generators of this process has drawn something."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else (None, b"", 0)
    return hash((random.getstate(), tuple(torch.get_rng_state().tolist()), bytes(of_numpy[1]), of_numpy[2]))


@contextlib.contextmanager
def borrowed() -> Iterator[None]:
    """Within this block the generators of this process may be used; after it they are as before. Not those of devices."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        if numpy is not None and before[2] is not None:
            numpy.random.set_state(before[2])


def _loaded(text: str) -> Mapping[str, Any]:
    data = zlib.decompress(base64.b85decode(text))
    loaded: Mapping[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return loaded
