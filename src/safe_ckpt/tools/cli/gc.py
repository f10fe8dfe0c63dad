"""``safe-ckpt gc``: delete what a policy does not keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.holders import WholeDirectory
from safe_ckpt.core.home.retention import to_delete
from safe_ckpt.core.home.standing import replaced_among
from safe_ckpt.core.storage.durable import freed_bytes
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.errors import DirectoryError
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, Directory, ending_on_signals, failing, print_json, say, tell
from safe_ckpt.tools.inspection.check import judge
from safe_ckpt.tools.inspection.listing import Listing, read_listing
from safe_ckpt.tools.inspection.objects.check import plan_any
from safe_ckpt.tools.inspection.objects.listing import ObjectListing, read_objects
from safe_ckpt.tools.inspection.objects.reach import place_of

_AT_A_TIME = 50  # what is deleted is first named in the head, which has no room for more


def gc(
    directory: Directory,
    keep_last: Annotated[int | None, typer.Option(help="Keep this many of the newest.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep this many of the best by --metric.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric that --keep-best goes by.")] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Whether lower or higher is better.")] = "min",
    keep_every_steps: Annotated[int | None, typer.Option(help="Keep those whose step is a multiple of this.")] = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="Empty the quarantine too; in an object store also folders without a manifest."
        ),
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Trust the manifests of what is kept.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the committed checkpoints in DIR that no rule keeps, and what a killed job left half-written.

    What any rule keeps stays, and so does what a resume takes: the newest, the tag that DeepSpeed's file latest names, the
    best of a Transformers Trainer, what a link such as last.ckpt leads to. Without a rule all stay. What is kept is read and
    verified first: a damaged one does not count, and stays where it is. Only checkpoints of ours are deleted, and no copies
    under other names. Where a live job holds the directory or a checkpoint in it, nothing is deleted: that job keeps its own
    order. Exit status: 0, or 1 when it is held or something could not be deleted.
    """
    with failing():
        policy = Retention(
            keep_last=keep_last, keep_best=keep_best, metric=metric, mode=mode, keep_every_steps=keep_every_steps
        )
        select = partial(_Selection, policy=policy, quarantine=quarantine, verify=not no_verify)
        place = place_of(directory)
        if isinstance(place, ObjectPath):
            selection = _in_store(place, select, dry_run=dry_run)
        else:
            selection = _in_directory(place, select, dry_run=dry_run)
    _report(selection, dry_run=dry_run, as_json=as_json)
    if not dry_run and len(selection.gone) < len(selection.to_delete) + len(selection.besides):
        raise typer.Exit(DAMAGED)


class _Selection:
    """What is to be deleted, and what became of it."""

    def __init__(self, listing: Listing | ObjectListing, *, policy: Retention, quarantine: bool, verify: bool) -> None:
        for path, why in listing.unreadable.items():
            raise DirectoryError(path=str(path), message=f"cannot be read, so nothing is deleted: {why}")
        self.damaged: list[Place] = []
        self.protected: dict[Place, str] = {}
        sound: set[Place] = set()
        while True:  # again when one that would be kept is damaged: it does not count, and another one is kept
            standing = listing.standing.without(self.damaged)
            infos = [candidate.info for candidate in standing.usable if not candidate.foreign]
            left = [
                info for info in infos if info is not None and not info.marked
            ]  # marked ones do not count, and stay
            replaced = replaced_among(left)
            chosen = [*replaced, *to_delete([info for info in left if info not in replaced], policy)]
            self.protected = {i.path: standing.protected[i.path] for i in chosen if i.path in standing.protected}
            self.to_delete: list[CheckpointInfo] = [info for info in chosen if info.path not in self.protected]
            kept = {info.path for info in left} - {info.path for info in self.to_delete} - sound
            bad = _damaged_among(sorted(kept, key=str)) if verify and self.to_delete else []
            sound |= kept - set(bad)
            self.damaged += bad
            if not bad:
                break
        self.kept = len(listing.usable) - len(self.to_delete) - len(self.damaged)
        unknown: Sequence[Place] = listing.unknown if isinstance(listing, ObjectListing) else ()
        self.besides: list[Place] = [*listing.quarantined, *unknown] if quarantine else []
        self.unknown = () if quarantine else unknown
        # Of a file that is shared nothing is freed as long as one name is left.
        self.frees = freed_bytes(info.path for info in self.to_delete if isinstance(info.path, Path))
        self.frees += sum(info.size_bytes for info in self.to_delete if not isinstance(info.path, Path))
        self.gone: list[Place] = []


def _damaged_among(paths: Sequence[Place]) -> list[Place]:
    return [verdict.path for verdict in judge(map(plan_any, paths)) if verdict.state == "damaged"]


def _in_directory(directory: Path, select: Callable[[Listing], _Selection], *, dry_run: bool) -> _Selection:
    listing = read_listing(directory, tags_below=False)
    # Where there are only checkpoints of another tool, nothing is locked, and nothing deleted.
    ours = listing.hidden or any(not candidate.foreign for candidate in listing.usable)
    if dry_run or not ours:
        return select(listing)
    whole = WholeDirectory(listing.folder, lease_s=CheckpointConfig.from_environment().lease_s)
    with ending_on_signals():
        whole.open()  # takes every lock, and sweeps what killed jobs left
        try:
            selection = select(read_listing(directory, tags_below=False))  # once more: now no other job changes it
            selection.gone += [info.path for info in selection.to_delete if whole.delete(info)]
            selection.gone += [path for path in selection.besides if isinstance(path, Path) and whole.discard(path)]
        finally:
            whole.close()
    return selection


def _in_store(directory: ObjectPath, select: Callable[[ObjectListing], _Selection], *, dry_run: bool) -> _Selection:
    from safe_ckpt.core.home.object_home import ObjectRoot  # an HTTP client: a delay that no other command needs

    listing = read_objects(directory)
    if dry_run or not (listing.head or listing.usable or listing.unknown):
        return select(listing)
    config = CheckpointConfig.from_environment()
    root = ObjectRoot(directory, lease_s=config.lease_s, unfenced=config.storage.unfenced)
    with ending_on_signals():
        root.open()  # owns the directory, and sweeps what a killed job left
        try:
            selection = select(read_objects(directory))  # once more: now no other job changes it
            doomed = [*(info.path for info in selection.to_delete), *selection.besides]
            for at in range(0, len(doomed), _AT_A_TIME):
                selection.gone += root.discard(doomed[at : at + _AT_A_TIME])
        finally:
            root.close()
    return selection


def _report(selection: _Selection, *, dry_run: bool, as_json: bool) -> None:
    gone = selection.gone
    rows: list[dict[str, Any]] = [
        {
            "path": str(info.path),
            "step": info.step,
            "size_bytes": info.size_bytes,
            "deleted": info.path in gone,
        }
        for info in selection.to_delete
    ]
    rows += [
        {"path": str(path), "step": None, "size_bytes": None, "deleted": path in gone} for path in selection.besides
    ]
    if as_json:
        damaged = [str(path) for path in selection.damaged]
        spared = [{"path": str(path), "reason": why} for path, why in selection.protected.items()]
        facts = {"dry_run": dry_run, "kept": selection.kept, "damaged": damaged, "protected": spared}
        print_json({**facts, "checkpoints": rows})
        return
    for row in rows:
        done = "would delete" if dry_run else "deleted" if row["deleted"] else "could not delete"
        tell(f"{done} {row['path']} {bytes_text(row['size_bytes'])}".rstrip())
    for path in selection.damaged:
        say(f"{path} is damaged: it does not count, and stays for you to look at")
    for path, why in selection.protected.items():
        say(f"{path} is kept: {why}")
    for path in selection.unknown:
        say(f"{path} has no manifest, and no job says that it is its own: --quarantine deletes it")
    freed = bytes_text(selection.frees if dry_run or gone else 0)
    say(f"{selection.kept} kept; {freed} {'would be freed' if dry_run else 'freed'}")
