"""Each checkpoint goes to a second place as well, and comes back from there: the moments at which that is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.saving.extension import Extension, Outcome, Run
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.extensions.mirror.mirror import Mirror


class Mirroring(Extension):
    """On rank 0, of directories in a file system.

    Attributes:
        mirror: uploads; None on other ranks.
    """

    name: ClassVar[str] = "mirror"

    def __init__(self) -> None:
        self.mirror: Mirror | None = None

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._run = run
        if run.rank == 0:
            self.mirror = Mirror(run.config, run.emit, run.owner)
            run.coordinator.movers.append(self.mirror.progress)

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        if self.mirror is not None and outcome.info is not None and job.workspace.is_mounted:
            self.mirror.put(outcome.info, job.workspace)
        return None

    def keeps(self, home: Home, places: Sequence[Place]) -> Collection[Place]:
        """See ``Extension``."""
        return self.mirror.holding(places) if self.mirror is not None and home.is_mounted else ()

    def deleted(self, home: Home, places: Sequence[Place]) -> None:
        """See ``Extension``."""
        if self.mirror is not None and home.is_mounted:
            self.mirror.deleted(places, home)

    def offers(self, home: Home) -> list[Candidate]:
        """See ``Extension``."""
        return self.mirror.candidates(home) if self.mirror is not None and home.is_mounted else []

    def fetch(self, candidate: Candidate, home: Home) -> CheckpointInfo:
        """See ``Extension``."""
        if self.mirror is None:
            return super().fetch(candidate, home)
        return self.mirror.fetch(candidate, home)

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """See ``Extension``. It goes to the mirror, if an earlier job did not come to that."""
        if self.mirror is not None and home.is_mounted and info.verified:
            self.mirror.put(info, home, saved=False)

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
                self._run.coordinator.movers.remove(self.mirror.progress)

    def closed(self) -> None:
        """See ``Extension``."""
        if self.mirror is not None:
            self.mirror.close()
