"""Reading one candidate where each host has a directory of its own: first every host gets the files that its ranks read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home.host_home import HostHome, Needs
from safe_ckpt.core.resuming.candidate import Ranks, problem_kind, verdict_of
from safe_ckpt.core.resuming.host_cache import Host
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.reader import drop_cache
from safe_ckpt.errors import CorruptCheckpointError, naming


class HostReader:
    """See ``Reader``: from the directories of the hosts.

    Args:
        ranks: those that read.
        home: the directories, which are held.
        needs: which files the ranks of a host read.
        load: reads one candidate on this rank, verifying what it reads.
        verified: see ``Reader``; None where it is all of one.

    Attributes:
        verified: as given.
    """

    def __init__(
        self,
        ranks: Ranks,
        home: HostHome,
        needs: Needs,
        load: Callable[[Path, Host], Any],
        verified: Callable[[], Manifest | None] = lambda: None,
    ) -> None:
        self._ranks = ranks
        self._home = home
        self._needs = home.needs = needs
        self._load = load
        self.verified = verified

    def close(self) -> None:
        """See ``Reader``."""

    def _path(self, place: Place) -> Path:
        return self._home.path / self._home.name_of(place)

    def rest(self, place: Place) -> bool:
        """See ``Reader``. Shards are cut in another way now, and a rank lacks one: every host gets all files."""
        return self._agree_files(self._path(place), everything) is None

    def _agree_files(self, path: Path, needs: Needs) -> dict[str, Any] | None:
        limit_s = self._ranks.config.timeouts.lengthy_s
        verdict: dict[str, Any] | None = self._ranks.coordinator.agree(
            "files of the hosts",
            timeout_s=limit_s,
            must_match={"path": path},
            decide=lambda _: self._home.complete(path, needs, limit_s=limit_s),
            phase=f"reading {path}",
        )
        return verdict

    def try_one(self, place: Place, *, ours: bool) -> tuple[Any, dict[str, Any] | None]:
        """See ``Reader``."""
        del ours  # nothing else has a part on each host
        path, limit_s = self._path(place), self._ranks.config.timeouts.lengthy_s
        verdict = self._agree_files(path, self._needs)
        if verdict is not None:
            return None, verdict
        loaded: Any = None
        own = tuple(self._home.own_ranks)
        host = Host(ranks=own, place=own.index(self._ranks.rank))

        def read() -> dict[str, str]:
            nonlocal loaded
            try:
                with naming(rank=self._ranks.rank, phase=f"reading {path}"):
                    loaded = self._read(path, host)
            except CorruptCheckpointError as error:
                return {problem_kind(error): str(error)}
            return {}

        verdict = self._ranks.coordinator.agree(
            "resume candidate", timeout_s=limit_s, must_match={"path": path}, local=read, decide=verdict_of
        )
        return loaded, verdict

    def _read(self, path: Path, host: Host) -> Any:
        try:
            return self._load(path, host)
        except CorruptCheckpointError:
            drop_cache(path)  # the memory may be at fault
            return self._load(path, host)


def everything(manifest: Manifest, _: Sequence[int]) -> set[str]:
    """All files, on each host: what a framework reads is not known."""
    return {entry.path for entry in manifest.files}
