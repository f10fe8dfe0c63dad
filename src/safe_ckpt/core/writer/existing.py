"""A file of a save that a committed checkpoint has already, and how it gets to the new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.durable import WrittenFile, link_open_file
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import Stamp

UNCHANGED = "unchanged"
"""The name of the extension that knows of such files.

It says of a ``WriteTask``: ``same_as``, the xxh3-128 of a file that is there already: with these bytes it is not written. Of a
``WrittenFile``: ``age``, how many saves ago it was written if all of it is another file; and ``left_out``: it is not there yet,
its bytes are those of ``same_as``.
"""
MOST_BYTES = 5 << 30
"""S3 copies no larger object in one request."""


@dataclass(frozen=True, kw_only=True)
class Adoption:
    """A file that an earlier checkpoint has, as the writer is told of it.

    Attributes:
        sources: addresses of objects with its bytes, in the bucket of ``path``. The first of them that is still there is
            copied: the store does it, and no byte of it is sent.
        path: of the new one.
        size_bytes: its length.
        xxh3_128: of its bytes.
        instead: the file that is copied, or sent where the store makes no copy; None: one of the sources is read and sent.
    """

    path: str
    size_bytes: int
    xxh3_128: str
    sources: tuple[str, ...] = ()
    instead: FileCopy | None = None

    def to_json(self) -> dict[str, Any]:
        """Describe it as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Adoption:
        """From what ``to_json`` returned."""
        instead = FileCopy.from_json(data["instead"]) if data["instead"] is not None else None
        return cls(**{**data, "sources": tuple(data["sources"]), "instead": instead})


@dataclass(frozen=True, kw_only=True)
class Before:
    """A file as it stands in committed checkpoints.

    Attributes:
        sources: where, the newest first. Some may be gone.
        stamp: of the newest when it was committed; None where that is not known.
        size_bytes: its length.
        xxh3_128: of its bytes.
        observed: what else was found of it, by the names of extensions.
        age: how many saves ago it was written.
        repeated: whether the save before had the same bytes; None where that is not known.
    """

    sources: tuple[Place, ...]
    size_bytes: int
    xxh3_128: str
    stamp: Stamp | None = None
    observed: Mapping[str, Any] = field(default_factory=dict)
    age: int = 0
    repeated: bool | None = None


class Existing:
    """A file of a save that is one of a committed checkpoint.

    Args:
        path: relative to the checkpoint.
        before: what it is.
        fd: of the old file, which is held; closed by ``close``. None for an object: it cannot be held.
        examined: whether what was found of its numbers is said again.

    Attributes:
        path: as given.
        before: as given.
        how: it got to the new checkpoint: see ``link``, or ``"sent"``, where a store made no copy; "" for not yet.
    """

    def __init__(self, path: str, before: Before, fd: int | None, *, examined: bool = True) -> None:
        self.path = path
        self.before = before
        self.how = ""
        self._fd = fd
        self._examined = examined

    @property
    def is_held(self) -> bool:
        """Whether its bytes cannot vanish."""
        return self._fd is not None

    def link(self, path: str) -> str:
        """Give the old file a further name, in a directory that the caller makes durable. See ``link_open_file``.

        An object has one name.
        """
        return "not this one" if self._fd is None else link_open_file(self._fd, path)

    def adoption(self, path: str) -> Adoption:
        """Return the adoption that puts a copy there."""
        before = self.before
        sources: tuple[str, ...] = ()
        instead = None
        if self._fd is None:
            sources = tuple(map(str, before.sources))
        else:  # any process of this user can open it here, also when its name is gone
            source = f"/proc/{os.getpid()}/fd/{self._fd}"
            instead = FileCopy(source=source, path=path, stamp=Stamp.of(os.fstat(self._fd)))
        size, digest = before.size_bytes, before.xxh3_128
        return Adoption(path=path, size_bytes=size, xxh3_128=digest, sources=sources, instead=instead)

    def written(self, path: str, *, shared: bool) -> WrittenFile:
        """Return the record of the file that stands at ``path``; ``shared``: none of its bytes was written."""
        before = self.before
        return WrittenFile(
            path=path,
            size_bytes=before.size_bytes,
            xxh3_128=before.xxh3_128,
            shared_bytes=before.size_bytes if shared else 0,
            # A copy may have the same blocks.
            observed={**(before.observed if self._examined else {}), UNCHANGED: {"age": before.age + 1}},
        )

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
