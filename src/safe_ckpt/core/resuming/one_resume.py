"""One resume, from the look at what there is to the state that all ranks go on with. Whoever changes it begins here.

``choose`` looks, has all ranks read one candidate after the other, and concludes; ``apply`` puts into place what was read.
Nothing is applied before all ranks have verified what they need.

A checkpoint is treated as corrupt only if bytes differ, and differ again in a second read. An unreadable file is an error on
all ranks. A missing file is waited for; then the checkpoint is skipped, but not treated as corrupt.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safe_ckpt import events
from safe_ckpt.core.formats.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.home.candidates import by_commit, holds_weights_alone, newest_sequence
from safe_ckpt.core.home.home import Candidate, Home, is_anything_at
from safe_ckpt.core.home.standing import passed_over, standing_of
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.resuming.candidate import KINDS, Reader, Rejected, first_usable
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.extension import Extension
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import CorruptCheckpointError, NotEnoughSpaceError, NoValidCheckpointError, SafeCheckpointError

logger = logging.getLogger(__name__)
BY_NAME = "safe-ckpt list shows their names"


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """One resume, as it is asked for.

    Attributes:
        home: the directory that is held.
        list_candidates: lists what there is; called on rank 0.
        reader: reads a candidate.
        view: further values that must be equal on all ranks.
        accepts: which candidates of the mirror are fetched; None for all of which one can resume. Called on rank 0.
        named: the name that the caller asked for; "" for the newest, where marked ones are passed over.
        by_name: how a user names the one to resume from, for errors that end this.
        others: checkpoints of frameworks, which this cannot load; called on rank 0 where there are no candidates. If there
            are any, the resume fails rather than start afresh.
    """

    home: Home
    list_candidates: Callable[[], Sequence[Candidate]]
    reader: Reader
    view: Mapping[str, object] = field(default_factory=dict)
    accepts: Callable[[Candidate], bool] | None = None
    named: str = ""
    by_name: str = BY_NAME
    others: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The checkpoint to resume from, verified on every rank.

    Attributes:
        info: which one.
        loaded: what ``load`` returned for it on this rank.
    """

    info: CheckpointInfo
    loaded: Any


def choose(engine: Engine, request: ResumeRequest) -> Chosen | None:
    """Find the newest checkpoint that every rank can read and verify. Every rank calls this.

    All ranks skip a corrupt one, and move it into quarantine once an older one was verified. One with a missing file, and one
    that would run code, is skipped as well, and stays where it is.

    Returns:
        The choice, or None when there never was a checkpoint.

    Raises:
        NoValidCheckpointError: there are or were checkpoints and none is usable.
        SafeCheckpointError: a checkpoint could not be read, on every rank. It is not treated as corrupt then.
    """
    home, by_name = request.home, request.by_name
    loaded: Any = None

    def read(info: CheckpointInfo) -> dict[str, Any] | None:
        nonlocal loaded
        with naming_older(info.path, by_name):
            loaded, verdict = request.reader.try_one(info.path, ours=info.verified)
        return verdict

    with engine.together("resume"):
        begun = time.monotonic()
        offered = Offered(engine, home, request.list_candidates, request.accepts)
        offered.fetch_newer()
        known: dict[str, Candidate] = {}
        seen = _look(engine, request, known)
        rejected = Rejected(why=dict(seen["rejected"]), kinds=dict.fromkeys(seen["damaged"], "bad"))

        def found() -> Iterator[CheckpointInfo]:
            for name, facts in offered.after(seen["infos"], known):
                # If this one was fetched, ``fetch`` has already moved a damaged one of the same name into quarantine.
                rejected.kinds.pop(name, None)
                yield CheckpointInfo.from_json(facts, beside=home.path)

        info = first_usable(found(), read, rejected, lambda info: home.name_of(info.path))
        if info is not None:
            _conclude(engine, request, info, known, rejected, begun)
            return Chosen(info=info, loaded=loaded)
        if rejected.why or seen["quarantined"] or seen["others"]:
            raise _none_usable(home.path, rejected.why, seen, by_name)
        if engine.rank == 0 and not request.named:
            logger.info("%s: there is no checkpoint, so this starts afresh", home.path)
        return None


def _look(engine: Engine, request: ResumeRequest, known: dict[str, Candidate]) -> dict[str, Any]:
    """Rank 0 lists what there is, and tells all ranks in which order it is tried, and why it passes over the rest.

    Args:
        engine: where the ranks meet.
        request: what is asked.
        known: on rank 0 gets the candidates, by name, in the order in which they are tried.
    """
    home = request.home

    def survey(_: object) -> dict[str, Any]:
        candidates = list_patiently(request.list_candidates, engine.config.timeouts)
        standing = standing_of(candidates, named=bool(request.named))
        known.update({home.name_of(c.path): c for c in standing.order})
        only_named = {home.name_of(c.path): why for c in candidates if (why := standing.by_name_only.get(c.path))}
        aside = [path.name for path in home.quarantined()]
        return {
            "others": list(request.others()) if not candidates else [],
            "passed": list(only_named),
            "infos": {name: c.summary.to_json() for name, c in known.items()},
            "rejected": {home.name_of(c.path): c.problem for c in standing.unusable} | only_named,
            "damaged": [home.name_of(c.path) for c in candidates if c.damaged],
            "missing": [home.name_of(c.path) for c in candidates if c.missing and not c.foreign],
            "quarantined": [name for name in aside if not request.named or name.partition(".")[0] == request.named],
        }

    seen: dict[str, Any] = engine.agree("resume", must_match={"directory": home.path, **request.view}, decide=survey)
    for name in [*seen["passed"], *seen["missing"]]:
        logger.warning("%s is passed over: %s", home.path / name, seen["rejected"][name])
    return seen


def _conclude(
    engine: Engine,
    request: ResumeRequest,
    info: CheckpointInfo,
    known: Mapping[str, Candidate],
    rejected: Rejected,
    begun: float,
) -> None:
    """All ranks have verified one: rank 0 moves the damaged ones, and all tell hooks and extensions."""
    home, name = request.home, request.home.name_of(info.path)
    taken = known.get(name) if name not in rejected.why else None  # else it was fetched

    def decide(_: object) -> dict[str, Any]:
        _quarantine_damaged(engine, home, rejected)
        manifest = taken.manifest if taken is not None else None
        try:
            if manifest is None and info.verified:  # it was fetched
                manifest = read_manifest(info.path)
        except (OSError, SafeCheckpointError) as error:
            logger.warning("%s: its manifest cannot be read again, so masks are learnt anew: %s", info.path, error)
        # Of this one alone: that of all candidates would be much to tell every rank.
        return engine.extensions.ask("a resume", lambda one: one.remembers(manifest))

    remembered = engine.agree("resume from", must_match={"name": name}, decide=decide)
    seconds, passed = time.monotonic() - begun, len(rejected.why)
    engine.emit(events.Resumed(rank=engine.rank, path=str(info.path), step=info.step, seconds=seconds, rejected=passed))
    newer = passed_over(list(known.values()), taken) if taken is not None else None  # rank 0 alone knows of any
    if newer is not None:
        logger.warning("%s %s: %s", *newer, request.by_name)
    verified = request.reader.verified()
    engine.extensions.ask("a resume", lambda one: one.resumed(home, info, remembered.get(one.name), verified))


def _quarantine_damaged(engine: Engine, home: Home, rejected: Rejected) -> None:
    for name, reason in rejected.damaged.items():
        path = home.path / name
        try:
            target = home.quarantine(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s could not be moved into quarantine: %s", path, error)
            continue
        engine.emit(events.Quarantined(rank=engine.rank, path=str(path), moved_to=str(target), reason=reason))


def _none_usable(path: Place, rejected: Mapping[str, str], seen: Mapping[str, Any], by_name: str) -> Exception:
    named = {**rejected, **dict.fromkeys(seen["quarantined"], "in quarantine")}
    named |= dict.fromkeys(seen["others"], "a framework saved it, and loads it")
    message = "there are checkpoints, but none is usable. Repair one, or move them all elsewhere to start afresh"
    if seen["passed"]:
        message += (
            f". To go on from an unhealthy one all the same, name it: {by_name}. Numbers that are meant to be infinite are "
            "left out by health.ignore"
        )
    return NoValidCheckpointError(path=str(path), message=message, rejected=named)


def check(engine: Engine, path: Path, reader: Reader) -> None:
    """Let every rank verify one checkpoint of which only the path is known. Every rank calls this.

    Raises:
        CorruptCheckpointError: it is damaged, on every rank.
        HostileCheckpointError: it would run code, on every rank.
        IncompleteCheckpointError: a file of it is not there, on every rank.
        SafeCheckpointError: it could not be read, on every rank.
    """
    _, verdict = reader.try_one(path, ours=False)
    if verdict is not None:
        raise KINDS[verdict["kind"]](path=str(path), message=verdict["why"])
    engine.extensions.ask("a resume", lambda one: one.named(path))


@contextlib.contextmanager
def naming_older(path: Place, by_name: str = BY_NAME) -> Iterator[None]:
    """Add to an error that ends the resume from ``path`` how to name an older one; not where ``path`` is missing."""
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
        return not is_anything_at(path)
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


class Offered:
    """The checkpoints that extensions offer to one resume: newer ones come first, older ones where nothing here can be used.

    Every method is called on every rank; where nobody offers anything they do nothing.

    Args:
        engine: where the ranks meet; its extensions.
        root: the directory that is held.
        list_candidates: lists what there is in it; called on rank 0.
        accepts: which candidates are fetched; None for all but weights alone. Called on rank 0.
    """

    def __init__(
        self,
        engine: Engine,
        root: Home,
        list_candidates: Callable[[], Sequence[Candidate]],
        accepts: Callable[[Candidate], bool] | None,
    ) -> None:
        self._engine = engine
        self._list = list_candidates
        self._accepts = accepts or _to_resume_from
        offering = any(one.is_offering for one in engine.extensions)
        self._home = root if root.is_mounted and offering else None
        self._tried: set[str] = set()

    def fetch_newer(self) -> None:
        """Fetch the newest of the mirror if it is newer than all that is here.

        Raises:
            SafeCheckpointError: nothing is here, and the mirror gives no answer: whether this run is new is not known.
        """
        self._agree("fetch what is newer", self._fetch_newer)

    def fetch_named(self) -> None:
        """Fetch the newest of the mirror that is accepted, whatever is here.

        Raises:
            SafeCheckpointError: the mirror gives no answer.
        """
        self._agree("fetch by name", self._fetch_next)

    def after(self, infos: Mapping[str, Any], known: Mapping[str, Candidate]) -> Iterator[tuple[str, Any]]:
        """Yield name and facts of what is here and of what the mirror has: that is fetched when it is asked for.

        Behind one that is here and cannot be used comes what the mirror has that is newer than the next one here: the same
        checkpoint may be sound there.

        Args:
            infos: the facts of what is here, by name, the newest first.
            known: on rank 0 what is here, by name.
        """
        for number, (name, facts) in enumerate(infos.items()):
            while number and (found := self._agree("fetch what is newer", partial(self._sounder, known.get(name)))):
                yield found["name"], found["info"]
            yield name, facts
        while (found := self._agree("fetch what is older", self._fetch_next)) is not None:
            yield found["name"], found["info"]

    def _sounder(self, next_here: Candidate | None, home: Home) -> dict[str, Any] | None:
        """Fetch the newest that the mirror has, if it is newer than ``next_here``."""
        if next_here is None or (manifest := next_here.manifest) is None:
            return None
        try:
            return self._fetch_next(home, newer_than=manifest.sequence)
        except (OSError, SafeCheckpointError) as error:
            logger.warning("the mirror is not looked at: %s", error)
            return None

    def _agree(self, kind: str, action: Callable[[Home], Any]) -> Any:
        if (home := self._home) is None:
            return None
        return self._engine.coordinator.agree(
            kind,
            timeout_s=self._engine.config.timeouts.lengthy_s,
            must_match={"directory": home.path},
            decide=lambda _: action(home),
        )

    def _fetch_newer(self, home: Home) -> None:
        usable = by_commit(self._list())
        newest = newest_sequence(usable)
        here = {one.manifest.op_id for one in usable if one.manifest is not None}
        try:
            for extension, candidate in self._there(home):
                manifest = candidate.manifest
                if manifest is None or manifest.op_id in here or manifest.sequence <= newest:
                    return  # the others are older
                if self._fetch(extension, candidate, home) is not None:
                    return
        except (OSError, SafeCheckpointError) as error:
            if not usable:
                raise
            logger.warning("the mirror is not looked at: %s", error)

    def _fetch_next(self, home: Home, newer_than: int = -1) -> dict[str, Any] | None:
        """Fetch the next one whose sequence number is above ``newer_than``: what is damaged here may be sound there."""
        for extension, candidate in self._there(home):
            if candidate.manifest is None or candidate.manifest.sequence <= newer_than:
                continue
            info = self._fetch(extension, candidate, home)
            if info is not None:
                return {"name": home.name_of(info.path), "info": info.to_json()}
        return None

    def _there(self, home: Home) -> list[tuple[Extension, Candidate]]:
        offers = [(one, found) for one in self._engine.extensions for found in one.offers(home)]
        found = [(one, it) for one, it in offers if it.manifest is not None and self._accepts(it)]
        return [(one, it) for one, it in found if str(it.path) not in self._tried]

    def _fetch(self, extension: Extension, candidate: Candidate, home: Home) -> CheckpointInfo | None:
        try:
            info = extension.fetch(candidate, home)
        except NotEnoughSpaceError:
            raise
        except CorruptCheckpointError as error:
            logger.warning("%s, fetched by %s, cannot be used: %s", candidate.path, extension.name, error)
            info = None
        self._tried.add(str(candidate.path))  # not where the store failed: that says nothing of this one
        return info


def _to_resume_from(candidate: Candidate) -> bool:
    manifest = candidate.manifest
    return manifest is None or not (manifest.marked or holds_weights_alone(manifest.notes))
