"""The sources of settings: a YAML file with the line of every key, and environment variables over it.

Each source is a layer of plain data; later layers lie over earlier ones, and each value has its origin.
``SAFE_CKPT__RETENTION__KEEP_LAST=3`` is ``retention.keep_last: 3``: two underscores between the parts, values as in YAML.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.fields import Key, build, joined, keys, removed, value_at

_T = TypeVar("_T")
OWN_KEY = "safe_ckpt"
"""Where our settings are in a file that holds others too."""
_DEEPEST = 3
_Entry = tuple[yaml.Node, yaml.Node]
_MERGE = "tag:yaml.org,2002:merge"
CONFIG_VARIABLE = "SAFE_CKPT_CONFIG"
PREFIX = "SAFE_CKPT__"
_HELP = "`safe-ckpt config reference` lists the keys; between the parts of a key go two underscores"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The place where a value was written.

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
    """The settings of one source.

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
        settings = _built(kind, layers)
    except ConfigError as error:
        origin = _blamed(kind, error.key, layers)
        raise ConfigError(key=error.key, message=error.message, source=origin.source, line=origin.line) from None
    return Loaded(settings=settings, origins={path: at for layer in layers for path, at in layer.origins.items()})


def _built(kind: type[_T], layers: Sequence[Layer]) -> _T:
    merged: object = {}
    for layer in layers:
        merged = _over(layer.data, merged)
    return build(kind, merged)


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
    """The origin of the key; if it is not written, of what clashes with its default, in the first layer with the error."""
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
        _built(kind, layers)
    except ConfigError as error:
        return error.key == path
    return False


def read_yaml(path: str | os.PathLike[str]) -> Layer:
    """Read a YAML file: the keys at top level, or under ``safe_ckpt:``, beside which there may be anything.

    Raises:
        ConfigError: the file cannot be read or parsed, or gives a key twice; names file and line.
    """
    source = os.fspath(path)
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        try:
            return _Reader(loader, source).read()
        finally:
            loader.dispose()
    except OSError as error:
        raise ConfigError(message=f"cannot be read: {error.strerror or error}", source=source) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"cannot be read as YAML: {error.problem or error.context}"
        # Not "from error": that shows the line, which may hold a password.
        raise ConfigError(message=message, source=source, line=mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(message=f"cannot be read as YAML: {error}", source=source) from error


class _Reader:
    """Turns nodes into plain data and remembers where each key was."""

    def __init__(self, loader: yaml.SafeLoader, source: str) -> None:
        self._loader = loader
        self._source = source
        self._origins: dict[str, Origin] = {}
        self._known: dict[yaml.Node, dict[str, _Entry]] = {}

    def read(self) -> Layer:
        """The whole file; of one that has our key, what is under it."""
        root: yaml.Node | None = self._loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            ours = [(key, value) for key, value in root.value if key.value == OWN_KEY]
            if len(ours) > 1:  # other keys are other programs', which may allow them twice
                raise self._twice(ours[1][0], OWN_KEY, ours[0][0])
            root = ours[0][1] if ours else root
        if root is None or (isinstance(root, yaml.ScalarNode) and self._scalar(root, "") is None):
            return Layer(data={}, origins={})
        self._origins[""] = self._at(root)
        return Layer(data=self._plain(root, "", depth=0), origins=self._origins)

    def _plain(self, node: yaml.Node, path: str, depth: int) -> object:
        if depth > _DEEPEST:  # aliases of aliases could otherwise grow without bound
            line = self._origins[path].line  # of the key: the node may be an alias of what is elsewhere
            raise ConfigError(key=path, message="nested deeper than any setting", source=self._source, line=line)
        if isinstance(node, yaml.MappingNode):
            data: dict[str, object] = {}
            for name, (key, value) in self._entries(node, path).items():
                here = joined(path, name)
                self._origins[here] = self._at(key)
                data[name] = self._plain(value, here, depth + 1)
            return data
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(entry, path, depth + 1) for entry in node.value]
        return self._scalar(node, path)

    def _entries(self, node: yaml.MappingNode, path: str) -> dict[str, _Entry]:
        """Its own keys, over those that it merges in with ``<<``."""
        if node in self._known:
            return self._known[node]
        own: dict[str, _Entry] = {}
        merged: dict[str, _Entry] = {}
        for key, value in node.value:
            name = str(key.value)
            if key.tag == _MERGE:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode):
                        raise self._error(key, path, "<< needs an alias of keys with values")
                    merged = {**self._entries(source, path), **merged}
            elif not isinstance(key, yaml.ScalarNode):
                raise self._error(key, path, "expected the name of a key")
            elif name in own:
                raise self._twice(key, joined(path, name), own[name][0])
            else:
                own[name] = (key, value)
        self._known[node] = {**merged, **own}
        return self._known[node]

    def _scalar(self, node: yaml.Node, path: str) -> object:
        try:
            return self._loader.construct_object(node)
        except ValueError as error:  # a date that does not exist, and the like
            raise self._error(node, path, str(error)) from error

    def _twice(self, node: yaml.Node, path: str, first: yaml.Node) -> ConfigError:
        return self._error(node, path, f"given twice, first in line {first.start_mark.line + 1}; remove one")

    def _at(self, node: yaml.Node) -> Origin:
        return Origin(source=self._source, line=node.start_mark.line + 1)

    def _error(self, node: yaml.Node, path: str, message: str) -> ConfigError:
        return ConfigError(key=path, message=message, source=self._source, line=node.start_mark.line + 1)


def load_effective(kind: type[_T], environ: Mapping[str, str], *, file: str | None = None) -> Loaded[_T]:
    """The defaults, over them the file, over it the variables.

    Args:
        kind: the dataclass of all settings.
        environ: the environment.
        file: the YAML file; None for the one that ``SAFE_CKPT_CONFIG`` names, or none.

    Raises:
        ConfigError: the file cannot be read, a key or variable is unknown, or a value is not allowed.
    """
    named = environ.get(CONFIG_VARIABLE) if file is None else file
    layers = [read_yaml(named)] if named else []
    return load(kind, [*layers, read_environment(kind, environ)])


def origin_of(kind: type, environ: Mapping[str, str], section: str) -> tuple[str, Origin] | None:
    """The key of ``section`` that the environment sets to something that is not its default, and where; None for none.

    Never raises: it is called for an error message.
    """
    try:
        loaded: Loaded[Any] = load_effective(kind, environ)
    except ConfigError:
        return None
    for key in keys(kind):
        if key.path.startswith(f"{section}.") and value_at(loaded.settings, key.path) != key.default:
            return key.path, loaded.origins[key.path]
    return None


def variable(path: str) -> str:
    """``retention.keep_last`` -> ``SAFE_CKPT__RETENTION__KEEP_LAST``."""
    return PREFIX + path.replace(".", "__").upper()


def read_environment(kind: type, environ: Mapping[str, str]) -> Layer:
    """The layer of the variables that begin with ``SAFE_CKPT__``.

    Raises:
        ConfigError: a variable is unknown, or its value is no YAML.
    """
    known = {variable(key.path): key for key in keys(kind)}
    data: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name not in known:
            gone = [why for path, why in removed(kind).items() if f"{name}__".startswith(f"{variable(path)}__")]
            message = f"was removed: {gone[0]}" if gone else f"unknown variable; {_suggestion(name, list(known))}"
            raise ConfigError(source=name, message=message)
        key = known[name]
        *sections, last = key.path.split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = _parsed(environ[name], key, name)
        origins[key.path] = Origin(source=name)
    return Layer(data=data, origins=origins)


def _suggestion(name: str, known: list[str]) -> str:
    within = next((other for other in known if other.startswith(f"{name}__")), None)
    if within:
        return f"there is one for each key, such as {within}"
    near = difflib.get_close_matches(name.upper(), known, n=1)
    return f"did you mean {near[0]}?" if near else _HELP


def _parsed(text: str, key: Key, name: str) -> object:
    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if key.limits.secret:
            message = "cannot be read as YAML; check brackets and quotes"
            raise ConfigError(key=key.path, source=name, message=message) from None
        raise ConfigError(key=key.path, source=name, message=f"cannot be read as YAML: {text!r}") from error
    # A metric may be called 1 or off, and values in a shell are not quoted for YAML.
    return text if key.kind is str and not isinstance(value, str | None) else value
