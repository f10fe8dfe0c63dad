"""``safe-ckpt gc``: delete what a policy does not keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import typer

from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.holders import whole_at
from safe_ckpt.core.home.retention import to_delete, unjudged
from safe_ckpt.core.home.standing import replaced_among
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import frees_bytes
from safe_ckpt.errors import ConfigError, DirectoryError
from safe_ckpt.settings.texts import option
from safe_ckpt.text import bytes_text, listed
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, Directory, ending_on_signals, failing, print_json, say, tell
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import Listing, read_listing


def gc(
    directory: Directory,
    keep_last: Annotated[int | None, typer.Option(help=option(Retention, "keep_last"))] = None,
    keep_best: Annotated[int | None, typer.Option(help=option(Retention, "keep_best"))] = None,
    metric: Annotated[str | None, typer.Option(help=option(Retention, "metric"))] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help=option(Retention, "mode"))] = "min",
    keep_every_steps: Annotated[int | None, typer.Option(help=option(Retention, "keep_every_steps"))] = None,
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
    order. Exit status: 0; 2 when none has the metric; 1 when it is held or something could not be deleted.
    """
    with failing():
        policy = Retention(
            keep_last=keep_last, keep_best=keep_best, metric=metric, mode=mode, keep_every_steps=keep_every_steps
        )
        select = partial(_Selection, policy=policy, quarantine=quarantine, verify=not no_verify)
        selection = _carried_out(place_given(directory), select, dry_run=dry_run)
    _report(selection, dry_run=dry_run, as_json=as_json)
    if not dry_run and len(selection.gone) < len(selection.to_delete) + len(selection.besides):
        raise typer.Exit(DAMAGED)


class _Selection:
    """The checkpoints that are to be deleted, and what became of them."""

    def __init__(self, listing: Listing, *, policy: Retention, quarantine: bool, verify: bool) -> None:
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
            counted = [info for info in left if info not in replaced]
            if (missing := unjudged(counted, policy)) is not None:
                names = listed([one.name for one in self.damaged])
                besides = f"; damaged, and not counted: {names}" if names else ""
                raise ConfigError(key="--metric", message=f"{missing}{besides}. Correct the name, or omit --keep-best")
            chosen = [*replaced, *to_delete(counted, policy)]
            spared = {**listing.held, **standing.protected}
            self.protected = {i.path: spared[i.path] for i in chosen if i.path in spared}
            self.to_delete: list[CheckpointInfo] = [info for info in chosen if info.path not in self.protected]
            kept = {info.path for info in left} - {info.path for info in self.to_delete} - sound
            verdicts = verify_tasks(map(plan_tasks, sorted(kept, key=str))) if verify and self.to_delete else []
            bad = [verdict.path for verdict in verdicts if verdict.state == "damaged"]
            sound |= kept - set(bad)
            self.damaged += bad
            if not bad:
                break
        self.kept = len(listing.standing.usable) - len(self.to_delete) - len(self.damaged)
        self.besides: list[Place] = [*listing.quarantined, *listing.unknown] if quarantine else []
        self.unknown = () if quarantine else listing.unknown
        sizes = {info.path: info.size_bytes for info in self.to_delete}
        self.frees = frees_bytes(list(sizes), sizes)
        self.gone: list[Place] = []


def _carried_out(place: Place, select: Callable[[Listing], _Selection], *, dry_run: bool) -> _Selection:
    listing = read_listing(place, tags_below=False)
    # Where there are only checkpoints of another tool, nothing is locked, and nothing deleted.
    ours = listing.is_ours or any(not candidate.foreign for candidate in listing.standing.usable)
    if dry_run or not ours:
        return select(listing)
    config = CheckpointConfig.from_environment()
    whole = whole_at(listing.folder, lease_s=config.lease_s, unfenced=config.storage.unfenced)
    with ending_on_signals():
        whole.open()  # takes every lock, and sweeps what killed jobs left
        try:
            selection = select(read_listing(place, tags_below=False))  # once more: now no other job changes it
            selection.gone += whole.delete(selection.to_delete)
            selection.gone += whole.discard(selection.besides)
        finally:
            whole.close()
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
