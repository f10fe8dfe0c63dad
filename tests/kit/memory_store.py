"""An object store in this process: obstore's own in memory, of which any request can be made to fail.

    store = MemoryStore(monkeypatch)
    with Checkpointer(folder, CheckpointConfig(mirror=Mirror(url=store.url()))) as ckpt: ...

The package's requests go through it as they do to a real server; what they raise is what obstore raises. Nobody waits for one
that fails: at the first pause between two tries patience is over.
"""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

from safe_ckpt.core.storage.objects import bucket

VERBS = ("put", "get", "get_range", "head", "copy", "delete", "list", "list_with_delimiter")
_numbers = itertools.count()
NO_ANSWER = "no answer"
ERRORS = (
    obstore.exceptions.GenericError,
    obstore.exceptions.PermissionDeniedError,
    obstore.exceptions.UnauthenticatedError,
    obstore.exceptions.NotSupportedError,
    TimeoutError,
    ConnectionResetError,
)
"""What a store may raise that says nothing about what it has."""


class MemoryStore:
    """One bucket. Every bucket that the package opens while ``patch`` holds is this one.

    Args:
        patch: a ``pytest.MonkeyPatch``.

    Attributes:
        before: called with the verb and the key of each request, on whichever thread; what it raises is the answer.
        after: the same, once the store has done it: the answer is lost.
    """

    def __init__(self, patch: Any) -> None:
        self.name = f"memory-{next(_numbers)}"
        self.kept = obstore.store.MemoryStore()
        self.before: Callable[[str, str], None] | None = None
        self.after: Callable[[str, str], None] | None = None
        patch.setattr(bucket, "connect", lambda *_: self.kept)
        patch.setattr(bucket, "_obstore", lambda: self)
        patch.setattr(bucket.Bucket, "_pause", _is_over)

    exceptions = obstore.exceptions

    def url(self, prefix: str = "run") -> str:
        """Of a folder in it."""
        return f"s3://{self.name}/{prefix}"

    def keys(self, prefix: str = "") -> list[str]:
        """Of all objects whose key begins so."""
        return sorted(one["path"] for page in obstore.list(self.kept) for one in page if one["path"].startswith(prefix))

    def read(self, key: str) -> bytes:
        """An object."""
        return bytes(obstore.get(self.kept, key).bytes())

    def write(self, key: str, data: bytes) -> None:
        """Put an object, whatever is there."""
        obstore.put(self.kept, key, data)

    def manifests(self, prefix: str = "run") -> dict[str, dict[str, Any]]:
        """Of all checkpoints that are committed right below ``prefix``: folder -> its manifest."""
        found = [key.split("/") for key in self.keys(f"{prefix}/") if key.endswith("/manifest.json")]
        read = {parts[1]: json.loads(self.read("/".join(parts))) for parts in found if len(parts) == 3}
        return {
            folder: one for folder, one in read.items() if "sequence" in one
        }  # else a place that is taken for nothing

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS:
            raise AttributeError(name)
        real = getattr(obstore, name)

        def request(store: Any, *args: Any, **more: Any) -> Any:
            key = (
                args[0] if args and isinstance(args[0], str) else str(more.get("prefix") or next(iter(args), "") or "")
            )
            if self.before is not None:
                self.before(name, key)
            answer = real(store, *args, **more)
            if self.after is not None:
                self.after(name, key)
            return answer

        return request


def no_answer(*_: str) -> None:
    """What ``before`` and ``after`` are for a store that is away."""
    raise obstore.exceptions.GenericError(NO_ANSWER)


def _is_over(one: bucket.Bucket, seconds: float) -> None:
    del seconds
    if one.stop is not None:
        one.stop()
    raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER, one.url)


__all__ = ["ERRORS", "VERBS", "MemoryStore", "no_answer"]
