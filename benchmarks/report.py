"""The Markdown that is made of the figures."""

from collections.abc import Iterable
from typing import Any

import backends
from figures import FIRST_SAVE, GIB, Figures, Mode, Spread, ratios
from targets import MIB, all_targets

SECONDS = ("call", "gate", "first step", "other steps", "lost", "durable", FIRST_SAVE)


def markdown(figures: Figures, plots: Iterable[str] = ()) -> str:
    parts = [_heading(figures)]
    parts += [_table_of(figures, mode) for mode in figures.modes]
    parts += [_targets(figures), _memory(figures), _extras(figures), _errors(figures)]
    parts += [f"![{path}]({path})" for path in plots]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(figures: Figures) -> str:
    machine, settings = figures.results["machine"], figures.results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        "# What a save costs\n\n"
        "Written by `make bench`. Ratios within one run count, not seconds: those vary from day to day.\n\n"
        f"{machine['date']}; {machine['cores']} cores ({machine['processor']}), "
        f"{machine['memory_bytes'] / GIB:.0f} GiB, kernel {machine['kernel']}, {machine['file_system']}; "
        f"Python {machine['python']}, {versions}.\n"
        f"{figures.state_bytes / MIB:.0f} MiB of parameters and Adam state, {settings['rounds']} rounds, each with a first "
        f"save and {settings['saves']} further ones, every backend in a fresh process, in shuffled order.\n"
        "Seconds per GiB: medians with (lowest to highest). Lost = call + gate + what the first step, and the others until "
        "durable, took longer than undisturbed ones."
    )


def _table_of(figures: Figures, mode: Mode) -> str:
    columns = list(ratios(figures, "", mode))
    rows = []
    for way in figures.ways:
        if figures.seconds(way, mode, "call") is None:
            continue
        seconds = [_spread(figures.per_gib(way, mode, column)) for column in SECONDS]
        rows.append([way, *seconds, *map(_ratio, ratios(figures, way, mode).values())])
    rows += _references(figures, mode, len(columns))
    return f"## {str(mode).capitalize()}\n\n" + _table(["", *SECONDS, *columns], rows)


def _references(figures: Figures, mode: Mode, ratio_columns: int) -> list[list[str]]:
    rows = []
    scale = GIB / figures.state_bytes
    known = (
        ("memcpy, warm", "memcpy_s", 0),
        ("first touch of fresh memory", "first_touch_s", 0),
        ("O_DIRECT write + fsync", "direct_write_s", 5),
    )
    for name, column, place in known:
        found = figures.reference(column, mode)
        if found:
            cells = [""] * (len(SECONDS) + ratio_columns)
            cells[place] = _spread(Spread(found.median * scale, found.low * scale, found.high * scale))
            rows.append([f"*{name}*", *cells])
    return rows


def _targets(figures: Figures) -> str:
    rows = []
    for target in all_targets(figures):
        if target.measured is None:
            continue
        measured = f"{target.measured:.2f} {target.unit}"
        limit = f"{'at least' if target.at_least else 'at most'} {target.at_most:g} {target.unit}"
        rows.append([target.name, limit, measured, target.verdict, target.note])
    return "## Targets\n\nOf those that this run decides:\n\n" + _table(
        ["", "target", "measured", "", "against, or further"], rows
    )


def _memory(figures: Figures) -> str:
    columns = ("before_bytes", "peak_bytes", "shared_bytes", "largest_child_bytes")
    rows = [[way, *(_mebibytes(figures.memory(way, column)) for column in columns)] for way in figures.ways]
    titles = ["", "process before", "its peak", "shared memory", "largest child, shared memory left out"]
    return "## Memory, MiB\n\n" + _table(titles, rows) if rows else ""


def _extras(figures: Figures) -> str:
    extras: dict[str, Any] = figures.results["extras"]
    lines = [f"- {name}: {result['error']}" for name, result in extras.items() if "error" in result]
    resume = extras.get("resume", {}).get("median_s", {})
    lines += [f"- load from cold cache, {way}: {seconds:.3f} s" for way, seconds in resume.items()]
    for way, found in extras.get("scaling", {}).get("sizes", {}).items():
        if "seconds_per_gib" in found:
            lines.append(
                f"- lost per save over sizes, {way}: {found['seconds_per_gib']:.3f} s per GiB "
                f"and {found['intercept_s'] * 1000:.1f} ms for any size"
            )
        lines += [f"- lost per save over sizes, {way}: {error}" for error in found["errors"]]
    return "## Besides\n\n" + "\n".join(lines) if lines else ""


def _errors(figures: Figures) -> str:
    found = figures.errors()
    rows = [[way, backends.ENTRIES[way].kind, f"`{error}`"] for way, error in found.items()]
    return "## What could not run\n\n" + _table(["", "", "error"], rows) if rows else ""


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _spread(value: Spread | None) -> str:
    return "" if value is None else f"{value.median:.3f} ({value.low:.3f} to {value.high:.3f})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:.0f}"
