"""Resuming where extensions offer checkpoints: what is newer there comes first, what is older when nothing here can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.candidates import holds_weights_alone, newest_first, newest_sequence
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.extension import Extension
from safe_ckpt.errors import CorruptCheckpointError, NotEnoughSpaceError, SafeCheckpointError

logger = logging.getLogger(__name__)


class Offered:
    """One resume. Every method is called on every rank; where nobody offers anything they do nothing.

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

    def after(self, infos: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield name and facts of what is here, then of what the mirror has besides: that is fetched when it is asked for."""
        yield from infos.items()
        while (found := self._agree("fetch what is older", self._fetch_next)) is not None:
            yield found["name"], found["info"]

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
        usable = newest_first(self._list())
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

    def _fetch_next(self, home: Home) -> dict[str, Any] | None:
        """Fetch the next one: nothing that is here can be used, and what is damaged here may be sound there."""
        for extension, candidate in self._there(home):
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
