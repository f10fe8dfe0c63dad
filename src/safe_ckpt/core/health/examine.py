"""Looks at a file while it is hashed. What goes wrong in it costs the knowledge of the file's health, never the save."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.health import regions
from safe_ckpt.core.health.regions import Pieces, Region
from safe_ckpt.core.health.verdict import ITSELF, Expectation, of_checkpoint

if TYPE_CHECKING:
    from safe_ckpt.core.health.scan import Scan

logger = logging.getLogger(__name__)
_UNKNOWN = "%s: its numbers are not looked at: %r"


def prepare() -> None:
    """Import what looks at numbers, ahead of the first file. On a thread of its own."""
    with contextlib.suppress(ImportError):  # said when a file is to be looked at
        import safe_ckpt.core.health.scan  # noqa: F401


class Examination:
    """Of one file.

    Args:
        task: what is written, and what is expected of it.
        image: the file, as far as it is not tensors.
    """

    def __init__(self, task: WriteTask, image: memoryview | Pieces) -> None:
        self._path = task.path
        self._scan: Scan | None = None
        self._expected: Expectation | None = None
        self._looked_at: Sequence[Region] = ()
        if task.health is None:
            return
        try:
            self._expected = Expectation.from_json(task.health)
            found = _regions(task, image)
            if found is not None:
                # Here and not at the top: it takes a tenth of a second, and needs numpy.
                from safe_ckpt.core.health.scan import Scan

                self._looked_at = self._expected.regions(found)
                self._scan = Scan(self._looked_at, self._expected.hashed(self._looked_at))
        except Exception as error:
            logger.warning(_UNKNOWN, task.path, error)

    def take(self, at: int, piece: memoryview) -> None:
        """Look at bytes of the file, which come in order from ``at`` on."""
        if self._scan is None:
            return
        try:
            self._scan.take(at, piece)
        except Exception as error:
            self._scan = None
            logger.warning(_UNKNOWN, self._path, error)

    def verdict(self) -> Mapping[str, Any] | None:
        """What was found; None where nothing was looked at."""
        if self._scan is None or self._expected is None:
            return None
        try:
            facts, sick = self._scan.facts(), self._scan.sick()
            return self._expected.judge(facts, sick, self._scan.hashes(), (one.name for one in self._looked_at))
        except Exception as error:  # what an earlier manifest says may be anything
            logger.warning(_UNKNOWN, self._path, error)
            return None


def _regions(task: WriteTask, image: memoryview | Pieces) -> Sequence[Region] | None:
    if task.regions is not None:
        return [Region(*row) for row in task.regions]
    if task.records is None and not task.path.endswith(".safetensors"):
        return None
    return regions.of_file(image, task.records)


def marked(task: WriteTask, health: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a file that carries its manifest inside says of its own health."""
    if health is None or task.health is None or not task.manifest or "name" not in task.manifest:
        return {}
    return of_checkpoint({ITSELF: health}, str(task.health["action"]))
