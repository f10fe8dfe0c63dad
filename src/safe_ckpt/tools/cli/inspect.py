"""``safe-ckpt inspect``: what is in a checkpoint, and how two differ."""

from __future__ import annotations

import fnmatch
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, describe_unhealthy, read_manifest
from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.source import in_files, in_store
from safe_ckpt.errors import ConfigError, UnsupportedFormatError
from safe_ckpt.text import bytes_text, listed, metrics_text
from safe_ckpt.tools.cli.output import (
    CHECKPOINT,
    DAMAGED,
    AsJson,
    FollowSymlinks,
    failing,
    print_json,
    print_table,
    say,
)
from safe_ckpt.tools.inspection.content import read_content, read_object_content
from safe_ckpt.tools.inspection.files import place_given, walk
from safe_ckpt.tools.inspection.listing import kind_of, one_of
from safe_ckpt.tools.inspection.tensors import Entry, TensorTable, Value

if TYPE_CHECKING:
    from safe_ckpt.tools.inspection.values import Mapped

_MOST_BITS = 10_000  # of an integer: JSON has no limit, its readers do


def inspect(
    path: Annotated[str, typer.Argument(parser=CHECKPOINT, help="A checkpoint: a directory, a file or an address.")],
    other: Annotated[str | None, typer.Argument(parser=CHECKPOINT, help="Another one, to be compared with it.")] = None,
    match: Annotated[str, typer.Option(help="Only tensors and values of such names, as in 'model:*.weight'.")] = "*",
    health: Annotated[
        bool, typer.Option("--health", help="Show what is known of its numbers, and of those before.")
    ] = False,
    follow_symlinks: FollowSymlinks = False,
    as_json: AsJson = False,
) -> None:
    """Show the tensors and values in PATH, or how PATH and OTHER differ.

    Nothing in a checkpoint is run: an object of some class is shown by the name of its class. With two checkpoints tensors are
    compared by name; the figure is the largest absolute difference of any element. Of a checkpoint in an object store the
    manifest, the headers of safetensors and JSON are read. Exit status: 0, or 1 where they differ or something is damaged.
    """
    with failing():
        first = place_given(path)
        if health:
            _show_health(one_of(_here(first)), as_json=as_json)
            return
        if is_url(path) and other is None:
            _show_object(in_store(one_of(first)), match, as_json=as_json)
            return
        content = _matching(read_content(one_of(_here(first)), follow_symlinks=follow_symlinks), match)
        if other is None:
            facts = _facts(_here(first), follow_symlinks=follow_symlinks)
            _print(first, facts, content, as_json=as_json)
            return
        second = _matching(read_content(one_of(_here(place_given(other))), follow_symlinks=follow_symlinks), match)
        if not _compare(content, second, as_json=as_json):
            raise typer.Exit(DAMAGED)


def _here(place: Place) -> Path:
    try:
        return in_files(place)
    except TypeError:
        message = f"comparing takes the numbers. Fetch it first: safe-ckpt resume-path {place} --fetch DIR"
        raise ConfigError(key=str(place), message=message) from None


def _matching(content: TensorTable, pattern: str) -> TensorTable:
    return TensorTable(
        tensors=tuple(entry for entry in content.tensors if fnmatch.fnmatchcase(entry.name, pattern)),
        values=tuple(value for value in content.values if fnmatch.fnmatchcase(value.name, pattern)),
    )


def _facts(path: Path, *, follow_symlinks: bool) -> dict[str, Any]:
    if path.is_file() or (path / MANIFEST_NAME).exists():
        try:
            manifest = read_manifest(path)
        except UnsupportedFormatError as error:
            if "newer" in error.message:
                raise
        else:
            return _facts_of(manifest, "safe_ckpt directory" if path.is_dir() else "safe_ckpt file")
    return {"kind": kind_of(walk(path, follow_symlinks=follow_symlinks))}


def _facts_of(manifest: Manifest, kind: str) -> dict[str, Any]:
    facts = {name: getattr(manifest, name) for name in ("step", "created_at", "world_size", "metrics", "versions")}
    return {"kind": kind, **facts}


def _show_object(path: ObjectPath, match: str, *, as_json: bool) -> None:
    manifest, whole, unread = read_object_content(path)
    facts, content = _facts_of(manifest, "safe_ckpt directory"), _matching(whole, match)
    if as_json:
        files = [vars(entry) for entry in manifest.files]
        _print(path, {**facts, "files": files, "unread": unread}, content, as_json=True)
        return
    rows = [(entry.path, bytes_text(entry.size_bytes), entry.rank) for entry in manifest.files]
    print_table(("file", "size", "rank"), rows)
    _print(path, facts, content, as_json=False)
    if unread:
        advice = f"safe-ckpt resume-path {path} --fetch DIR, and then inspect, shows what is in them"
        say(f"not read: {listed(unread)}. {advice}")


def _print(path: Place, facts: dict[str, Any], content: TensorTable, *, as_json: bool) -> None:
    total = sum(entry.size_bytes for entry in content.tensors)
    if as_json:
        tensors = [
            {"name": e.name, "dtype": e.dtype, "shape": e.shape, "size_bytes": e.size_bytes, "note": e.note}
            for e in content.tensors
        ]
        values = [{"name": v.name, "value": _as_json(v), "text": v.text} for v in content.values]
        print_json({"path": str(path), **facts, "tensor_bytes": total, "tensors": tensors, "values": values})
        return
    say(", ".join(f"{key} {metrics_text(v) if key == 'metrics' else v}" for key, v in facts.items() if v != {}))
    rows = [(e.name, e.dtype, list(e.shape), bytes_text(e.size_bytes), e.note) for e in content.tensors]
    if rows:
        print_table(("tensor", "dtype", "shape", "size", "note"), rows)
    if content.values:
        print_table(("value", ""), [(value.name, value.text) for value in content.values])
    say(f"{len(content.tensors)} tensors, {bytes_text(total)}; {len(content.values)} values")


def _as_json(value: Value) -> object:
    """A value as JSON has it: None for objects, for what is no number (NaN, infinity) and what is beyond any number."""
    parts = value.value if isinstance(value.value, list | tuple) else (value.value,)
    fits = all(
        math.isfinite(part) if isinstance(part, float) else not isinstance(part, int) or part.bit_length() <= _MOST_BITS
        for part in parts
    )
    return value.value if value.is_plain and fits else None


def _compare(first: TensorTable, second: TensorTable, *, as_json: bool) -> bool:
    from safe_ckpt.tools.inspection.values import Mapped, same  # torch: a second that only this needs

    one, other = ({entry.name: entry for entry in content.tensors} for content in (first, second))
    here, there = ({value.name: value for value in content.values} for content in (first, second))
    maps = (Mapped(), Mapped())
    rows: list[tuple[str, float | None, str]] = []
    for name in sorted({*one, *other}):
        what, largest = _difference(one.get(name), other.get(name), maps)
        if what:
            rows.append((name, largest, what))
    for name in sorted({*here, *there}):
        pair = (here.get(name), there.get(name))
        if pair[0] is None or pair[1] is None or not same(pair[0].value, pair[1].value):
            rows.append((name, None, " / ".join("absent" if value is None else value.text for value in pair)))
    compared = len({*one} & {*other})
    if as_json:
        differences = [dict(zip(("name", "max_abs_difference", "what"), row, strict=True)) for row in rows]
        print_json({"tensors_compared": compared, "equal": not rows, "differences": differences})
        return not rows
    if rows:
        cells = [(name, "" if largest is None else f"{largest:.6g}", what) for name, largest, what in rows]
        print_table(("name", "max |difference|", "what"), cells)
    say(f"{compared} tensors in both; {len(rows)} differences")
    return not rows


def _difference(one: Entry | None, other: Entry | None, maps: tuple[Mapped, Mapped]) -> tuple[str, float | None]:
    """The kind of a difference, "" for none, and the largest absolute difference where there is one."""
    from safe_ckpt.tools.inspection.values import difference

    if one is None or other is None:
        return "only in the second" if one is None else "only in the first", None
    if one.shape != other.shape:
        return f"{list(one.shape)} / {list(other.shape)}", None
    try:
        largest = difference(maps[0].tensor(one), maps[1].tensor(other))
    except UnsupportedFormatError as error:
        return f"cannot be compared: {error.message}", None
    if one.dtype != other.dtype:
        return f"{one.dtype} / {other.dtype}", None if math.isinf(largest) else largest
    if math.isinf(largest):
        return "values: one has NaN or an infinity where the other has not", None
    return "values" if largest else "", largest


def _show_health(path: Path, *, as_json: bool) -> None:
    """Print for each file its numbers and their norm; then the worst tensors."""
    found = read_manifest(path).health
    if not found:
        say("its numbers were not looked at: it was saved with health.action=off, or by an earlier version")
        return
    if as_json:
        print_json({"path": str(path), **found})
        return
    rows = []
    for name, facts in sorted(found["files"].items()):
        extremes = (f"{facts[key]:.4g}" if key in facts else "" for key in ("norm", "least", "most"))
        rows.append((name or path.name, facts.get("numbers", 0), *extremes, facts.get("largest", "")))
    print_table(("file", "numbers", "norm", "least", "most", "largest in"), rows)
    sick = [
        (row["name"], row["numbers"], row["nan"], row["inf"])
        for f in found["files"].values()
        for row in f.get("sick", ())
    ]
    if sick:
        print_table(("tensor", "numbers", "NaN", "Inf"), sick)
    say(f"{'healthy' if found['healthy'] else describe_unhealthy(found)}{', unhealthy' if found['marked'] else ''}")
