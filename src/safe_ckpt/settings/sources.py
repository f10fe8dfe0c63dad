"""A YAML file as a layer of settings: every key with its line, no key twice."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.keys import joined
from safe_ckpt.settings.layers import Layer, Origin

OWN_KEY = "safe_ckpt"
"""Where our settings are in a file that holds others too."""
_DEEPEST = 3
_Entry = tuple[yaml.Node, yaml.Node]
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: str | os.PathLike[str]) -> Layer:
    """Read a YAML file: the keys at top level, or under ``safe_ckpt:``, beside which there may be anything.

    Raises:
        ConfigError: the file cannot be read or parsed, or gives a key twice; names file and line.
    """
    source = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(message=f"cannot be read: {error.strerror or error}", source=source) from error
    except UnicodeDecodeError as error:
        raise ConfigError(message=f"cannot be read as YAML: {error}", source=source) from error
    return parse_yaml(text, source)


def parse_yaml(text: str, source: str) -> Layer:
    """The same for text that was read already; ``source`` is its name in errors.

    Raises:
        ConfigError: see ``read_yaml``.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            return _Reader(loader, source).read()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        message = f"cannot be read as YAML: {error.problem or error.context}"
        raise ConfigError(message=message, source=source, line=line) from error
    except (yaml.YAMLError, RecursionError) as error:
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
            if key.tag == _MERGE:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode):
                        raise self._error(key, path, "<< needs an alias of keys with values")
                    merged = {**self._entries(source, path), **merged}
                continue
            name = str(key.value)
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, path, "expected the name of a key")
            if name in own:
                raise self._twice(key, joined(path, name), own[name][0])
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
