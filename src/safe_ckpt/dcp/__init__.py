"""``torch.distributed.checkpoint`` (DCP) with one import changed: atomic names, checksums, bounded waits, a newest one.

``save``, ``async_save`` and ``load`` have DCP's signatures, and write and read DCP's files. Everything else of DCP's is found
under its own name here as well. ``docs/start/dcp.md`` says what is different.
"""

from __future__ import annotations

from typing import Any

from safe_ckpt.dcp.loading import load, resume
from safe_ckpt.dcp.saver import configure
from safe_ckpt.dcp.saving import async_save, save

__all__ = ["async_save", "configure", "load", "resume", "save"]

_OLD = {"save_state_dict": "save", "load_state_dict": "load"}


def __getattr__(name: str) -> Any:
    from torch.distributed import checkpoint

    if name in _OLD:
        raise AttributeError(f"safe_ckpt.dcp has no {name}, which torch has deprecated: use {_OLD[name]}")
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(checkpoint, name)
