"""Plain data, such as parsed YAML, to a tree of settings; and the check that every dataclass of the tree makes when built."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, TypeVar

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.keys import hints, is_section, joined, suggestion, without_none
from safe_ckpt.settings.limits import limits_of

_T = TypeVar("_T")
CLOCK = r"^(?:(\d+):(?=[0-5]?\d:))?(\d{1,2}):([0-5]\d(?:\.\d+)?)$"
"""``HH:MM:SS`` or ``MM:SS``, as a regular expression that JSON Schema understands too."""
_LONGEST_SHOWN = 200
_LARGEST_SHOWN = 1e18


def parse_duration(value: object, key: str) -> float:
    """Seconds from a number, ``"90"``, ``"1:30"`` or ``"01:00:00"``.

    YAML 1.1 reads an unquoted 1:00:00 as the integer 3600 and a quoted one as text, so both arrive here.

    Raises:
        ConfigError: it is none of these; names ``key``.
    """
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            clock = re.match(CLOCK, value.strip())
            if clock:
                hours, minutes, seconds = clock.groups()
                return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
            return float(value)
    except (ValueError, OverflowError):  # the latter: an integer of more digits than a float can take
        pass
    raise ConfigError(key=key, message=f'expected seconds or "HH:MM:SS", got {_shown(value)}')


def build(kind: type[_T], data: object) -> _T:
    """A tree of settings from plain data.

    Raises:
        ConfigError: a key is unknown, or a value of the wrong type or out of range; ``key`` is the path of the key.
    """
    return _section(kind, kind, data, "")


def _section(root: type, kind: type[_T], data: object, path: str) -> _T:
    if data is None and path:
        return kind()  # a section whose keys are all commented out
    if not isinstance(data, Mapping):
        raise ConfigError(key=path, message=f"expected keys with values, got {_shown(data)}")
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
            raise ConfigError(key=item.name, message=f"expected {limits}{null}, got {_shown(wrong[0])}")


def _check_type(plain: Any, value: object, key: str) -> None:
    words, right = "", False
    if typing.get_origin(plain) is Literal:
        choices = typing.get_args(plain)
        words, right = f"one of {', '.join(map(repr, choices))}", isinstance(value, str) and value in choices
    elif typing.get_origin(plain) is tuple:
        words = f"a list of names{f' such as [{value}]' if isinstance(value, str) and value else ''}"
        right = isinstance(value, tuple | list) and all(isinstance(entry, str) for entry in value)
    elif plain is float:
        words = "a finite number"
        right = _is_number(value) and (isinstance(value, int) or math.isfinite(value))
    elif plain is bool:
        words, right = "true or false", isinstance(value, bool)
    elif plain is int:
        words = f"a whole number{_whole(value)}"
        right = isinstance(value, int) and not isinstance(value, bool)
    else:
        words = f"{'a ' if is_section(plain) else ''}{'text' if plain is str else plain.__name__}"
        right = isinstance(value, plain)
    if not right:
        raise ConfigError(key=key, message=f"expected {words}, got {_shown(value)}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> str:
    """How somebody who wrote 1e9 or 3.0, which YAML takes for text or for a float, writes a whole number."""
    try:
        number = float(value) if isinstance(value, str | float) else math.nan
    except ValueError:
        return ""
    return f" such as {int(number)}" if number.is_integer() and abs(number) < _LARGEST_SHOWN else ""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number that is too large to be shown"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
