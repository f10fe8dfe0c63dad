"""Settings from the environment: a YAML file that one variable names, and one variable per key over it.

``SAFE_CKPT__RETENTION__KEEP_LAST=3`` is ``retention.keep_last: 3``: two underscores between the parts, values as in YAML.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.keys import Key, keys, value_at
from safe_ckpt.settings.layers import Layer, Loaded, Origin, load
from safe_ckpt.settings.sources import read_yaml

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
CONFIG_VARIABLE = "SAFE_CKPT_CONFIG"
PREFIX = "SAFE_CKPT__"
_OURS = PREFIX.removesuffix("_")
_OTHERS = (CONFIG_VARIABLE, "SAFE_CKPT_SHIM", "SAFE_CKPT_THOROUGH", "SAFE_CKPT_KILLS", "SAFE_CKPT_KILL_SEED")
"""Names that begin like ours, belong to no key, and are read: the file, and what the test kit and the tests take."""
_HELP = "`safe-ckpt config reference` lists the keys; between the parts of a key go two underscores"
_told: set[str] = set()


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
    for name, meant in slips(kind, environ).items():
        if name not in _told:
            _told.add(name)
            logger.warning("the environment variable %s changes nothing: %s", name, meant)
    return load(kind, [*layers, read_environment(kind, environ)])


def origin_of(kind: type, environ: Mapping[str, str], section: str) -> tuple[str, Origin] | None:
    """Which key of ``section`` the environment sets to something that is not its default, and where; None for none.

    Never raises: it is asked in order to say where something came from that is refused anyway.
    """
    try:
        loaded: Loaded[Any] = load_effective(kind, environ)
    except ConfigError:
        return None
    for key in keys(kind):
        if key.path.startswith(f"{section}.") and value_at(loaded.settings, key.path) != key.default:
            return key.path, loaded.origins[key.path]
    return None


def slips(kind: type, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like ours and are not, such as one with an underscore too few, each with what to do about it."""
    known = {_squashed(name): name for name in (CONFIG_VARIABLE, *(variable(key.path) for key in keys(kind)))}
    found = {}
    for name in environ:
        if not name.upper().startswith(_OURS) or name.startswith(PREFIX) or name in _OTHERS:
            continue
        near = difflib.get_close_matches(_squashed(name), known, n=1, cutoff=0.85)
        found[name] = f"did you mean {known[near[0]]}?" if near else _HELP
    return found


def _squashed(name: str) -> str:
    return name.upper().replace("_", "")


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
            raise ConfigError(source=name, message=f"unknown variable; {_suggestion(name, list(known))}")
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
    if near:
        return f"did you mean {near[0]}?"
    return _HELP


def _parsed(text: str, key: Key, name: str) -> object:
    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(key=key.path, source=name, message=f"cannot be read as YAML: {text!r}") from error
    # A metric may be called 1 or off, and nobody quotes a value for YAML in a shell.
    return text if key.kind is str and not isinstance(value, str | None) else value
