"""Plain data, such as parsed YAML, to a tree of settings; and the check that every dataclass of the tree makes when built."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.keys import hints, is_section, joined, suggestion, without_none
from safe_ckpt.settings.limits import limits_of

_T = TypeVar("_T")
CLOCK = r"^(?:(\d+):(?=[0-5]?\d:))?(\d{1,2}):([0-5]\d(?:\.\d+)?)$"
"""``HH:MM:SS`` or ``MM:SS``, as a regular expression that JSON Schema understands too."""


def parse_duration(value: object, key: str) -> float:
    """Seconds from a number, ``"90"``, ``"1:30"`` or ``"01:00:00"``.

    YAML 1.1 reads an unquoted 1:00:00 as the integer 3600 and a quoted one as text, so both arrive here.

    Raises:
        ConfigError: it is none of these; names ``key``.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        clock = re.match(CLOCK, value.strip())
        if clock:
            hours, minutes, seconds = clock.groups()
            return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigError(key=key, message=f'expected seconds or "HH:MM:SS", got {value!r}')


def build(kind: type[_T], data: object) -> _T:
    """A tree of settings from plain data.

    Raises:
        ConfigError: a key is unknown, or a value of the wrong type or out of range; ``key`` is the path of the key.
    """
    return _section(kind, kind, data, "")


def _section(root: type, kind: type[_T], data: object, path: str) -> _T:
    if not isinstance(data, Mapping):
        raise ConfigError(key=path, message=f"expected keys with values, got {data!r}")
    known = hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(key=joined(path, key), message=f"unknown key; {suggestion(root, kind, key)}")
        here = joined(path, key)
        values[key] = (
            _section(root, known[key], value, here) if is_section(known[key]) else _value(known[key], value, here)
        )
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(key=joined(path, error.key), message=error.message) from None


def _value(hint: Any, value: object, key: str) -> Any:
    """Bring plain data closer to the type; whether it is allowed is for the dataclass to say."""
    plain, _ = without_none(hint)
    if plain is float and value is not None:
        return parse_duration(value, key)
    if isinstance(value, list):
        return tuple(value)
    if typing.get_origin(plain) is Literal and value is False and "off" in typing.get_args(plain):
        return "off"  # what YAML 1.1 makes of an unquoted off
    return value


def check(settings: Any) -> None:
    """Refuse values of the wrong type or out of range, so that what comes after may rely on them.

    Raises:
        ConfigError: naming the field.
    """
    for item in dataclasses.fields(settings):
        hint, value = hints(type(settings))[item.name], getattr(settings, item.name)
        plain, nullable = without_none(hint)
        if nullable and value is None:
            continue
        _check_type(plain, value, item.name)
        limits = limits_of(item)
        wrong = [
            entry for entry in (value if isinstance(value, tuple | list) else (value,)) if not limits.allows(entry)
        ]
        if wrong:
            null = ", or null for none" if nullable else ""
            raise ConfigError(key=item.name, message=f"expected {limits}{null}, got {wrong[0]!r}")


def _check_type(plain: Any, value: object, key: str) -> None:
    words, right = "", False
    if typing.get_origin(plain) is Literal:
        choices = typing.get_args(plain)
        words, right = f"one of {', '.join(map(repr, choices))}", isinstance(value, str) and value in choices
    elif typing.get_origin(plain) is tuple:
        words = "a list of names"
        right = isinstance(value, tuple | list) and all(isinstance(entry, str) for entry in value)
    elif plain is float:
        words = "a finite number"
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        words = f"{'a ' if is_section(plain) else ''}{plain.__name__}"
        right = isinstance(value, plain) and (plain is not int or not isinstance(value, bool))
    if not right:
        raise ConfigError(key=key, message=f"expected {words}, got {value!r}")
