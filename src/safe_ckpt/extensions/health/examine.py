"""Looks at the numbers of a file while it is hashed: the observer of the writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.formats.file_plan import ITSELF, FilePlan, KnownBytes, WriteTask
from safe_ckpt.extensions.health import regions
from safe_ckpt.extensions.health.regions import Region
from safe_ckpt.extensions.health.verdict import Expectation, of_checkpoint

if TYPE_CHECKING:
    from safe_ckpt.extensions.health.scan import Scan

NAME = "health"
"""Of the section of a manifest, and of what the writer is told and says."""
AHEAD = "safe_ckpt.extensions.health.scan"
"""The module that the writer process imports ahead: it takes a tenth of a second, and needs numpy."""


def told(plan: FilePlan, expected: Expectation) -> dict[str, Any]:
    """The message to the writer about a file: its expectation, and where its numbers lie if the file itself does not say it."""
    rows = None
    if plan.names is not None:
        placed = zip(plan.names, plan.tensors, strict=True)
        rows = [row for name, (at, tensor) in placed for row in regions.rows_of(name, tensor, at)]
    return {"observer": f"{__name__}:{Examination.__name__}", "expected": dict(vars(expected)), "regions": rows}


class Examination:
    """The examination of one file. See ``content.Observer``.

    Args:
        task: what is written.
        frame: the file, as far as it is not tensors.
        about: see ``told``.
    """

    def __init__(self, task: WriteTask, frame: memoryview | KnownBytes, about: Mapping[str, Any]) -> None:
        self._expected = Expectation(**about["expected"])
        self._is_checkpoint = bool(task.manifest) and "name" in (task.manifest or {})
        found: Sequence[Region] | None = None
        if about["regions"] is not None:
            found = [Region(*row) for row in about["regions"]]
        elif task.records is not None or task.path.endswith(".safetensors"):
            found = regions.of_file(frame, task.records)
        self._looked_at = self._expected.regions(found or ())
        self._scan: Scan | None = None
        self._found: dict[str, Any] | None = None
        if found is not None:
            # Here and not at the top: it takes a tenth of a second, and needs numpy.
            from safe_ckpt.extensions.health.scan import Scan

            self._scan = Scan(self._looked_at)

    def take(self, at: int, piece: memoryview) -> None:
        """Look at bytes of the file, which come in order from ``at`` on."""
        if self._scan is not None:
            self._scan.take(at, piece)

    def found(self) -> dict[str, Any] | None:
        """The facts that were found; None where nothing was looked at."""
        if self._scan is not None and self._found is None:
            facts, sick = self._scan.facts(), self._scan.sick()
            names = (one.name for one in self._looked_at)
            optimizers = frozenset(one.name for one in self._looked_at if one.of_optimizer)
            self._found = self._expected.judge(facts, sick, names, optimizers)
        return self._found

    def section(self) -> dict[str, Any]:
        """The health section of a checkpoint that is this one file."""
        found = self.found() if self._is_checkpoint else None
        return of_checkpoint({ITSELF: found}, self._expected.action) if found is not None else {}
