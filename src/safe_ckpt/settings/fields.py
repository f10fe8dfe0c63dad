"""The fields of a tree of frozen dataclasses: their keys and limits, how they are built from plain data, and their checks.

Every dataclass of the tree calls ``check_values`` when it is built; ``build`` makes a tree from plain data such as parsed YAML.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, Union

from safe_ckpt.errors import ConfigError

_T = TypeVar("_T")
CLOCK = r"^(?:(\d+):(?=[0-5]?\d:))?(\d{1,2}):([0-5]\d(?:\.\d+)?)$"
"""``HH:MM:SS`` or ``MM:SS``, as a regular expression that JSON Schema understands too."""
DEFAULTS = "the defaults"
HIDDEN_VALUE = "(not shown)"
_LIMITS = "safe_ckpt.limits"
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_steps": "steps"}
_USER = re.compile(r"://[^\s'\"]*@")
"""In an address: who asks, and mostly a password."""
_LONGEST_SHOWN = 200
_LARGEST_SHOWN = 1e18
_LONGEST_DEVIATIONS = 600


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one value; for a list, of each of its entries. None where there is no such bound.

    Attributes:
        above: it must be greater than this.
        at_least: it must not be less than this.
        at_most: it must not be greater than this.
        multiple_of: it must be a multiple of this.
        pattern: a regular expression that must be found in the text.
        words: the meaning of ``pattern``, written after "expected".
        secret: it may hold a password: no error, log or listing shows the value.
    """

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    multiple_of: int | None = None
    pattern: str | None = None
    words: str = ""
    secret: bool = False

    def allows(self, value: Any) -> bool:
        """Whether ``value``, which has the right type already, is within all bounds."""
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.multiple_of is None or value % self.multiple_of == 0)
            and (self.pattern is None or re.search(self.pattern, value) is not None)
        )

    def __str__(self) -> str:
        parts = [self.words] if self.words else []
        if self.above is not None:
            parts.append(f"above {self.above}")
        if self.at_least is not None:
            both = self.at_most is not None
            parts.append(f"{self.at_least} to {self.at_most}" if both else f"at least {self.at_least}")
        elif self.at_most is not None:
            parts.append(f"at most {self.at_most}")
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        return ", ".join(parts)


def limits(**bounds: Any) -> Mapping[str, Limits]:
    """The ``metadata`` of a dataclass field; see ``Limits`` for the arguments."""
    return {_LIMITS: Limits(**bounds)}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting.

    Attributes:
        path: the names that lead to it, joined by dots: ``retention.keep_last``.
        section: the dataclass that has the field.
        kind: ``int``, ``float``, ``bool``, ``str``, or ``tuple`` for a list of texts.
        nullable: whether None is allowed.
        choices: the only values that are allowed; empty where the limits alone decide.
        limits: the bounds.
        default: the value where it is not set.
    """

    path: str
    section: type
    kind: type
    nullable: bool
    choices: tuple[str, ...]
    limits: Limits
    default: Any

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def unit(self) -> str:
        """The unit that the end of its name says: ``seconds``, ``bytes``, ``steps``, or nothing."""
        return next((unit for suffix, unit in _UNITS.items() if self.name.endswith(suffix)), "")


def is_section(kind: type) -> bool:
    """Whether a field of this type has keys of its own."""
    return dataclasses.is_dataclass(kind)


def _fields(section: type) -> Mapping[str, Key]:
    hints = typing.get_type_hints(section)
    return {item.name: _key(section, item, hints[item.name]) for item in dataclasses.fields(section)}


fields_of: Callable[[type], Mapping[str, Key]] = functools.cache(_fields)
"""The fields of one dataclass by name, sections included. Resolving annotations takes longer than saving a small model."""


def _key(section: type, item: dataclasses.Field[Any], hint: Any) -> Key:
    nullable = typing.get_origin(hint) in (Union, types.UnionType)
    if nullable:
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    literal = typing.get_origin(hint) is Literal
    return Key(
        path=item.name,
        section=section,
        kind=str if literal else typing.get_origin(hint) or hint,
        nullable=nullable,
        choices=typing.get_args(hint) if literal else (),
        limits=item.metadata.get(_LIMITS, Limits()),
        default=item.default,
    )


def _tree(kind: type) -> tuple[Key, ...]:
    tree: list[Key] = []
    for name, key in fields_of(kind).items():
        if is_section(key.kind):
            tree += [replace(inner, path=joined(name, inner.path)) for inner in keys(key.kind)]
        else:
            tree.append(key)
    return tuple(tree)


keys: Callable[[type], tuple[Key, ...]] = functools.cache(_tree)
"""All settings of a dataclass and of those within it, in the order of their fields."""


def removed(kind: type) -> Mapping[str, str]:
    """Paths of keys of earlier versions, and what to do about each: ``removed`` of the dataclass of all settings."""
    return getattr(kind, "removed", {})


def joined(prefix: str, name: object) -> str:
    """Two parts of a path, joined by a dot."""
    return f"{prefix}.{name}" if prefix else str(name)


def value_at(settings: Any, path: str) -> Any:
    """The value of the setting at ``path``."""
    return functools.reduce(getattr, path.split("."), settings)


def suggestion(root: type, section: type, name: object) -> str:
    """The end of the error about an unknown ``name`` within ``section`` of ``root``: which key may have been meant."""
    here, last = list(fields_of(section)), str(name).rpartition(".")[2]
    places = {key.name: key.path.rpartition(".")[0] for key in reversed(keys(root))}  # of several the first
    near = [] if last in places else difflib.get_close_matches(str(name), here, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    elsewhere = difflib.get_close_matches(last, places, n=1)
    if not elsewhere:
        return f"known here: {', '.join(here)}"
    place = places[elsewhere[0]]
    where = f'under "{place}"' if place else "at the top level"
    return f'"{elsewhere[0]}" belongs {where}'


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
        raise ConfigError(key=path, message=f"expected keys with values, got {_shown_section(kind, data)}")
    known = fields_of(kind)
    values: dict[str, Any] = {}
    for name, value in data.items():
        here = joined(path, name)
        if (instead := removed(root).get(here)) is not None:
            raise ConfigError(key=here, message=f"was removed: {instead}")
        if name not in known:
            if _has_secrets(kind):
                name = str(name).partition("=")[0]  # noqa: PLW2901 - behind it may be a password
                here = joined(path, name)
            raise ConfigError(key=here, message=f"unknown key; {suggestion(root, kind, name)}")
        key = known[name]
        values[name] = _section(root, key.kind, value, here) if is_section(key.kind) else _value(key, value, here)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(key=joined(path, error.key), message=error.message) from None


def _has_secrets(kind: type) -> bool:
    return any(key.limits.secret for key in keys(kind))


def _shown_section(kind: type, data: object) -> str:
    """The value that was given instead of a section; where it may hold a password, only its type."""
    if not _has_secrets(kind):
        return _shown(data)
    return (
        "a list" if isinstance(data, list | tuple) else "text" if isinstance(data, str) else f"a {type(data).__name__}"
    )


def _value(key: Key, value: object, path: str) -> Any:
    """Bring plain data closer to the type; whether it is allowed is for the dataclass to say."""
    if key.kind is float and value is not None:
        return parse_duration(value, path)
    if isinstance(value, list):
        return tuple(value)
    if value is False and "off" in key.choices:
        return "off"  # what YAML 1.1 makes of an unquoted off
    return value


def check_values(settings: Any) -> None:
    """Refuse values of the wrong type or out of range, so that what comes after may rely on them.

    Raises:
        ConfigError: naming the field.
    """
    for name, key in fields_of(type(settings)).items():
        value = getattr(settings, name)
        if key.nullable and value is None:
            continue
        _check_type(key, value)
        for entry in value if isinstance(value, tuple | list) else (value,):
            if not key.limits.allows(entry):
                null = ", or null for none" if key.nullable else ""
                got = "" if key.limits.secret else f", got {_shown(entry)}"
                raise ConfigError(key=name, message=f"expected {key.limits}{null}{got}")


def _check_type(key: Key, value: object) -> None:
    kind = key.kind
    if key.choices:
        words, right = f"one of {', '.join(map(repr, key.choices))}", isinstance(value, str) and value in key.choices
    elif kind is tuple:
        example = isinstance(value, str) and value and not key.limits.secret
        words = f"a list of names{f' such as [{value}]' if example else ''}"
        right = isinstance(value, tuple | list) and all(isinstance(entry, str) for entry in value)
    elif kind is float:
        words = "a finite number"
        whole = isinstance(value, int) and not isinstance(value, bool)
        right = whole or (isinstance(value, float) and math.isfinite(value))
    elif kind is bool:
        words, right = "true or false", isinstance(value, bool)
    elif kind is int:
        words, right = f"a whole number{_whole(value)}", isinstance(value, int) and not isinstance(value, bool)
    else:
        words = "text" if kind is str else f"a {kind.__name__}"
        right = isinstance(value, kind)
    if not right:
        got = "" if key.limits.secret else f", got {_shown(value)}"
        raise ConfigError(key=key.name, message=f"expected {words}{got}")


def _whole(value: object) -> str:
    """How to write 1e9 or 3.0, which YAML reads as text or as a float, as a whole number."""
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
    text = _USER.sub("://...@", text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def deviations(settings: Any) -> str:
    """``retention.keep_last=3, timeouts.barrier_s=25.0``, sorted by key; ``the defaults`` where nothing differs.

    Args:
        settings: a dataclass of settings, checked already.

    Returns:
        At most some 650 characters: a longer text is cut and ends in a hash of all of it.
    """
    different = []
    for key in keys(type(settings)):
        # 25 and 25.0, and a list and a tuple, are the same setting: in Python both may be given.
        pair = (value_at(settings, key.path), key.default)
        value, default = (None if each is None else key.kind(each) for each in pair)
        if value != default:
            different.append(f"{key.path}={shown_value(key, value)!r}")
    text = ", ".join(sorted(different)) or DEFAULTS
    if len(text) <= _LONGEST_DEVIATIONS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[:_LONGEST_DEVIATIONS]}... (sha256 {digest})"


def shown_value(key: Key, value: Any) -> Any:
    """The value of a setting as anybody may see it."""
    return HIDDEN_VALUE if key.limits.secret and value else value
