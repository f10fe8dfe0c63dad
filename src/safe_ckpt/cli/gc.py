"""``safe-ckpt gc``: delete what a policy does not keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, Directory, failing, print_json, say, tell
from safe_ckpt.config import Retention
from safe_ckpt.core.directory.retention import to_delete
from safe_ckpt.core.directory.workspace import HIDDEN, Workspace
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.errors import DirectoryError
from safe_ckpt.inspection.check import judge, plan
from safe_ckpt.inspection.listing import Listing, read_listing
from safe_ckpt.text import bytes_text


def gc(
    directory: Directory,
    keep_last: Annotated[int | None, typer.Option(help="Keep this many of the newest.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep this many of the best by --metric.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric that --keep-best goes by.")] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Whether lower or higher is better.")] = "min",
    keep_every_steps: Annotated[int | None, typer.Option(help="Keep those whose step is a multiple of this.")] = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Empty the quarantine too.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Trust the manifests of what is kept.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the committed checkpoints in DIR that no rule keeps, and what a killed job left half-written.

    What any rule keeps stays; the newest always stays; without a rule all of them stay. What is kept is read and verified
    first: a damaged one does not count, and stays where it is. Only checkpoints of ours are deleted, and no
    copies under other names. A directory that a live job holds is left alone: that job keeps its own order. Exit status:
    0, or 1 when it is held or something could not be deleted.
    """
    with failing():
        policy = Retention(
            keep_last=keep_last, keep_best=keep_best, metric=metric, mode=mode, keep_every_steps=keep_every_steps
        )
        select = partial(_Selection, policy=policy, quarantine=quarantine, verify=not no_verify)
        listing = read_listing(directory, tags_below=False)
        # Where there are only checkpoints of another tool, nothing is locked, and nothing deleted.
        ours = listing.hidden or any(not candidate.foreign for candidate in listing.usable)
        selection = select(listing) if dry_run or not ours else _collect(directory, listing, select)
    _report(selection, dry_run=dry_run, as_json=as_json)
    if not dry_run and len(selection.gone) < len(selection.to_delete) + len(selection.besides):
        raise typer.Exit(DAMAGED)


class _Selection:
    """What is to be deleted, and what became of it."""

    def __init__(self, listing: Listing, *, policy: Retention, quarantine: bool, verify: bool) -> None:
        for path, why in listing.unreadable.items():
            raise DirectoryError(path=str(path), message=f"cannot be read, so nothing is deleted: {why}")
        infos = [candidate.info for candidate in listing.usable if not candidate.foreign]
        self.damaged: list[Path] = []
        sound: set[Path] = set()
        while True:  # again when one that would be kept is damaged: it does not count, and another one is kept
            left = [info for info in infos if info is not None and info.path not in self.damaged]
            self.to_delete: list[CheckpointInfo] = to_delete(left, policy)
            kept = {info.path for info in left} - {info.path for info in self.to_delete} - sound
            bad = _damaged_among(sorted(kept)) if verify and self.to_delete else []
            sound |= kept - set(bad)
            self.damaged += bad
            if not bad:
                break
        self.kept = len(listing.usable) - len(self.to_delete) - len(self.damaged)
        self.besides = [*listing.quarantined] if quarantine else []
        self.gone: list[Path] = []


def _damaged_among(paths: list[Path]) -> list[Path]:
    return [verdict.path for verdict in judge(map(plan, paths)) if verdict.state == "damaged"]


def _collect(directory: Path, listing: Listing, select: Callable[[Listing], _Selection]) -> _Selection:
    root = Workspace(listing.folder, lease_s=60.0, hidden=listing.hidden or listing.folder / HIDDEN)
    root.open()  # takes the lock, and sweeps what a killed job left
    try:
        selection = select(read_listing(directory, tags_below=False))  # once more: now no other job changes it
        selection.gone = root.discard([*(info.path for info in selection.to_delete), *selection.besides])
        return selection
    finally:
        root.close()


def _report(selection: _Selection, *, dry_run: bool, as_json: bool) -> None:
    gone = selection.gone
    rows: list[dict[str, Any]] = [
        {"path": str(info.path), "step": info.step, "size_bytes": info.size_bytes, "deleted": info.path in gone}
        for info in selection.to_delete
    ]
    rows += [
        {"path": str(path), "step": None, "size_bytes": None, "deleted": path in gone} for path in selection.besides
    ]
    if as_json:
        damaged = [str(path) for path in selection.damaged]
        print_json({"dry_run": dry_run, "kept": selection.kept, "damaged": damaged, "checkpoints": rows})
        return
    for row in rows:
        done = "would delete" if dry_run else "deleted" if row["deleted"] else "could not delete"
        tell(f"{done} {row['path']} {bytes_text(row['size_bytes'])}".rstrip())
    for path in selection.damaged:
        say(f"{path} is damaged: it does not count, and stays for you to look at")
    freed = bytes_text(sum(info.size_bytes for info in selection.to_delete if dry_run or info.path in gone))
    say(f"{selection.kept} kept; {freed} {'would be freed' if dry_run else 'freed'}")
