"""The keys of a tree of settings: their paths, their types, and the nearest one to a key that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from safe_ckpt.settings.limits import Limits, limits_of

_UNITS = {"_s": "seconds", "_bytes": "bytes", "_steps": "steps"}


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
        default: what it is where nobody sets it.
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
        """What it counts, as the end of its name says: ``seconds``, ``bytes``, ``steps``, or nothing."""
        return next((unit for suffix, unit in _UNITS.items() if self.name.endswith(suffix)), "")


# Once for each, because that takes longer than saving a small model.
_resolved: Callable[[type], Mapping[str, Any]] = functools.cache(typing.get_type_hints)


def hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, resolved."""
    return _resolved(kind)


def is_section(hint: Any) -> bool:
    """Whether a field of this type has keys of its own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def without_none(hint: Any) -> tuple[Any, bool]:
    """``int | None`` -> ``(int, True)``; ``int`` -> ``(int, False)``."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not types.NoneType), True
    return hint, False


def keys(kind: type, prefix: str = "") -> tuple[Key, ...]:
    """All settings of a dataclass and of those within it, in the order of their fields."""
    return _found(kind, prefix)


def _find(kind: type, prefix: str) -> tuple[Key, ...]:
    found: list[Key] = []
    for item in dataclasses.fields(kind):
        path, hint = joined(prefix, item.name), hints(kind)[item.name]
        found += keys(hint, path) if is_section(hint) else [_key(kind, item, hint, path)]
    return tuple(found)


_found: Callable[[type, str], tuple[Key, ...]] = functools.cache(_find)


def _key(section: type, item: dataclasses.Field[Any], hint: Any, path: str) -> Key:
    plain, nullable = without_none(hint)
    literal = typing.get_origin(plain) is Literal
    return Key(
        path=path,
        section=section,
        kind=str if literal else typing.get_origin(plain) or plain,
        nullable=nullable,
        choices=typing.get_args(plain) if literal else (),
        limits=limits_of(item),
        default=item.default,
    )


def joined(prefix: str, name: object) -> str:
    """Two parts of a path, joined by a dot."""
    return f"{prefix}.{name}" if prefix else str(name)


def value_at(settings: Any, path: str) -> Any:
    """The value of the setting at ``path``."""
    return functools.reduce(getattr, path.split("."), settings)


def suggestion(root: type, section: type, name: object) -> str:
    """What somebody may have meant who wrote ``name`` within ``section`` of ``root``: words for the end of an error."""
    here, last = list(hints(section)), str(name).rpartition(".")[2]
    places = {key.name: key.path.rpartition(".")[0] for key in keys(root)}
    near = [] if last in places else difflib.get_close_matches(str(name), here, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    elsewhere = difflib.get_close_matches(last, places, n=1)
    if not elsewhere:
        return f"known here: {', '.join(here)}"
    place = places[elsewhere[0]]
    where = f'under "{place}"' if place else "at the top level"
    return f'"{elsewhere[0]}" belongs {where}'
