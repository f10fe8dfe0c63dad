"""Where settings come from: layers of plain data, later ones over earlier ones, each value with its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.fields import build

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value was written.

    Attributes:
        source: the file or the environment variable.
        line: the line in the file, from 1; None where there are no lines.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one source says.

    Attributes:
        data: the plain data, nested as the settings are.
        origins: path of a key, or of a section, to where it was written; ``""`` is the whole.
    """

    data: object
    origins: Mapping[str, Origin]


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[_T]):
    """Settings and where they came from.

    Attributes:
        settings: the settings.
        origins: path of a key to where it was written; keys that are not in it have their defaults.
    """

    settings: _T
    origins: Mapping[str, Origin]


def load(kind: type[_T], layers: Sequence[Layer]) -> Loaded[_T]:
    """Settings from several sources, later ones over earlier ones.

    Raises:
        ConfigError: a key is unknown, or a value of the wrong type or out of range; names key and origin.
    """
    try:
        settings = build(kind, _merged(layers))
    except ConfigError as error:
        origin = _blamed(kind, error.key, layers)
        raise ConfigError(key=error.key, message=error.message, source=origin.source, line=origin.line) from None
    return Loaded(settings=settings, origins={path: at for layer in layers for path, at in layer.origins.items()})


def _merged(layers: Sequence[Layer]) -> object:
    merged: object = {}
    for layer in layers:
        merged = _over(layer.data, merged)
    return merged


def _over(upper: object, lower: object) -> object:
    """``upper``, and what only ``lower`` has. What is no mapping stays as it is, to be refused when it is built."""
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper if isinstance(lower, Mapping) else lower
    both: dict[Any, object] = {**lower}
    for key, value in upper.items():
        section = isinstance(value, Mapping) and lower.get(key) is not None  # None: a section without keys
        both[key] = _over(value, lower[key]) if section else value
    return both


def _blamed(kind: type, path: str, layers: Sequence[Layer]) -> Origin:
    """Where the key was written; where it was not, what clashes with its default: in the first layer that brings the error."""
    written = [layer.origins[path] for layer in layers if path in layer.origins]
    if written:
        return written[-1]
    guilty = next(count for count in range(1, len(layers) + 1) if _fails(kind, path, layers[:count]))
    origins = layers[guilty - 1].origins
    while path:
        path = path.rpartition(".")[0]
        within = [at for other, at in origins.items() if other.startswith(f"{path}." if path else "")]
        if path in origins or within:
            return origins.get(path, within[0])
    return Origin(source="")


def _fails(kind: type, path: str, layers: Sequence[Layer]) -> bool:
    try:
        build(kind, _merged(layers))
    except ConfigError as error:
        return error.key == path
    return False
