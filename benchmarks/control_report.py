"""What ``control_plane.py`` found: a JSON file that later runs add to, tables in Markdown, and a plot."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any]]
ROUNDS, PLANNING = "agree to commit", "planning"
_NAME = "control-plane"
_LOOKED_UP = "::ffff:127.0.0.1"
_ENVIRONMENT = ("TORCH_GLOO_LAZY_INIT",)  # what changes the times; told with the command


def facts(folder: Path) -> Row:
    """This run: its command, its machine, its date."""
    known = machine.facts(folder)
    hosts = [line.partition("#")[0].split() for line in Path("/etc/hosts").read_text(encoding="utf-8").splitlines()]
    named = any(_LOOKED_UP in names for names in hosts)
    given = [f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ]
    command = " ".join([*given, shlex.join(["python", *sys.argv])])
    return {"command": command, **known, "hosts": f"{_LOOKED_UP} is {'' if named else 'not '}in /etc/hosts"}


def said(run: Row) -> str:
    """One line on a run."""
    torch = run["versions"]["torch"]
    return f"`{run['command']}`, {run['date']}, {run['cores']} cores, kernel {run['kernel']}, torch {torch}; {run['hosts']}"


def add(folder: Path, run: Row, rows: list[Row]) -> Row:
    """Add rows to those in that folder, in place of those of the same way and number of ranks, and the run if it is new."""
    path = folder / f"{_NAME}.json"
    known: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "rows": []}
    new = {_key(row) for row in rows}
    runs = known["runs"] if known["runs"][-1:] == [run] else [*known["runs"], run]
    kept = [row for row in known["rows"] if _key(row) not in new]
    rows = sorted([*kept, *({**row, "run": len(runs) - 1} for row in rows)], key=_key)
    found = {"runs": runs, "rows": rows}
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def _key(row: Row) -> tuple[str, str, int]:
    return row["section"], row["way"], row["ranks"]


def line(row: Row) -> str:
    """One row on one line, as soon as it is there."""
    if "error" in row:
        return f"{row['section']}, {row['way']}, {row['ranks']} ranks: not run: {row['error']}"
    seconds = ", ".join(f"{value:.3f}" for value in row["seconds"][:5])
    return f"{row['section']}, {row['way']}, {row['ranks']} ranks: {seconds} s"


def _of(name: str, scale: float = 1.0, digits: int = 3) -> Callable[[Row], str]:
    """Shows a number of a row, or those of the first and the second save."""

    def show(row: Row) -> str:
        values = row.get(name)
        if values is None:
            return ""
        many = values if isinstance(values, list) else [values]
        return " / ".join(f"{value * scale:,.{digits}f}" for value in many)

    return show


def _first(row: Row) -> str:
    return f"{row['seconds'][0]:.3f}"


def _second(row: Row) -> str:
    return f"{row['seconds'][1]:.3f}" if len(row["seconds"]) > 1 else ""


def later(row: Row) -> float:
    """The median second of all saves but the first."""
    return statistics.median(row["seconds"][1:] or row["seconds"])


def _leads(row: Row) -> str:
    return f"{row['requests_0'] / row['ranks']:.1f}" if "requests_0" in row else ""


_MEBI = 1 / (1 << 20)
_COMMON: Sequence[Column] = (
    ("way", lambda row: row["way"]),
    ("ranks", lambda row: f"{row['ranks']:,}"),
    ("first save, s", _first),
    ("second, s", _second),
)
_ROUNDS: Sequence[Column] = (
    *_COMMON,
    ("later, s", lambda row: f"{later(row):.3f}"),
    ("requests of a rank", _of("requests", digits=1)),
    ("of rank 0, per rank", _leads),
    ("CPU of a rank, ms", _of("cpu_s", 1000, 1)),
    ("CPU of rank 0, s", _of("cpu_0_s")),
    ("first meeting, s", _of("meeting_s")),
    ("error known, s", _of("error_known_s")),
    ("posted, s", _of("error_posted_s")),
    ("posted after half have reported, s", _of("error_posted_half_s")),
    ("read by all, s", _of("error_read_s")),
    ("own memory of a rank, MiB", _of("private_bytes", _MEBI, 1)),
    ("of rank 0, MiB", _of("private_0_bytes", _MEBI, 1)),
    ("processes that fit", _of("fit", 1, 0)),
)
_PLANNING: Sequence[Column] = (
    *_COMMON,
    ("CPU of a rank, first / second, ms", _of("cpu_s", 1000, 1)),
    ("CPU of rank 0, first / second, s", _of("cpu_0_s")),
    ("sent by a rank, first / second, KiB", _of("sent_bytes", 1 / 1024, 1)),
    ("requests (DCP: collectives) of a rank", _of("requests", 1, 0)),
    ("making the group, s", _of("group_s")),
    ("own memory of a rank, MiB", _of("private_bytes", _MEBI, 1)),
    ("of rank 0, MiB", _of("private_0_bytes", _MEBI, 1)),
)


def _keys(after: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        found = row["keys"].get(after)
        return f"{found['keys']:,} / {found['private_bytes'] * _MEBI:.1f}" if found else ""

    return show


_KEYS: Sequence[Column] = (
    *_COMMON[:2],
    ("before the first meeting, MiB", _of("before_bytes", _MEBI, 1)),
    *((f"after {n} saves, keys / MiB", _keys(n)) for n in ("1", "10", "100", "1000")),
    ("until the keys of a save are gone, s", _of("until_tidy_s")),
    ("of rank 0's time waiting for players, s", _of("waited_s")),
)


def _table(columns: Sequence[Column], rows: list[Row]) -> list[str]:
    shown = [[show(row) for _, show in columns] for row in rows]
    used = [number for number in range(len(columns)) if any(cells[number] for cells in shown)]
    lines = [[columns[number][0] for number in used], ["---"] * len(used)]
    lines += [[cells[number] for number in used] for cells in shown]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def markdown(found: Row) -> str:
    """All tables, and what they belong to."""
    whole = [row for row in found["rows"] if "error" not in row]
    parts: list[str] = []
    for section, columns in ((ROUNDS, _ROUNDS), (PLANNING, _PLANNING)):
        rows = [row for row in whole if row["section"] == section]
        parts += [f"## {section}", "", *_table(columns, rows), ""] if rows else []
    # A JSON file has text for keys; a row that was just measured has numbers.
    keyed = [{**row, "keys": {str(n): one for n, one in row["keys"].items()}} for row in whole if row.get("keys")]
    parts += ["## rank 0's store", "", *_table(_KEYS, keyed), ""] if keyed else []
    failed = [f"- {line(row)}" for row in found["rows"] if "error" in row]
    parts += ["## not run", "", *failed, ""] if failed else []
    return "\n".join([*parts, "## runs", "", *(f"- {said(run)}" for run in found["runs"]), ""])


def draw(found: Row, path: Path) -> Path:
    """A line for each way: ranks and seconds, both on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.5))
    for axis, section in zip(axes, (ROUNDS, PLANNING), strict=True):
        rows = [row for row in found["rows"] if row["section"] == section and "error" not in row]
        for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
            own = sorted((row for row in rows if row["way"] == way), key=lambda row: row["ranks"])
            ranks, color = [row["ranks"] for row in own], f"C{number}"
            axis.plot(ranks, [later(row) for row in own], color=color, marker="o", label=f"{way}, later saves")
            axis.plot(
                ranks, [row["seconds"][0] for row in own], color=color, linestyle="--", label=f"{way}, first save"
            )
        axis.set(title=f"{section}, without files", xlabel="ranks", ylabel="seconds", xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.grid(visible=True, which="major", alpha=0.3)
        if rows:
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def write(folder: Path, run: Row, rows: list[Row]) -> list[Path]:
    """Write the three files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = add(folder, run, rows)
    table = folder / f"{_NAME}.md"
    table.write_text(markdown(found), encoding="utf-8")
    return [folder / f"{_NAME}.json", table, draw(found, folder / f"{_NAME}.png")]
