"""The state of every random generator that a training step may use, as tensors and numbers.

Plain data, because a raw numpy state would keep ``torch.load(weights_only=True)`` from opening the checkpoint.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def get_rng_state() -> dict[str, Any]:
    """The global generators of this process: Python, numpy (if it is in use), torch, and torch on every CUDA device."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "keys": torch.tensor([int(key) for key in keys], dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the generators of this process into the state that ``get_rng_state`` returned."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].to(device="cpu", dtype=torch.uint8))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = state["numpy"]
        keys = numpy.array(saved["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value.to(device="cpu", dtype=torch.uint8), device)


class RngState:
    """The random generators of this process as a Stateful: ``state={"rng": PerRank(RngState()), ...}``."""

    def state_dict(self) -> dict[str, Any]:
        """What the generators are at now."""
        return get_rng_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put them back."""
        set_rng_state(state_dict)
