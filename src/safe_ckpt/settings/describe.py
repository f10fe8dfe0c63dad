"""The reference of all settings in Markdown and the JSON schema for editors, made from the dataclasses. Pure functions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from safe_ckpt.settings.fields import CLOCK, Key, fields_of, is_section, keys
from safe_ckpt.settings.sources import OWN_KEY, variable
from safe_ckpt.settings.texts import meanings, summary

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", tuple: "array"}
_NAMES = {float: "number", tuple: "list of text", str: "text"}
_NUMBER = r"^\d+(?:\.\d+)?$"
_INTRODUCTION = resources.files("safe_ckpt.settings").joinpath("reference.md")


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting, in words: each field is a column of the reference."""

    key: str
    type: str
    unit: str
    default: str
    allowed: str
    meaning: str


def setting_rows(kind: type) -> list[SettingRow]:
    """All settings, in the order of the fields."""
    found = []
    for key in keys(kind):
        name = _NAMES.get(key.kind, key.kind.__name__)
        allowed = ", ".join(f"`{choice}`" for choice in key.choices)
        row = SettingRow(
            key=key.path,
            type=f"{name} or null" if key.nullable else name,
            unit=key.unit,
            default=json.dumps(list(key.default) if isinstance(key.default, tuple) else key.default),
            allowed=allowed or ("`true`, `false`" if key.kind is bool else str(key.limits)),
            meaning=meanings(key.section).get(key.name, ""),
        )
        found.append(row)
    return found


def markdown(kind: type) -> str:
    """The reference as one page: an introduction, then a table for each section, those of the top level first."""
    sections: dict[type, list[SettingRow]] = {kind: []}  # those of the top level come first
    for key, row in zip(keys(kind), setting_rows(kind), strict=True):
        sections.setdefault(key.section, []).append(row)
    parts = [_INTRODUCTION.read_text(encoding="utf-8")]
    for section, own in sections.items():
        prefix, example = own[0].key.rpartition(".")[0], variable(own[0].key)
        title = f"`{prefix}`: {section.__name__}" if prefix else section.__name__
        lines = [f"## {title}", "", summary(section), "", f"The variable of the first one is `{example}`.", ""]
        columns = [field.name.capitalize() for field in dataclasses.fields(SettingRow)]
        lines += [_line(columns), _line(["---"] * len(columns))]
        for row in own:
            lines.append(_line([f"`{row.key}`", row.type, row.unit, f"`{row.default}`", row.allowed, row.meaning]))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the YAML file.

    The settings of ``kind`` are at its top level, or under ``safe_ckpt:`` beside anything else.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of safe_ckpt",
        "type": ["object", "null"],
        "if": {"required": [OWN_KEY]},
        "then": {"properties": {OWN_KEY: _reference_or_null(kind)}},
        "else": _reference_or_null(kind),
        "$defs": _sections(kind),
    }


def _reference_or_null(section: type) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/$defs/{section.__name__}"}, {"type": "null"}]}


def _sections(kind: type) -> dict[str, Any]:
    described = meanings(kind)
    properties: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for name, key in fields_of(kind).items():
        properties[name] = {"description": described.get(name, "")}
        if is_section(key.kind):
            properties[name] |= _reference_or_null(key.kind)
            inner |= _sections(key.kind)
        else:
            properties[name] |= _property(key)
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
    typed: dict[str, Any] = {"type": [name, "null"] if key.nullable else name, "default": default}
    if key.kind is tuple:
        return typed | {"items": {"type": "string", **_bounds(key)}}
    return typed | _bounds(key)


def _bounds(key: Key) -> dict[str, Any]:
    limits = key.limits
    bounds = {
        "exclusiveMinimum": limits.above,
        "minimum": limits.at_least,
        "maximum": limits.at_most,
        "multipleOf": limits.multiple_of,
        "pattern": limits.pattern,
    }
    return {name: value for name, value in bounds.items() if value is not None}
