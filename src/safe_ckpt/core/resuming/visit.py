"""Reading a directory that nobody here holds: another user's run, a read-only mount, a bucket, beside a live job or none.

Nothing is written, and nothing is moved into quarantine. Whoever holds the directory may delete or replace what is being
read. Then the next newest is read instead, and what was put into place of the other one is replaced with it.
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

from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.core.coordination.coordinator import Coordinator, open_coordinator
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.formats.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.formats.verify import verify_entry, verify_files
from safe_ckpt.core.home.candidates import by_commit, is_of_step, step_name
from safe_ckpt.core.home.home import Candidate, Home, is_anything_at, name_below
from safe_ckpt.core.home.places import candidate_at, home_at, is_one
from safe_ckpt.core.home.retention import best_first
from safe_ckpt.core.home.standing import Judge, standing_of
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.resuming.candidate import FileReader, ObjectReader, Reader, Rejected, first_usable, verdict_of
from safe_ckpt.core.resuming.items import StoredItems, warn_of_other_ranks
from safe_ckpt.core.resuming.named import not_found, of_frameworks, refuse_missing
from safe_ckpt.core.state.items import Restoring
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import NoValidCheckpointError, RestoreError, SafeCheckpointError, naming

logger = logging.getLogger(__name__)
_NONE = "there is no checkpoint"
_SURVEYS_S = 60.0
"""For how long what there is is listed again. A job that saves quickly and keeps one may delete each while it is read.
Where it is the same twice, a file that is missing stays missing."""


@dataclass(frozen=True, kw_only=True)
class Visitors:
    """Ranks that read together and hold nothing. See ``Ranks``."""

    config: CheckpointConfig
    coordinator: Coordinator

    @property
    def rank(self) -> int:
        """This rank."""
        return self.coordinator.rank

    def agree(self, kind: str, **options: Any) -> Any:
        """See ``Ranks``."""
        return self.coordinator.agree(kind, timeout_s=self.config.timeouts.barrier_s, **options)


@contextlib.contextmanager
def visiting(config: CheckpointConfig, group: ProcessGroup | None) -> Iterator[Visitors]:
    """The ranks of a group, which read together in here. Every rank calls this.

    Raises:
        RendezvousTimeout: some ranks did not come.
    """
    coordinator = open_coordinator(group, config.timeouts, network=config.network)
    try:
        yield Visitors(config=config, coordinator=coordinator)
    finally:
        coordinator.release(keep=True)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One look at a place. Every method is called on every rank.

    Attributes:
        ranks: those that read.
        place: a directory of checkpoints, or one of them.
        step: only the one of this step; None for any.
        look: on rank 0 lists what there is at ``place``, and says whether that is one checkpoint; None for those with a
            manifest. It may raise ``OSError``.
        judges: on rank 0, behind ``look``: what frameworks know besides.
        best: only those that have its metric, the best first; None for the newest first.
    """

    ranks: Visitors
    place: Place
    step: int | None = None
    look: Callable[[], tuple[Sequence[Candidate], bool]] | None = None
    judges: Callable[[], Sequence[Judge]] = tuple
    best: Retention | None = None

    def load(self, state: Mapping[str, Any], *, verify: bool) -> CheckpointInfo:
        """Restore the newest into ``state``; see ``safe_ckpt.load``."""
        return self.first(lambda info: self._load(info, state, verify=verify))

    def newest(self, *, verify: bool) -> CheckpointInfo | None:
        """The newest that is in order; see ``safe_ckpt.newest``."""
        return self.first_if_any(lambda info: self._verify(info) if verify else None)

    def first_if_any(self, use: Callable[[CheckpointInfo], dict[str, Any] | None]) -> CheckpointInfo | None:
        """As ``first``; None where there is no checkpoint at all, on a fresh run."""
        try:
            return self.first(use)
        except NoValidCheckpointError as error:
            if error.rejected or error.message != _NONE:
                raise
            logger.info("%s: there is no checkpoint", self.place)
            return None

    def first(self, use: Callable[[CheckpointInfo], dict[str, Any] | None]) -> CheckpointInfo:
        """The first that ``use`` has nothing against; what it says of one is the same on all ranks.

        Raises:
            NoValidCheckpointError: there is none; says why the others are not used.
            CheckpointNotFoundError: the one that was named, by ``step`` or by its path, is not there.
        """
        rejected = Rejected()
        until, goes_on = time.monotonic() + min(_SURVEYS_S, self.ranks.config.timeouts.barrier_s), True
        before: object = None
        seen: Mapping[str, Any] = {}
        while goes_on:
            must_match = {"directory": self.place, "step": self.step, "best": self.best}
            seen = self.ranks.agree("look", must_match=must_match, decide=lambda _: self._survey(until))
            now = [(facts["path"], facts["op_id"]) for facts in seen["order"]]
            changes, before = now != before, now
            rejected = Rejected(why=dict(seen["rejected"]))
            infos = (CheckpointInfo.from_json(facts, beside=self.place) for facts in seen["order"])
            info = first_usable(infos, use, rejected, lambda info: info.name)
            if info is not None:
                return info
            goes_on = "missing" in rejected.kinds.values() and changes and not seen["last"]
        if self.step is not None and not rejected.why:
            raise not_found(self.place / step_name(self.step), list(seen["there"]))
        raise self._nothing(rejected.why, seen["others"])

    def _survey(self, until: float) -> dict[str, Any]:
        """On rank 0: list what a resume takes, in its order, why it takes nothing else, and whether time is up then."""
        with naming(rank=0, phase="looking for checkpoints", path=str(self.place)):
            found, alone = (self.look or self._look)()
        others = [] if found or self.look else of_frameworks(self._home)
        there = [c.summary.name for c in by_commit(found)]
        found = [c for c in found if self.step is None or is_of_step(c, self.step)]
        standing = standing_of(found, self.judges(), named=alone or self.step is not None)
        order = [c.summary for c in standing.order]
        if self.best is not None:
            order = best_first(order, self.best)
        why = {self._name(c): standing.by_name_only[c.path] for c in found if c.path in standing.by_name_only}
        return {
            "order": [info.to_json() for info in order],
            "rejected": {self._name(c): c.problem for c in standing.unusable} | why,
            "others": others,
            "there": there if self.step is not None else [],
            "last": time.monotonic() > until,
        }

    @property
    def _home(self) -> Home:
        """Where it lies; it is not opened."""
        return home_at(self.place, lease_s=self.ranks.config.lease_s)

    def _look(self) -> tuple[Sequence[Candidate], bool]:
        if not (is_anything_at(self.place) and is_one(self.place)):
            refuse_missing(self.place)
            return list_patiently(self._candidates, self.ranks.config.timeouts), False
        one = candidate_at(self.place)
        return [one] if one is not None else [], True

    def _candidates(self) -> list[Candidate]:
        try:
            return self._home.look()
        except FileNotFoundError:
            return []

    def _name(self, candidate: Candidate) -> str:
        below = name_below(self.place, candidate.path)
        return candidate.path.name if below in (None, ".") else str(below)

    def _nothing(self, rejected: Mapping[str, str], others: Sequence[str]) -> NoValidCheckpointError:
        path = str(self.place)
        if self.best is not None and not rejected:
            message = f"there is no checkpoint that has the metric {self.best.metric!r}"
        elif rejected:
            message = "there are checkpoints, but none can be used. One that is only unhealthy is taken by step=... or its path"
        elif others:
            message = (
                f"there is none of Checkpointer; a framework saved {', '.join(others)}: load them with it, by path"
            )
        else:
            message = _NONE
        return NoValidCheckpointError(path=path, message=message, rejected=dict(rejected))

    def _load(self, info: CheckpointInfo, state: Mapping[str, Any], *, verify: bool) -> dict[str, Any] | None:
        ranks = self.ranks
        items = StoredItems(state, ranks.rank, ranks.coordinator.size, whole=verify)
        reader = items.reader(ranks, self._home, held=False)
        try:
            loaded, verdict = reader.try_one(info.path, ours=info.verified)
            if verdict is not None:
                return verdict
            restoring = Restoring(state, loaded, info.path)
            nowhere = ranks.agree("fits", local=restoring.compare, decide=restoring.agree, phase="restore")
            verdict = self.reading(info, functools.partial(restoring.apply, nowhere))
            if verdict is None and ranks.rank == 0:
                warn_of_other_ranks(state, info.world_size, ranks.coordinator.size)
            return verdict
        finally:
            reader.close()

    def reading(
        self, info: CheckpointInfo, action: Callable[[], object], kind: str = "restored"
    ) -> dict[str, Any] | None:
        """Read, on all ranks, what they have verified: another job may have deleted or replaced it since.

        Args:
            info: which one.
            action: reads, on this rank.
            kind: of the agreement.

        Returns:
            Why all pass it over; None when it was there until the end.
        """
        verdict: dict[str, Any] | None = self.ranks.coordinator.agree(
            kind,
            timeout_s=self.ranks.config.timeouts.lengthy_s,
            must_match={"path": info.path},
            local=functools.partial(self._read, info, action),
            decide=verdict_of,
            phase=f"reading {info.path}",
        )
        return verdict

    def _read(self, info: CheckpointInfo, action: Callable[[], object]) -> dict[str, str]:
        try:
            action()
        except (RestoreError, FileNotFoundError):
            if self._is_still(info):
                raise
        return {} if self._is_still(info) else {"missing": f"{info.path}: was deleted or replaced while it was read"}

    def _is_still(self, info: CheckpointInfo) -> bool:
        if not info.verified:  # another tool's says nothing
            return is_anything_at(info.path)
        try:
            return read_manifest(info.path).op_id == info.op_id
        except (OSError, SafeCheckpointError):
            return False

    def _verify(self, info: CheckpointInfo) -> dict[str, Any] | None:
        """Compare each file with what was written, each rank a share of them."""
        rank, size = self.ranks.rank, self.ranks.coordinator.size

        def share(place: Place) -> None:
            files = sorted(read_manifest(place).files, key=lambda entry: (-entry.size_bytes, entry.path))
            for entry in files[rank::size]:
                verify_entry(place, entry, cached=True)

        def share_of_files(path: Path) -> None:
            if info.verified:  # with another tool's there is nothing to compare
                manifest = read_manifest(path)
                by_size = sorted(manifest.files, key=lambda entry: (-entry.size_bytes, entry.path))
                verify_files(path, manifest, only={entry.path for entry in by_size[rank::size]}, cached=True)

        reader: Reader = FileReader(self.ranks, share_of_files, held=False)
        if not self._home.is_mounted:
            reader = ObjectReader(self.ranks, lambda *_: [], lambda place, *_: share(place), lambda: None)
        try:
            return reader.try_one(info.path, ours=info.verified)[1]
        finally:
            reader.close()
