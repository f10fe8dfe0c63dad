"""``safe-ckpt gc``: delete what a policy does not keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, Directory, bytes_text, print_json, say, tell
from safe_ckpt.config import Retention
from safe_ckpt.core.manifest import CheckpointInfo
from safe_ckpt.core.retention import to_delete
from safe_ckpt.core.root import HIDDEN, Root
from safe_ckpt.errors import ConfigError, DirectoryError, SafeCheckpointError
from safe_ckpt.formats.shelf import Shelf, find_shelf


def gc(
    directory: Directory,
    keep_last: Annotated[int | None, typer.Option(help="Keep this many of the newest.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep this many of the best by --metric.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric that --keep-best goes by.")] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Whether lower or higher is better.")] = "min",
    keep_every_steps: Annotated[int | None, typer.Option(help="Keep those whose step is a multiple of this.")] = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Empty the quarantine too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the committed checkpoints in DIR that no rule keeps, and what a killed job left half-written.

    What any rule keeps stays; the newest always stays; without a rule all of them stay. Only checkpoints of ours are deleted.
    A directory that a live job holds is left alone: that job keeps its own order. Exit status: 0, or 1 when it is held or
    something could not be deleted.
    """
    try:
        policy = Retention(
            keep_last=keep_last, keep_best=keep_best, metric=metric, mode=mode, keep_every_steps=keep_every_steps
        )
        shelf = find_shelf(directory)
        if dry_run or not (
            shelf.hidden or _doomed(shelf, policy)
        ):  # of another tool altogether: nothing is locked there
            gone: list[Path] = []
            doomed, besides = _doomed(shelf, policy), _besides(shelf, quarantine=quarantine)
        else:
            shelf, doomed, besides, gone = _collect(directory, shelf, policy, quarantine=quarantine)
    except ConfigError as error:
        say(str(error))
        raise typer.Exit(2) from error
    except (SafeCheckpointError, OSError) as error:
        say(str(error))
        raise typer.Exit(DAMAGED) from error
    _tell(shelf, doomed, besides, gone, dry_run=dry_run, as_json=as_json)
    if not dry_run and len(gone) < len(doomed) + len(besides):
        raise typer.Exit(DAMAGED)


def _doomed(shelf: Shelf, policy: Retention) -> list[CheckpointInfo]:
    infos = [candidate.info for candidate in shelf.usable if not candidate.foreign]
    return to_delete([info for info in infos if info is not None], policy)


def _besides(shelf: Shelf, *, quarantine: bool) -> list[Path]:
    return [*shelf.quarantined] if quarantine else []


def _collect(
    directory: Path, shelf: Shelf, policy: Retention, *, quarantine: bool
) -> tuple[Shelf, list[CheckpointInfo], list[Path], list[Path]]:
    root = Root(shelf.folder, lease_s=60.0, hidden=shelf.hidden or shelf.folder / HIDDEN)
    for folder in (root.hidden, root.staging, root.trash, root.quarantine, root.kept):
        if folder.is_symlink():
            message = "is a link, and what is behind it would be deleted: put the folder itself there"
            raise DirectoryError(path=str(folder), message=message)
    root.open()  # takes the lock, and sweeps what a killed job left
    try:
        shelf = find_shelf(directory)  # once more: now nobody else changes it
        doomed, besides = _doomed(shelf, policy), _besides(shelf, quarantine=quarantine)
        return shelf, doomed, besides, root.discard([*(info.path for info in doomed), *besides])
    finally:
        root.close()
        root.tidy()


def _tell(
    shelf: Shelf, doomed: list[CheckpointInfo], besides: list[Path], gone: list[Path], *, dry_run: bool, as_json: bool
) -> None:
    rows: list[dict[str, Any]] = [
        {"path": str(info.path), "step": info.step, "size_bytes": info.size_bytes, "deleted": info.path in gone}
        for info in doomed
    ]
    rows += [{"path": str(path), "step": None, "size_bytes": None, "deleted": path in gone} for path in besides]
    kept = len(shelf.usable) - len(doomed)
    if as_json:
        print_json({"dry_run": dry_run, "kept": kept, "checkpoints": rows})
        return
    for row in rows:
        done = "would delete" if dry_run else "deleted" if row["deleted"] else "could not delete"
        tell(f"{done} {row['path']} {bytes_text(row['size_bytes'])}".rstrip())
    freed = bytes_text(sum(info.size_bytes for info in doomed if dry_run or info.path in gone))
    say(f"{kept} kept; {freed} {'would be freed' if dry_run else 'freed'}")
