"""How object stores are reached, and how their addresses look. Standard library only; the writer process uses it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from safe_ckpt.config import StorageConfig

SCHEMES = ("s3", "gs", "az")
PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""How the environment variables of each begin."""
_EXTRA = "object stores need obstore: pip install obstore"


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """How to reach a store. See ``StorageConfig``; the deadline is ``Timeouts.lengthy_s``. Pickled without ``options``."""

    options: tuple[str, ...] = ()
    part_bytes: int = 8 << 20
    parts_in_flight: int = 4
    request_timeout_s: float = 60.0
    give_up_after_s: float = 3600.0

    @classmethod
    def of(cls, config: StorageConfig, give_up_after_s: float) -> StorageOptions:
        """From what the user has set."""
        return cls(
            options=tuple(config.options),
            part_bytes=config.part_bytes,
            parts_in_flight=config.parts_in_flight,
            request_timeout_s=config.request_timeout_s,
            give_up_after_s=give_up_after_s,
        )

    def __repr__(self) -> str:
        return f"StorageOptions(part_bytes={self.part_bytes})"  # the options may hold a password

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "options": ()}  # a pickle may lie anywhere

    def __copy__(self) -> StorageOptions:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StorageOptions:
        return self

    @property
    def given(self) -> dict[str, str]:
        """The options by name."""
        pairs = (option.partition("=") for option in self.options)
        return {name.lower(): value for name, _, value in pairs}


def variables() -> dict[str, str]:
    """Return the variables of the environment that say now how stores are reached."""
    starts = tuple(f"{prefix}_" for prefix in PREFIXES.values())
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(starts)}


def take_variables(given: dict[str, str]) -> None:
    """Make the environment say this. For a process that another one started earlier."""
    for name in variables().keys() - given.keys():
        del os.environ[name]
    os.environ.update(given)


def is_url(path: object, key: str = "directory") -> bool:
    """Whether this is the address of an object store; ``key`` is what the user gave it as, for messages.

    Raises:
        ConfigError: it is one that went through ``pathlib``, has a scheme that is not known, or names no plain place.
    """
    text = path if isinstance(path, str) else str(path)
    given, found, rest = text.partition(":/")
    scheme = given.lower()
    if not found or scheme == "file" or not re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        return False
    if scheme not in SCHEMES:
        known = ", ".join(f"{one}://" for one in SCHEMES)
        message = f"{scheme}:// is not supported: use a directory, or one of {known}"
        raise ConfigError(key=key, message=message)
    if not rest.startswith("/"):
        raise ConfigError(key=key, message=f"give {scheme}:// addresses as text: pathlib takes a slash away")
    if given != scheme:
        raise ConfigError(key=key, message=f"write {scheme}:// in small letters")
    bucket, *parts = rest[1:].split("/")
    if not bucket or "@" in rest or "?" in bucket or {".", ".."} & {*parts}:  # not read: an argument
        message = f"{scheme}:// needs a bucket and a plain path behind it, without a user, a password or a query"
        raise ConfigError(key=key, message=message)
    return True


def refuse_url(path: object, key: str) -> None:
    """Raise ``ConfigError`` for an address of an object store, where only a directory will do.

    Args:
        path: what the user gave.
        key: as what.
    """
    if is_url(path, key):
        message = "an address of an object store will not do here: give a directory. Set mirror.url to have it uploaded"
        raise ConfigError(key=key, message=message)


def require_obstore(key: str = "directory") -> None:
    """Raise ``ConfigError`` about ``key`` if the client is not installed."""
    try:
        import obstore  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ConfigError(key=key, message=f"{_EXTRA} ({error})") from None
