"""``safe-ckpt config``: check, show and describe the settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.describe import json_schema, markdown
from safe_ckpt.settings.fields import keys, shown_value, value_at
from safe_ckpt.settings.sources import CONFIG_VARIABLE, PREFIX, Loaded, load, load_effective, read_yaml
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, print_json, print_table, say

_File = typer.Argument(exists=True, dir_okay=False, metavar="FILE")
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Check, show and describe the settings."
)


@app.command()
def check(file: Annotated[Path, _File], as_json: AsJson = False) -> None:
    """Say whether the YAML file FILE can be used, and what in it differs from the defaults."""
    loaded, problems = _checked(file)
    rows = [row for row in _rows(loaded) if row["value"] != row["default"]] if loaded else []
    if as_json:
        errors = [{"message": problem.message, "key": problem.key, "line": problem.line} for problem in problems]
        first = errors[0] if errors else None
        print_json({"file": str(file), "ok": not errors, "error": first, "errors": errors, "settings": rows})
    elif problems:
        typer.echo("\n".join(map(str, problems)))
    else:
        typer.echo(f"{file}: ok{'' if rows else ', all settings have their defaults'}")
        if rows:
            columns = ("key", "value", "default", "from")
            print_table(columns, [(r["key"], _yaml(r["value"]), _yaml(r["default"]), r["from"]) for r in rows])
    if problems:
        raise typer.Exit(DAMAGED)
    if any(name.startswith(PREFIX) for name in os.environ):
        say(f"the variables {PREFIX}* that are set here change more: safe-ckpt config show {file}")


@app.command()
def show(file: Annotated[Path | None, _File] = None, as_json: AsJson = False) -> None:
    """Print the settings that hold here as YAML, each with its origin: default, file and line, or variable.

    The file is FILE, else the one that SAFE_CKPT_CONFIG names. The variables SAFE_CKPT__SECTION__KEY are over it.
    """
    try:
        loaded = load_effective(CheckpointConfig, os.environ, file=None if file is None else str(file))
    except ConfigError as error:
        say(str(error))
        raise typer.Exit(DAMAGED) from None
    rows = _rows(loaded)
    if as_json:
        print_json(rows)
        return
    named = str(file) if file else os.environ.get(CONFIG_VARIABLE)
    say(f"file: {named or f'none, {CONFIG_VARIABLE} is not set'}")
    section = ""
    for row in sorted(rows, key=lambda row: "." in row["key"]):
        inner, _, name = row["key"].rpartition(".")
        if inner != section:
            typer.echo(f"{inner}:")
            section = inner
        typer.echo(f"{'  ' if inner else ''}{name}: {_yaml(row['value'])}  # {row['from']}")


@app.command()
def reference() -> None:
    """Print a page of Markdown about every key: type, unit, default, what is allowed, and what it means."""
    typer.echo(markdown(CheckpointConfig), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of the YAML file, for editors."""
    typer.echo(json.dumps(json_schema(CheckpointConfig), indent=2))


def _checked(file: Path) -> tuple[Loaded[CheckpointConfig] | None, list[ConfigError]]:
    """The settings, or None and what is wrong: every unknown key, and a bad value of each section without one."""
    problems: list[ConfigError] = []
    known = {key.path for key in keys(CheckpointConfig)}
    faulty: set[str] = set()
    try:
        layer = read_yaml(file)
    except ConfigError as error:
        return None, [error]
    while True:
        try:
            loaded = load(CheckpointConfig, [layer])
        except ConfigError as error:
            section = error.key.partition(".")[0]
            if error.key not in known or section not in faulty:  # else it may follow from what was left out
                problems.append(error)
            faulty.add(section)
            if not _leave_out(layer.data, error.key if error.key not in known else section):
                return None, problems
        else:
            return (None, problems) if problems else (loaded, [])


def _leave_out(data: Any, path: str) -> bool:
    """Take a key out of plain data; False where it is not in it under that name."""
    *sections, last = path.split(".")
    for section in sections:
        data = data.get(section) if isinstance(data, dict) else None
    return isinstance(data, dict) and data.pop(last, data) is not data


def _rows(loaded: Loaded[CheckpointConfig]) -> list[dict[str, Any]]:
    return [
        {
            "key": key.path,
            "value": shown_value(key, value_at(loaded.settings, key.path)),
            "default": key.default,
            "from": str(loaded.origins.get(key.path, "default")),
        }
        for key in keys(CheckpointConfig)
    ]


def _yaml(value: object) -> str:
    # JSON is YAML too, and quotes what YAML would read as something else, such as off.
    return json.dumps(value, ensure_ascii=False)
