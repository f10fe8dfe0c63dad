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
        """On every rank, on the caller's thread, when the job begins. What it raises ends the opening on every rank."""

    def held(self, home: Home) -> None:
        """On every rank, on the caller's thread: this directory was taken."""

    def models(self, models: Models) -> None:
        """On every rank, on the caller's thread: a save of these models is about to be asked for."""

    def deciding(self, request: SaveRequest) -> Mapping[str, Any]:
        """On rank 0, on the caller's thread: returns fields of the manifest that are known before the copy."""
        return {}

    def planning(self, request: SaveRequest) -> int:
        """On every rank, on the caller's thread: returns how many bytes will probably not be written."""
        return 0

    def laying_out(self, job: SaveJob) -> Mapping[str, Existing]:
        """On every rank, on the caller's thread, before the copy: returns files of the plan that an earlier checkpoint has.

        By their paths. They are not copied.
        """
        return {}

    def started(self, job: SaveJob) -> None:
        """On every rank, in the background: the turn of this save has come."""

    def writing(self, job: SaveJob, path: str, plan: FilePlan) -> Any:
        """On writing ranks, in the background: what the writer's observer of this name is told of a file. None: nothing.

        Args:
            job: the save.
            path: of the file, in the checkpoint.
            plan: its content.
        """

    def recognised(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Mapping[str, Existing]:
        """On writing ranks, in the background, after the writing: returns files that the writer has found to be there already.

        By their paths. They are still to be given their names.
        """
        return {}

    def written(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Any:
        """On writing ranks, in the background: returns this rank's report, JSON-able. All of its files are there."""

    def entry(self, result: WrittenFile) -> Mapping[str, Any]:
        """On writing ranks, in the background: returns further fields of one file for the manifest."""
        return {}

    def concluding(self, job: SaveJob, reports: Mapping[int, Any]) -> Conclusion:
        """On rank 0, in the background, right before the commit: concludes from the reports of this name, by rank."""
        return Conclusion()

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """On every rank, in the background, after the verdict: called once for each save whose turn came, whatever came of it.

        What it returns becomes the error of the save, which stays committed. It must be the like on all ranks.
        """
        return None

    def keeps(self, home: Home, places: Sequence[Place]) -> Collection[Place]:
        """On rank 0, in the background, after the commit: returns those of ``places`` that must not be deleted now."""
        return ()

    def deleted(self, home: Home, places: Sequence[Place]) -> None:
        """On rank 0, in the background, after the commit: these were deleted, as the rules do not keep them any more."""

    def offers(self, home: Home) -> list[Candidate]:
        """On rank 0, on the caller's thread, at a resume: returns candidates that are not here, newest first.

        Raises:
            OSError: whether there are any is not known.
        """
        return []

    def fetch(self, candidate: Candidate, home: Home) -> CheckpointInfo:
        """On rank 0, on the caller's thread, at a resume: brings one of ``offers`` here.

        Raises:
            SafeCheckpointError: that cannot be done.
        """
        raise NotImplementedError

    def remembers(self, manifest: Manifest | None) -> Any:
        """On rank 0, at a resume: returns facts of the checkpoint that was chosen, JSON-able, for all ranks.

        Args:
            manifest: its manifest; None where that is not known.
        """

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """On every rank, at a resume: all go on from this.

        Args:
            home: where it lies.
            info: which one.
            remembered: what ``remembers`` returned on rank 0.
            verified: its manifest with the files that were verified; None for all of them.
        """

    def named(self, path: Place) -> None:
        """On every rank: all have read this and may go on from it. Only its path is known; it may be another tool's."""

    def training(self, modules: Callable[[], Mapping[str, torch.nn.Module]]) -> None:
        """On every rank: training of these models begins, or goes on after a resume; "" is the name of the only one."""

    def awaited(self, limit_s: float) -> None:
        """On rank 0, on the caller's thread: waits for what follows the saves that are over.

        Raises:
            SafeCheckpointError: it did not come within ``limit_s``.
        """

    def stopping(self, until: float) -> None:
        """On every rank: the job must be over by then, on the monotonic clock."""

    def closing(self, within_s: float | None) -> None:
        """On every rank: the last save is over. ``within_s``: wait this long at most, progress or not."""

    def closed(self) -> None:
        """On every rank: the directories were given back."""


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

    def held(self, home: Home) -> None:
        """This directory was taken."""
        self.ask("a directory", lambda one: one.held(home))

    def spared_bytes(self, request: SaveRequest) -> int:
        """How many bytes will probably not be written."""
        return sum(self.ask("before a save", lambda one: one.planning(request)).values())

    def decided(self, request: SaveRequest) -> dict[str, Any]:
        """Fields of the manifest that are known before the copy."""
        return self.merged("before a save", lambda one: one.deciding(request))

    def merged(self, moment: str, question: Callable[[Extension], Mapping[str, _T]]) -> dict[str, _T]:
        """Return the answers of all extensions, as one table."""
        return {key: value for answer in self.ask(moment, question).values() for key, value in answer.items()}

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
