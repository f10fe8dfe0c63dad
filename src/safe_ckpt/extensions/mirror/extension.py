"""The moments at which checkpoints go to the mirror, or come back from there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.saving.extension import Conclusion, Extension, Outcome, Run
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import MirrorBehindError, SafeCheckpointError
from safe_ckpt.extensions.mirror.host_copies import CopiesOfHost
from safe_ckpt.extensions.mirror.mirror import MirrorUploads


class Mirroring(Extension):
    """Mirrors directories of a file system, on rank 0.

    Attributes:
        mirror: uploads; None on other ranks.
    """

    name: ClassVar[str] = "mirror"
    is_offering: ClassVar[bool] = True

    def __init__(self) -> None:
        self.mirror: MirrorUploads | None = None
        self._copies: list[CopiesOfHost] = []

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._run = run
        if run.rank == 0:
            self.mirror = MirrorUploads(run.config, run.emit, run.owner)
            run.coordinator.progress_sources.append(self.mirror.progress)
            self.mirror.elsewhere = run.coordinator.progress_elsewhere

    def held(self, home: Home) -> None:
        """See ``Extension``. What this host has of a checkpoint it sends, and what it needs it fetches, when rank 0 asks."""
        run, copies = self._run, CopiesOfHost(self._run, home)
        home.serve("send", copies.send)
        home.serve("fetch", copies.fetch)
        self._copies.append(copies)
        if run.rank:
            run.coordinator.progress_sources.append(copies.progress)

    def concluding(self, job: SaveJob, reports: Mapping[int, Any]) -> Conclusion:
        """See ``Extension``. What rank 0 knows of copies that are late."""
        limit, mirror = self._run.config.mirror.max_behind, self._of(job.home)
        if limit is None or mirror is None or (behind := mirror.behind(job.home)) <= limit:
            return Conclusion()
        slow = "copies take longer than saves come: save less often, or raise mirror.max_behind"
        cause = slow if mirror.error is None else str(mirror.error)
        return Conclusion(
            summary={"behind": behind, "limit": limit, "cause": cause, "url": str(mirror.root_of(job.home))}
        )

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        if outcome.info is None:
            return None
        if (mirror := self._of(job.home)) is not None:
            mirror.put(outcome.info, job.home)
        late = outcome.summary.get(self.name)
        return MirrorBehindError(path=str(outcome.info.path), **late) if late else None

    def keeps(self, home: Home, places: Sequence[Place]) -> Collection[Place]:
        """See ``Extension``."""
        mirror = self._of(home)
        return mirror.holding(places) if mirror is not None else ()

    def deleted(self, home: Home, places: Sequence[Place]) -> None:
        """See ``Extension``."""
        if (mirror := self._of(home)) is not None:
            mirror.deleted(places, home)

    def offers(self, home: Home) -> list[Candidate]:
        """See ``Extension``."""
        mirror = self._of(home)
        return mirror.candidates(home) if mirror is not None else []

    def fetch(self, candidate: Candidate, home: Home) -> CheckpointInfo:
        """See ``Extension``."""
        mirror = self._of(home)
        return mirror.fetch(candidate, home) if mirror is not None else super().fetch(candidate, home)

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """See ``Extension``. It goes to the mirror, if an earlier job did not come to that."""
        if info.verified and (mirror := self._of(home)) is not None:
            mirror.put(info, home, saved=False)

    def _of(self, home: Home) -> MirrorUploads | None:
        """The mirror of this directory; None on other ranks, and for a directory that is in a store itself."""
        return self.mirror if home.is_mounted else None

    def awaited(self, limit_s: float) -> None:
        """See ``Extension``."""
        if self.mirror is not None:
            self.mirror.await_copies(limit_s)

    def stopping(self, until: float) -> None:
        """See ``Extension``."""
        if self.mirror is not None:
            self.mirror.stop_by = until

    def closing(self, within_s: float | None) -> None:
        """See ``Extension``."""
        if self.mirror is not None:
            try:
                self.mirror.drain(within_s)
            finally:
                self._run.coordinator.progress_sources.remove(self.mirror.progress)

    def closed(self) -> None:
        """See ``Extension``."""
        for copies in self._copies:
            copies.close()
        if self.mirror is not None:
            self.mirror.close()
