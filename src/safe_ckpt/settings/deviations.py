"""What settings differ in from the defaults, as one line of text that can be compared and read. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from safe_ckpt.settings.keys import Key, keys, value_at

NONE = "the defaults"
_LONGEST = 600


def deviations(settings: Any) -> str:
    """``retention.keep_last=3, timeouts.barrier_s=25.0``, sorted by key; ``the defaults`` where nothing differs.

    Args:
        settings: a dataclass of settings, checked already.

    Returns:
        At most some 650 characters: a longer text is cut and ends in a hash of all of it.
    """
    found = []
    for key in keys(type(settings)):
        value, default = (_plain(key, each) for each in (value_at(settings, key.path), key.default))
        if value != default:
            found.append(f"{key.path}={value!r}")
    text = ", ".join(sorted(found)) or NONE
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[:_LONGEST]}... (sha256 {digest})"


def _plain(key: Key, value: Any) -> Any:
    # 25 and 25.0, and a list and a tuple, are the same setting: in Python both may be given.
    return None if value is None else key.kind(value)
