"""Resuming: which checkpoint, agreed by all ranks, and nothing applied before all of them have verified what they need.

A checkpoint is treated as corrupt only if bytes differ, and differ again in a second read. An unreadable file is an error on
all ranks. A missing file is waited for; then the checkpoint is skipped, but not treated as corrupt.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt import events
from safe_ckpt.core.formats.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.home.home import Candidate, Home, is_there
from safe_ckpt.core.home.standing import Standing, passed_over, standing_of
from safe_ckpt.core.home.visibility import listed
from safe_ckpt.core.resuming.candidate import KINDS, FileReader, Reader
from safe_ckpt.core.resuming.offered import Offered
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import NoValidCheckpointError, SafeCheckpointError

logger = logging.getLogger(__name__)
BY_NAME = "safe-ckpt list shows their names"


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
    home: Home,
    list_candidates: Callable[[], Sequence[Candidate]],
    reader: Reader,
    view: Mapping[str, object] | None = None,
    accepts: Callable[[Candidate], bool] | None = None,
    *,
    named: str = "",
    by_name: str = BY_NAME,
    others: Callable[[], Sequence[str]] | None = None,
) -> Chosen | None:
    """Find the newest checkpoint that every rank can read and verify. Every rank calls this.

    All ranks skip a corrupt one, and move it into quarantine once an older one was verified. One with a missing file, and one
    that would run code, is skipped as well, and stays where it is.

    Args:
        engine: where the ranks meet.
        home: the directory that is held.
        list_candidates: lists what there is; called on rank 0.
        reader: reads a candidate.
        view: further values that must be equal on all ranks.
        accepts: which candidates of the mirror are fetched; None for all of which one can resume. Called on rank 0.
        named: what the caller asked for; "" for the newest, where marked ones are passed over.
        by_name: how a user names the one to resume from, for what ends this.
        others: on rank 0, where there are no candidates, says what is there that this cannot resume from: no fresh start.

    Returns:
        The choice, or None when there never was a checkpoint.

    Raises:
        NoValidCheckpointError: there are or were checkpoints and none is usable.
        SafeCheckpointError: a checkpoint could not be read, on every rank. It is not treated as corrupt then.
    """
    with engine.together("resume"):
        begun = time.monotonic()
        mirrored = Offered(engine, home, list_candidates, accepts)
        mirrored.fetch_newer()
        known: dict[str, Candidate] = {}  # on rank 0, in the order in which they are tried

        def survey(_: object) -> dict[str, Any]:
            candidates = listed(list_candidates, engine.config.timeouts)
            standing = standing_of(candidates, named=bool(named))
            known.update({home.name_of(c.path): c for c in standing.order})
            alone = list(others()) if not candidates and others is not None else []
            return {"others": alone, **_survey(home, candidates, standing, named)}

        plan = engine.agree("resume", must_match={"directory": home.path, **(view or {})}, decide=survey)
        rejected: dict[str, str] = dict(plan["rejected"])
        damaged: dict[str, str] = {name: rejected[name] for name in plan["damaged"]}
        for name in [*plan["passed"], *plan["missing"]]:
            logger.warning("%s is passed over: %s", home.path / name, rejected[name])
        for name, facts in mirrored.after(plan["infos"]):
            path = home.path / name
            damaged.pop(name, None)  # one of that name was fetched, and the damaged one is in quarantine already
            info = CheckpointInfo.from_json(facts, beside=home.path)
            with naming_older(path, by_name):
                loaded, verdict = reader.try_one(path, ours=info.verified)
            if verdict is None:
                taken = known.get(name) if name not in rejected else None  # else it was fetched
                conclude = functools.partial(_quarantine_damaged, engine, home, damaged, info, taken)
                remembered = engine.agree("resume from", must_match={"name": name}, decide=conclude)
                rank, passed, seconds = engine.rank, len(rejected), time.monotonic() - begun
                engine.emit(events.Resumed(rank=rank, path=str(path), step=info.step, seconds=seconds, rejected=passed))
                _warn_of_newer(list(known.values()), taken, by_name)
                verified = reader.verified()
                engine.extensions.ask(
                    "a resume",
                    lambda one: one.resumed(home, info, remembered.get(one.name), verified),  # noqa: B023 - asked at once
                )
                return Chosen(info=info, loaded=loaded)
            rejected[name] = verdict["why"]
            if verdict["kind"] == "bad":
                damaged[name] = verdict["why"]
            how = "cannot be used" if verdict["kind"] == "bad" else "is passed over"
            logger.warning("%s %s: %s", path, how, verdict["why"])
        if rejected or plan["quarantined"] or plan["others"]:
            raise _none_usable(home.path, rejected, plan, by_name)
        if engine.rank == 0 and not named:
            logger.info("%s: there is no checkpoint, so this starts afresh", home.path)
        return None


def _none_usable(path: Place, rejected: Mapping[str, str], plan: Mapping[str, Any], by_name: str) -> Exception:
    seen = {**rejected, **dict.fromkeys(plan["quarantined"], "in quarantine")}
    seen |= dict.fromkeys(plan["others"], "a framework saved it, and loads it")
    message = "there are checkpoints, but none is usable. Repair one, or move them all elsewhere to start afresh"
    if plan["passed"]:
        message += (
            f". To go on from one with bad numbers all the same, name it: {by_name}. Numbers that are meant to be infinite are "
            "left out by health.ignore"
        )
    return NoValidCheckpointError(path=str(path), message=message, rejected=seen)


def _quarantine_damaged(
    engine: Engine,
    home: Home,
    damaged: Mapping[str, str],
    info: CheckpointInfo,
    taken: Candidate | None,
    _: object,
) -> dict[str, Any]:
    """Rank 0, once a checkpoint was chosen: the damaged ones are moved. Returns what all ranks must know of the chosen one.

    Of it alone: that of all candidates would be much to tell every rank.
    """
    _quarantine(engine, home, damaged)
    manifest = taken.manifest if taken is not None else None
    try:
        if manifest is None and info.verified:  # it was fetched
            manifest = read_manifest(info.path)
    except (OSError, SafeCheckpointError) as error:
        logger.warning("%s: its manifest cannot be read again, so masks are learnt anew: %s", info.path, error)
    return engine.extensions.ask("a resume", lambda one: one.remembers(manifest))


def _warn_of_newer(order: Sequence[Candidate], taken: Candidate | None, by_name: str) -> None:
    """Say what another tool has saved since. On rank 0: the others know of none."""
    newer = passed_over(order, taken) if taken is not None else None
    if newer is not None:
        logger.warning("%s %s: %s", *newer, by_name)


def check(engine: Engine, path: Path, load: Callable[[Path], Any]) -> None:
    """Let every rank verify one checkpoint of which only the path is known. Every rank calls this.

    Raises:
        CorruptCheckpointError: it is damaged, on every rank.
        HostileCheckpointError: it would run code, on every rank.
        IncompleteCheckpointError: a file of it is not there, on every rank.
        SafeCheckpointError: it could not be read, on every rank.
    """
    _, verdict = FileReader(engine, load).try_one(path, ours=False)
    if verdict is not None:
        raise KINDS[verdict["kind"]](path=str(path), message=verdict["why"])
    engine.extensions.ask("a resume", lambda one: one.named(path))


@contextlib.contextmanager
def naming_older(path: Place, by_name: str = BY_NAME) -> Iterator[None]:
    """Have errors that end the resume from ``path``, if that is there, say how to name an older one. Nothing is remembered."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError) and _is_missing(path):
            raise  # a name that was mistyped
        line = f"This ended the resume from {path}. To go on from an older checkpoint, name it: {by_name}"
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(line)
        else:
            logger.error("%s", line)  # noqa: TRY400 - the traceback is on its way
        raise


def _is_missing(path: Place) -> bool:
    try:
        return not is_there(path)
    except OSError:
        return False


def apply(engine: Engine, action: Callable[[], object], path: Place | None = None, by_name: str = BY_NAME) -> None:
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

    def act() -> None:
        action()  # what it returns is for no other rank

    with naming_older(path, by_name) if path is not None else contextlib.nullcontext():
        engine.agree("restored", local=act, phase="restore")


def _survey(home: Home, candidates: Sequence[Candidate], standing: Standing, named: str) -> dict[str, Any]:
    by_name = {home.name_of(c.path): why for c in candidates if (why := standing.by_name_only.get(c.path))}
    aside = [path.name for path in home.quarantined()]
    return {
        "passed": list(by_name),
        "infos": {home.name_of(c.path): c.summary.to_json() for c in standing.order},
        "rejected": {home.name_of(c.path): c.problem for c in standing.unusable} | by_name,
        "damaged": [home.name_of(c.path) for c in candidates if c.damaged],
        "missing": [home.name_of(c.path) for c in candidates if c.missing and not c.foreign],
        "quarantined": [name for name in aside if not named or name.partition(".")[0] == named],
    }


def _quarantine(engine: Engine, home: Home, rejected: Mapping[str, str]) -> None:
    for name, reason in rejected.items():
        path = home.path / name
        try:
            target = home.quarantine(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s could not be moved into quarantine: %s", path, error)
            continue
        engine.emit(events.Quarantined(rank=engine.rank, path=str(path), moved_to=str(target), reason=reason))
