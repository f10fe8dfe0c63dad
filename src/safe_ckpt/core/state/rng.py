"""The random generators of this process: what they are now, as plain data or as short text, and set to that again.

Plain data, because a raw numpy state would keep ``torch.load(weights_only=True)`` from opening the checkpoint.
"""

from __future__ import annotations

import array
import base64
import contextlib
import ctypes
import hashlib
import io
import json
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from safe_ckpt import devices

_USUAL = "MT19937"
TORCH, PYTHON, NUMPY = "torch", "python", "numpy"
"""The generators of a process, by name."""


def snapshot(names: Iterable[str] = (TORCH, PYTHON, NUMPY)) -> dict[str, Any]:
    """Some generators of this process, as values that can be compared and sent. Without numpy's, where it is not in use."""
    taken: dict[str, Any] = {}
    for name in names:
        if name == TORCH:
            taken[name] = _bytes(torch.default_generator.get_state())
        elif name == PYTHON:
            taken[name] = random.getstate()
        elif (numpy := sys.modules.get("numpy")) is not None:
            taken[name] = _of_numpy(numpy.random.get_state(legacy=False))
    return taken


def set_to(taken: Mapping[str, Any]) -> None:
    """Set them to what ``snapshot`` returned."""
    for name, state in taken.items():
        if name == TORCH:
            torch.set_rng_state(_tensor(state))
        elif name == PYTHON:
            random.setstate(state)
        else:
            import numpy

            _set_numpy(numpy, *state)


def _set_numpy(numpy: Any, kind: str, keys: bytes, *rest: Any) -> None:
    """Set numpy's global generator, which is made to be of that kind."""
    if numpy.random.get_state(legacy=False)["bit_generator"] != kind:
        made = getattr(numpy.random, kind, None)
        if not isinstance(made, type) or not issubclass(made, numpy.random.BitGenerator):
            raise ValueError(f"numpy has no generator {kind:.80}")
        numpy.random.set_bit_generator(made())
    usual = kind == _USUAL
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest) if usual else json.loads(keys))


def _of_numpy(kept: Mapping[str, Any]) -> tuple[str, bytes, int, int, float]:
    """Return a generator's kind, what it keeps, its position, and the normal number that it has drawn ahead."""
    kind, state = str(kept["bit_generator"]), kept["state"]
    if kind == _USUAL:
        return kind, state["key"].tobytes(), state["pos"], kept["has_gauss"], kept["gauss"]
    text = json.dumps(kept, default=lambda words: words.tolist()).encode()  # what others keep is their own matter
    return kind, text.ljust(-(-len(text) // 4) * 4), 0, 0, 0.0  # whole words of 32 bits, as the usual one's


@contextlib.contextmanager
def borrowed() -> Iterator[None]:
    """Within this block the generators of this process may be used; after it they are as before. Not those of devices."""
    before = snapshot()
    try:
        yield
    finally:
        set_to(before)


def get_rng_state() -> dict[str, Any]:
    """The generators of this process: Python, numpy (if it is in use), torch, and torch on each device of the types in use.

    Those of devices are under the name of their type, such as ``cuda``, one for each device.
    """
    of_devices = {name: devices.generator_states(name) for name in devices.in_use()}
    return {**_host_state(), **{name: states for name, states in of_devices.items() if states}}


def _host_state() -> dict[str, Any]:
    taken = snapshot()
    version, words, gauss = taken[PYTHON]
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": _tensor(taken[TORCH]),
    }
    if NUMPY in taken:
        kind, keys, position, has_gauss, cached = taken[NUMPY]
        state["numpy"] = {
            "kind": kind,
            "keys": torch.tensor(list(array.array("I", keys)), dtype=torch.int64, device="cpu"),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the generators of this process into the state that ``get_rng_state`` returned, but for devices that are not here."""
    python, saved = state["python"], state.get("numpy")
    taken = {
        PYTHON: (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        TORCH: _bytes(state["torch"].to(device="cpu", dtype=torch.uint8).contiguous()),
    }
    if saved is not None and "numpy" in sys.modules:
        keys = array.array("I", saved["keys"].tolist()).tobytes()
        taken[NUMPY] = (saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"])
    set_to(taken)
    for name in devices.types():
        if name in state:
            devices.set_generator_states(name, [value.to(device="cpu", dtype=torch.uint8) for value in state[name]])


class RngState:
    """The random generators of this process as a Stateful: ``state={"rng": PerRank(RngState()), ...}``.

    Example:
        ```python
        with Checkpointer("runs/dropout") as ckpt:
            ckpt.save(100, {"rng": PerRank(RngState())}).result()
            drawn = torch.rand(3)
            ckpt.resume({"rng": PerRank(RngState())})
            assert torch.equal(torch.rand(3), drawn)
        ```
    """

    def state_dict(self) -> dict[str, Any]:
        """Return where the generators are now."""
        return get_rng_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put them back."""
        set_rng_state(state_dict)

    def start_anew(self, state_dict: Mapping[str, Any], rank: int) -> None:
        """Seed them from what rank 0 has saved and from this rank, which saved none: the same at each such resume."""
        saved = _bytes(state_dict["torch"].contiguous())
        digest = hashlib.blake2b(saved, digest_size=8, salt=str(rank).encode()).digest()
        seed = int.from_bytes(digest, "little")
        random.seed(seed)
        torch.manual_seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)


def generator_to_text(state: torch.Tensor) -> str:
    """The state of one of torch's generators as text."""
    return _packed(_bytes(state))


def generator_from_text(generator: torch.Generator, text: str) -> None:
    """Set a generator of torch's to what ``generator_to_text`` gave."""
    generator.set_state(_tensor(_unpacked(text)))


def all_to_text() -> str:
    """The generators of this process: Python's, numpy's and torch's."""
    buffer = io.BytesIO()
    torch.save(_host_state(), buffer)
    return _packed(buffer.getvalue())


def put_all_back(text: str) -> None:
    """Set them to what ``all_to_text`` gave."""
    set_rng_state(torch.load(io.BytesIO(_unpacked(text)), weights_only=True))


def snapshot_to_text(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of ``snapshot`` to plain data."""
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
            text[name] = [kind, _packed(keys), int(position), int(has_gauss), float(cached)]
    return text


def put_snapshot_back(text: Mapping[str, Any]) -> None:
    """Set the generators of this process to what ``snapshot_to_text`` gave."""
    taken: dict[str, Any] = {}
    for name, state in text.items():
        if name == TORCH:
            taken[name] = _unpacked(state)
        else:
            first, packed, *rest = state
            data = _unpacked(packed)
            taken[name] = (first, tuple(array.array("I", data)) if name == PYTHON else data, *rest)
    set_to(taken)


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _packed(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))
