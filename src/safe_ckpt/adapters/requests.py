"""What an adapter asks of the core for one save: where to, what, its facts, and what happens when it is committed."""

from __future__ import annotations

from safe_ckpt.core.directory.retention import DeleteListed, KeepNewest
from safe_ckpt.core.saving.request import (
    Content,
    Destination,
    Facts,
    FileByFile,
    OnCommit,
    Pointer,
    SaveRequest,
    Snapshot,
    Streamed,
    Unplanned,
)
from safe_ckpt.core.saving.streamed_files import FileStream
from safe_ckpt.core.storage.durable import Link

__all__ = [
    "Content",
    "DeleteListed",
    "Destination",
    "Facts",
    "FileByFile",
    "FileStream",
    "KeepNewest",
    "Link",
    "OnCommit",
    "Pointer",
    "SaveRequest",
    "Snapshot",
    "Streamed",
    "Unplanned",
]
