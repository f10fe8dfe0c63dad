"""Extensions, which stand beside saves and resumes, and the moments at which they are asked. The core knows none of them.

A new feature listens here; it adds no field to a save. One that raises costs its own knowledge, never a save: that is logged,
once a moment, and the save goes on as if it had said nothing. Through to all ranks go what ``ended`` returns, what ``opened``
raises and an error of ``offers`` where nothing usable is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.state.planner import Models
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.writer.existing import Existing
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.hooks.emitter import Emitter

if TYPE_CHECKING:
    import torch

    from safe_ckpt.core.saving.request import SaveRequest
    from safe_ckpt.core.saving.save import SaveJob

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The job that saves, on one rank.

    Attributes:
        config: settings.
        rank: this rank.
        emit: receives what happens.
        owner: what holds the directories within this process and how that is ended, for messages.
        coordinator: where the ranks meet.
    """

    config: CheckpointConfig
    rank: int
    emit: Emitter
    owner: str
    coordinator: Coordinator


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a save ended on this rank.

    Attributes:
        info: what was committed; None where it failed.
        error: why it failed.
        summary: what rank 0 concluded for all ranks, by extension.
        write_s: how long this rank's writing took; 0 while it had not come to its end.
        written_at: when that was, on the monotonic clock.
        written_bytes: how much it was.
    """

    info: CheckpointInfo | None = None
    error: SafeCheckpointError | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    write_s: float = 0.0
    written_at: float = 0.0
    written_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The conclusion of rank 0 from the findings of all ranks, before the commit.

    Attributes:
        fields: of the manifest.
        summary: what all ranks learn with the verdict, JSON-able.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    summary: Any = None


class Extension:
    """Every method does nothing by default.

    Attributes:
        name: its key in reports, in verdicts and in what the writer observes.
        imports: modules that its observer needs: the writer process imports them ahead.
        is_offering: whether it has ``offers``; the same on all ranks.
    """

    name: ClassVar[str]
    imports: ClassVar[Sequence[str]] = ()
    is_offering: ClassVar[bool] = False

    def opened(self, run: Run) -> None:
        """The job begins. On every rank, on the caller's thread; what it raises ends the opening on every rank."""

    def models(self, models: Models) -> None:
        """A save of these models is about to be asked for. On every rank, on the caller's thread."""

    def deciding(self, request: SaveRequest) -> Mapping[str, Any]:
        """Fields of the manifest that are known before the copy. On rank 0, on the caller's thread."""
        del request
        return {}

    def planning(self, request: SaveRequest) -> int:
        """How many bytes will probably not be written. On every rank, on the caller's thread."""
        del request
        return 0

    def begun(self, job: SaveJob) -> Mapping[str, Existing]:
        """Files of the plan, by path, that an earlier checkpoint has: they are not copied. On the caller's thread."""
        del job
        return {}

    def started(self, job: SaveJob) -> None:
        """Its turn in the background has come. On every rank, as all that follows but for a resume."""

    def writing(self, job: SaveJob, path: str, plan: FilePlan) -> Any:
        """Return what to tell the writer's observer of this name of a file, by its path in the checkpoint; None for nothing."""
        del job, path, plan

    def recognised(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Mapping[str, Existing]:
        """Files that the writer has found to be there already, by path: they are still to be given their names."""
        del job, results
        return {}

    def written(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Any:
        """Return this rank's report, JSON-able: all of its files are there. On the ranks that write."""
        del job, results

    def entry(self, result: WrittenFile) -> Mapping[str, Any]:
        """Return further fields of one file for the manifest."""
        del result
        return {}

    def concluding(self, job: SaveJob, reports: Mapping[int, Any]) -> Conclusion:
        """Conclude from the reports of this name, by rank. On rank 0, before the commit."""
        del job, reports
        return Conclusion()

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """Called once for each save whose turn came, whatever came of it. All ranks return the like: it is raised on each."""
        del job, outcome
        return None

    def keeps(self, home: Home, places: Sequence[Place]) -> Collection[Place]:
        """Those of ``places`` that must not be deleted now. On rank 0."""
        del home, places
        return ()

    def deleted(self, home: Home, places: Sequence[Place]) -> None:
        """These were deleted, as they are not kept any more. On rank 0."""

    def offers(self, home: Home) -> list[Candidate]:
        """Candidates that are not here, newest first. On rank 0, on the caller's thread, as all of a resume.

        Raises:
            OSError: whether there are any is not known.
        """
        del home
        return []

    def fetch(self, candidate: Candidate, home: Home) -> CheckpointInfo:
        """Bring one of ``offers`` here. On rank 0.

        Raises:
            SafeCheckpointError: that cannot be done.
        """
        raise NotImplementedError

    def remembers(self, manifest: Manifest | None) -> Any:
        """Return JSON-able facts of the checkpoint to resume from, for all ranks. On rank 0; None: its manifest is unknown."""
        del manifest

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """All ranks go on from this. ``verified``: its manifest with the files that were verified; None for all of them."""

    def named(self, path: Place) -> None:
        """All ranks have read this, and training may go on from it: only its path is known, and it may be another tool's."""

    def training(self, modules: Callable[[], Mapping[str, torch.nn.Module]]) -> None:
        """Training of these models begins, or goes on after a resume; "" is the name of the only one."""

    def stopping(self, until: float) -> None:
        """The job must be over by then, on the monotonic clock."""

    def closing(self, within_s: float | None) -> None:
        """The last save is over. ``within_s``: wait this long at most, progress or not."""

    def closed(self) -> None:
        """The directories were given back."""


class Extensions:
    """All extensions: each moment asks them in their order.

    Args:
        each: the extensions.
    """

    def __init__(self, each: Sequence[Extension] = ()) -> None:
        self._each = tuple(each)
        self._told: set[tuple[str, str]] = set()  # what was logged

    def __iter__(self) -> Iterator[Extension]:
        return iter(self._each)

    def ask(self, moment: str, question: Callable[[Extension], _T]) -> dict[str, _T]:
        """Return the answers of the extensions, by name. An error of one is logged, and it has no answer then."""
        answers = {}
        for one in self._each:
            try:
                answers[one.name] = question(one)
            except Exception as error:
                first = (one.name, moment) not in self._told
                self._told.add((one.name, moment))
                level = logging.ERROR if first else logging.DEBUG
                message = "%s: %s failed, and this goes on without it: %r"
                logger.log(level, message, moment, one.name, error, exc_info=first)
        return answers

    def spared_bytes(self, request: SaveRequest) -> int:
        """How many bytes will probably not be written."""
        return sum(self.ask("before a save", lambda one: one.planning(request)).values())

    def decided(self, request: SaveRequest) -> dict[str, Any]:
        """Fields of the manifest that are known before the copy."""
        told = self.ask("before a save", lambda one: one.deciding(request))
        return {key: value for fields in told.values() for key, value in fields.items()}

    def existing(self, moment: str, question: Callable[[Extension], Mapping[str, Existing]]) -> dict[str, Existing]:
        """Files that are there already, by path."""
        return {path: file for files in self.ask(moment, question).values() for path, file in files.items()}

    def observed(self, job: SaveJob, path: str, plan: FilePlan) -> dict[str, Any]:
        """Return what the writer's observers are told of one file, by name."""
        told = self.ask("writing", lambda one: one.writing(job, path, plan))
        return {name: value for name, value in told.items() if value is not None}

    def concluding(
        self, job: SaveJob, reports: Mapping[int, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of the manifest, and what all ranks learn, by extension."""

        def of(one: Extension) -> Conclusion:
            return one.concluding(job, {rank: reports[rank][one.name] for rank in reports if one.name in reports[rank]})

        concluded = self.ask("concluding", of)
        fields = {key: value for one in concluded.values() for key, value in one.fields.items()}
        return fields, {name: one.summary for name, one in concluded.items()}

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """The first error that one of them has all ranks raise."""
        errors = self.ask("the end of a save", lambda one: one.ended(job, outcome))
        return next((error for error in errors.values() if error is not None), None)

    def kept(self, home: Home, places: Sequence[Place]) -> set[Place]:
        """Return those of ``places`` that must not be deleted now; all of them if one extension cannot say."""
        answers = self.ask("before a deletion", lambda one: one.keeps(home, places))
        return set(places) if len(answers) < len(self._each) else {place for one in answers.values() for place in one}
