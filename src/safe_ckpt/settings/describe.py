"""The JSON schema (draft 2020-12) of the YAML file, for editors. Pure: dataclass in, plain data out."""

from __future__ import annotations

import dataclasses
from typing import Any

from safe_ckpt.settings.fields import CLOCK
from safe_ckpt.settings.keys import Key, hints, is_section, keys
from safe_ckpt.settings.reference import meanings, summary
from safe_ckpt.settings.sources import OWN_KEY

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", tuple: "array"}
_NUMBER = r"^\d+(?:\.\d+)?$"


def schema(kind: type) -> dict[str, Any]:
    """The schema of a file with the settings of ``kind`` at top level, or under ``safe_ckpt:`` beside anything else."""
    reference = {"$ref": f"#/$defs/{kind.__name__}"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of safe_ckpt",
        "type": ["object", "null"],
        "if": {"required": [OWN_KEY]},
        "then": {"properties": {OWN_KEY: {"anyOf": [reference, {"type": "null"}]}}},
        "else": {"anyOf": [reference, {"type": "null"}]},
        "$defs": _sections(kind),
    }


def _sections(kind: type) -> dict[str, Any]:
    own = {key.name: key for key in keys(kind) if key.section is kind}
    says = meanings(kind)
    properties: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        described = {"description": says.get(item.name, "")}
        if item.name in own:
            properties[item.name] = described | _property(own[item.name])
        elif is_section(section := hints(kind)[item.name]):
            properties[item.name] = described | {"anyOf": [{"$ref": f"#/$defs/{section.__name__}"}, {"type": "null"}]}
            inner |= _sections(section)
    this = {
        "description": summary(kind),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {kind.__name__: this} | inner


def _property(key: Key) -> dict[str, Any]:
    name = _TYPES[key.kind]
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    if key.choices:
        return {"enum": [*key.choices, *([None] if key.nullable else [])], "default": default}
    if key.kind is float:
        numbers = {"type": name, **_bounds(key)}
        texts = [{"type": "string", "pattern": _NUMBER}, {"type": "string", "pattern": CLOCK}]
        null = [{"type": "null"}] if key.nullable else []
        return {"anyOf": [numbers, *texts, *null], "default": default}
    found: dict[str, Any] = {"type": [name, "null"] if key.nullable else name, "default": default}
    if key.kind is tuple:
        return found | {"items": {"type": "string", **_bounds(key)}}
    return found | _bounds(key)


def _bounds(key: Key) -> dict[str, Any]:
    limits = key.limits
    found = {
        "exclusiveMinimum": limits.above,
        "minimum": limits.at_least,
        "maximum": limits.at_most,
        "multipleOf": limits.multiple_of,
        "pattern": limits.pattern,
    }
    return {name: value for name, value in found.items() if value is not None}
