"""Resuming: which checkpoint, agreed by all ranks, and nothing applied before all of them have verified what they need.

A checkpoint is treated as corrupt only if bytes differ, and differ again in a second read. An unreadable file is an error on
all ranks. A missing file is waited for; then the checkpoint is skipped, but not treated as corrupt.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt import events
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, Manifest, read_manifest
from safe_ckpt.core.formats.verify import KnownDamage
from safe_ckpt.core.home.candidates import Candidate
from safe_ckpt.core.home.object_home import ObjectRoot
from safe_ckpt.core.home.standing import standing_of
from safe_ckpt.core.resuming.mirror_resume import Mirrored
from safe_ckpt.core.resuming.object_candidate import KINDS, ObjectReader, judge, kind_of
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.save import Root
from safe_ckpt.core.saving.set_up import Patience, await_visible, listed
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.presence import ShortReadError
from safe_ckpt.core.storage.reader import drop_cache
from safe_ckpt.errors import (
    CorruptCheckpointError,
    DirectoryNotSharedError,
    IncompleteCheckpointError,
    NoValidCheckpointError,
    SafeCheckpointError,
    naming,
)

logger = logging.getLogger(__name__)
_VISIBLE_S = 60.0
_PAUSE_S = 0.1
BY_NAME = "safe-ckpt list shows their names"

Load = Callable[[Path], Any] | ObjectReader
"""Reads one candidate on this rank, verifying what it reads; raises ``CorruptCheckpointError``, of which
``IncompleteCheckpointError`` only says that a file was not there, or ``OSError``."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The checkpoint to resume from, verified on every rank.

    Attributes:
        info: which one.
        loaded: what ``load`` returned for it on this rank.
    """

    info: CheckpointInfo
    loaded: Any


def choose(
    engine: Engine,
    workspace: Root,
    list_candidates: Callable[[], Sequence[Candidate]],
    load: Load,
    view: Mapping[str, object] | None = None,
    accepts: Callable[[Candidate], bool] | None = None,
    *,
    named: bool = False,
    by_name: str = BY_NAME,
) -> Chosen | None:
    """Find the newest checkpoint that every rank can read and verify. Every rank calls this.

    All ranks skip a corrupt one, and move it into quarantine once an older one was verified. One with a missing file, and one
    that would run code, is skipped as well, and stays where it is.

    Args:
        engine: where the ranks meet.
        workspace: the directory that is held.
        list_candidates: lists what there is; called on rank 0.
        load: reads a candidate; called on every rank.
        view: further values that must be equal on all ranks.
        accepts: which candidates of the mirror are fetched; None for all of which one can resume. Called on rank 0.
        named: the caller asked for these; else marked ones are passed over.
        by_name: how a user names the one to resume from, for what ends this.

    Returns:
        The choice, or None when there never was a checkpoint.

    Raises:
        NoValidCheckpointError: there are or were checkpoints and none is usable.
        SafeCheckpointError: a checkpoint could not be read, on every rank. It is not treated as corrupt then.
    """
    with engine.together("resume"):
        begun = time.monotonic()
        mirrored = Mirrored(engine, workspace, list_candidates, accepts)
        mirrored.fetch_newer()
        manifests: dict[str, Manifest] = {}  # on rank 0

        def survey(_: object) -> dict[str, Any]:
            candidates = listed(list_candidates, engine.config.timeouts)
            manifests.update({_name(workspace, c): c.manifest for c in candidates if c.manifest is not None})
            return _survey(workspace, candidates, named=named)

        plan = engine.agree("resume", must_match={"directory": workspace.path, **(view or {})}, decide=survey)
        rejected: dict[str, str] = dict(plan["rejected"])
        damaged: dict[str, str] = {name: rejected[name] for name in plan["damaged"]}
        for name in [*plan["passed"], *plan["missing"]]:
            logger.warning("%s is passed over: %s", workspace.path / name, rejected[name])
        damage = KnownDamage()
        for name, facts in mirrored.after(plan["infos"]):
            path = workspace.path / name
            damaged.pop(name, None)  # one of that name was fetched, and the damaged one is in quarantine already
            info = CheckpointInfo.from_json(facts, beside=workspace.path)
            with naming_older(path, by_name):
                loaded, verdict = _try(engine, path, load, damage, ours=info.verified)
            if verdict is None:
                settle = functools.partial(_settle, engine, workspace, damaged, info, manifests.get(name))
                health = engine.agree("resume from", must_match={"name": name}, decide=settle)
                seconds = time.monotonic() - begun
                engine.emit(
                    events.Resumed(
                        rank=engine.rank, path=str(path), step=info.step, seconds=seconds, rejected=len(rejected)
                    )
                )
                mirrored.upload(info)
                _recall(engine, workspace, info, health, load)
                return Chosen(info=info, loaded=loaded)
            rejected[name] = verdict["why"]
            if verdict["kind"] == "bad":
                damaged[name] = verdict["why"]
            how = "cannot be used" if verdict["kind"] == "bad" else "is passed over"
            logger.warning("%s %s: %s", path, how, verdict["why"])
        if rejected or plan["quarantined"]:
            seen = {**rejected, **dict.fromkeys(plan["quarantined"], "in quarantine")}
            message = (
                "there are checkpoints, but none is usable. Repair one, or move them all elsewhere to start afresh"
            )
            raise NoValidCheckpointError(path=str(workspace.path), message=message, rejected=seen)
        return None


def _known_of(engine: Engine, info: CheckpointInfo, listed: Manifest | None) -> Mapping[str, Any]:
    """What is known of the chosen one's numbers. On rank 0: that of all candidates would be much to tell every rank."""
    try:
        if listed is None and info.verified:  # it came from the mirror
            listed = read_manifest(info.path)
        engine.trained.recall(listed, info.path)
        return listed.health if listed is not None else {}
    except (OSError, SafeCheckpointError) as error:
        logger.warning("%s: its manifest cannot be read again, so masks are learnt anew: %s", info.path, error)
        return {}


def _recall(engine: Engine, workspace: Root, info: CheckpointInfo, health: Mapping[str, Any], load: Load) -> None:
    """What is known of the numbers and of the files that training goes on from."""
    engine.known.recall(health)
    if info.verified and (isinstance(info.path, ObjectPath) or presence.is_directory(info.path)):
        engine.unchanged.recall(workspace.path, info.path, load.verified() if isinstance(load, ObjectReader) else None)


def _settle(
    engine: Engine,
    workspace: Root,
    damaged: Mapping[str, str],
    info: CheckpointInfo,
    listed: Manifest | None,
    _: object,
) -> Mapping[str, Any]:
    """Rank 0, once a checkpoint was chosen: the damaged ones are moved. Returns what is known of the chosen one's numbers."""
    _quarantine(engine, workspace, damaged)
    return _known_of(engine, info, listed)


def check(engine: Engine, path: Path, load: Load) -> None:
    """Let every rank verify one checkpoint of which only the path is known. Every rank calls this.

    Raises:
        CorruptCheckpointError: it is damaged, on every rank.
        HostileCheckpointError: it would run code, on every rank.
        IncompleteCheckpointError: a file of it is not there, on every rank.
        SafeCheckpointError: it could not be read, on every rank.
    """
    _, verdict = _try(engine, path, load, KnownDamage(), ours=False)
    if verdict is not None:
        raise KINDS[verdict["kind"]](path=str(path), message=verdict["why"])
    engine.trained.recall_from(path)


@contextlib.contextmanager
def naming_older(path: Place, by_name: str = BY_NAME) -> Iterator[None]:
    """What ends the resume from ``path`` says how an older one is named. Nothing of it is remembered."""
    try:
        yield
    except Exception as error:
        line = f"This ended the resume from {path}. To go on from an older checkpoint, name it: {by_name}"
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(line)
        else:
            logger.error("%s", line)  # noqa: TRY400 - the traceback is on its way
        raise


def apply(engine: Engine, action: Callable[[], None], path: Place | None = None, by_name: str = BY_NAME) -> None:
    """Do ``action`` on every rank and raise on all if it fails on one. Every rank calls this.

    Args:
        engine: where the ranks meet.
        action: puts into place what was read.
        path: the checkpoint that this resumes from; None where ``action`` only looks.
        by_name: how a user names another one.

    Raises:
        SafeCheckpointError: what ``action`` raised on the lowest rank on which it did. A rank on which it failed raises its
            own exception instead, whatever that is, with its traceback.
    """
    with naming_older(path, by_name) if path is not None else contextlib.nullcontext():
        engine.agree("restored", local=action, phase="restore")


def _survey(workspace: Root, candidates: Sequence[Candidate], *, named: bool) -> dict[str, Any]:
    standing = standing_of(candidates, named=named)
    by_name = {_name(workspace, c): why for c in candidates if (why := standing.by_name_only.get(c.path))}
    return {
        "passed": list(by_name),
        "infos": {_name(workspace, c): _info(c).to_json() for c in standing.order},
        "rejected": {_name(workspace, c): c.problem for c in standing.unusable} | by_name,
        "damaged": [_name(workspace, c) for c in candidates if c.damaged],
        "missing": [_name(workspace, c) for c in candidates if c.missing and not c.foreign],
        "quarantined": [path.name for path in workspace.quarantined()],
    }


def _name(workspace: Root, candidate: Candidate) -> str:
    if isinstance(candidate.path, ObjectPath):
        return candidate.path.name
    return candidate.path.relative_to(str(workspace.path)).as_posix()


def _info(candidate: Candidate) -> CheckpointInfo:
    if candidate.info is not None:
        return candidate.info
    return CheckpointInfo(
        path=candidate.path,
        name=candidate.path.name,
        step=-1,
        sequence=0,
        metrics={},
        created_at="",
        world_size=0,
        size_bytes=candidate.path.stat().st_size if isinstance(candidate.path, Path) else 0,
        verified=False,
    )


def _try(
    engine: Engine, path: Place, load: Load, damage: KnownDamage, *, ours: bool
) -> tuple[Any, dict[str, Any] | None]:
    """Read one candidate on all ranks. Returns what this rank read, and why all pass it over, None when all can use it."""
    if isinstance(load, ObjectReader) and isinstance(path, ObjectPath):
        return load.try_one(path)
    if isinstance(load, ObjectReader) or isinstance(path, ObjectPath):
        raise TypeError(f"{path}: the wrong reader")
    return _try_files(engine, path, load, damage, ours=ours)


def _try_files(
    engine: Engine, path: Path, load: Callable[[Path], Any], damage: KnownDamage, *, ours: bool
) -> tuple[Any, dict[str, Any] | None]:
    loaded: Any = None
    patience = Patience(engine.config.timeouts)
    seen = engine.agree(
        "candidate files", must_match={"path": path}, decide=lambda _: _files(path, patience, ours=ours)
    )
    if seen["missing"]:
        why = f"rank 0: {path} ({', '.join(seen['missing'])}): is missing"
        return None, {"why": why, "kind": "missing"}

    def read() -> dict[str, str]:
        nonlocal loaded
        try:
            with naming(rank=engine.rank, phase=f"reading {path}"):
                if engine.rank != 0:
                    _await_files(engine, path, seen)
                damage.refuse(path)
                loaded = _read(path, load, Patience(engine.config.timeouts))
        except CorruptCheckpointError as error:
            kind = kind_of(error)
            if kind == "bad":
                damage.note(path, error)
            return {kind: str(error)}
        return {}

    verdict = engine.coordinator.agree(
        "resume candidate",
        timeout_s=engine.config.timeouts.lengthy_s,
        must_match={"path": path},
        local=read,
        decide=judge,
    )
    return loaded, verdict


def _files(path: Path, patience: Patience, *, ours: bool) -> dict[str, Any]:
    """Rank 0: which save this is and its files, as far as its manifest can be read, and those that stay missing."""
    while True:
        over = not patience.left_s
        try:
            manifest = read_manifest(path)
            break
        except IncompleteCheckpointError as error:
            # Without a manifest it is another tool's, unless it had one, or its directory names one.
            if not ours and MANIFEST_NAME not in _names_in(path):
                return {"op_id": "", "files": [], "missing": []}
            if over or not patience.until_there(path / error.file):
                return {"op_id": "", "files": [], "missing": [error.file or path.name]}
        except SafeCheckpointError:  # every rank will find it so
            return {"op_id": "", "files": [], "missing": []}
    names = [MANIFEST_NAME, *(entry.path for entry in manifest.files)] if presence.is_directory(path) else []
    missing = [name for name in names if not patience.until_there(path / name)]
    return {"op_id": manifest.op_id, "files": names, "missing": missing}


def _names_in(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _await_files(engine: Engine, path: Path, seen: Mapping[str, Any]) -> None:
    # Caches of network file systems lag behind. So this rank waits for files that rank 0 sees, and for the replacement of an
    # old manifest.
    rank = engine.rank
    deadline = time.monotonic() + min(_VISIBLE_S, engine.config.timeouts.barrier_s / 2)
    for file in [path, *(path / name for name in seen["files"])]:
        if not await_visible(file, max(0.0, deadline - time.monotonic())):
            raise DirectoryNotSharedError(path=str(file), rank=rank, ranks=(rank,))
    while seen["op_id"] and _op_id(path) != seen["op_id"]:
        if time.monotonic() >= deadline:
            raise DirectoryNotSharedError(path=str(path), rank=rank, ranks=(rank,))
        time.sleep(0.05)


def _op_id(path: Path) -> str:
    try:
        return read_manifest(path).op_id
    except (SafeCheckpointError, FileNotFoundError):
        return ""


def _read(path: Path, load: Callable[[Path], Any], patience: Patience) -> Any:
    """Load, and again when a file was missing and came back, or once when bytes differed.

    If a second read from the disk shows no mismatch, the memory or the network was at fault.
    """
    differed = False
    while True:
        over = not patience.left_s
        try:
            return load(path)
        except IncompleteCheckpointError as error:
            if over or not patience.until_there(path / error.file):
                raise
        except CorruptCheckpointError as error:
            if differed:
                raise
            differed = True
            logger.warning("%s: reading it once more", error)
            drop_cache(path)
        except ShortReadError as error:
            if over:
                raise
            logger.info("%s: waiting for it to be seen as it is", error)
            drop_cache(path)
            time.sleep(_PAUSE_S)
        except FileNotFoundError as error:
            _await_missing(path, error, patience, over=over)


def _await_missing(path: Path, error: FileNotFoundError, patience: Patience, *, over: bool) -> None:
    file = Path(error.filename or "?")
    if isinstance(error, SafeCheckpointError) or path not in (file, *file.parents):
        raise error
    if over or not patience.until_there(file):
        raise IncompleteCheckpointError(path=str(path), file=file.name, message="is missing") from error


def _quarantine(engine: Engine, workspace: Root, rejected: Mapping[str, str]) -> None:
    for name, reason in rejected.items():
        path = workspace.path / name
        target: Place
        try:
            if isinstance(workspace, ObjectRoot):
                target = workspace.quarantine(workspace.path / name)
            else:
                target = workspace.quarantine(workspace.path / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s could not be moved into quarantine: %s", path, error)
            continue
        engine.emit(events.Quarantined(rank=engine.rank, path=str(path), moved_to=str(target), reason=reason))
