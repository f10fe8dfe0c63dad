"""One save, from the call to its commit: who changes a save begins here.

``begin`` is the caller's half: the ranks agree, the copy is planned and taken. ``finish`` is the background's half, and issues
no collectives. There rank 0 leads: it makes the pending directory, collects what every writing rank reports, commits and
publishes the verdict. The others write, report and wait for the verdict.

    moment      where                      waits for                       a kill of rank 0 there leaves
    agree       every rank, caller         each other, ``barrier_s``       nothing
    lay out     every rank, caller         room among the saves in flight  nothing
    copy        every rank, caller         nobody; then the call returns   nothing
    prepare     rank 0, background         nobody                          a pending folder, which the next start sweeps
    write       writing ranks, background  rank 0: "prepared", the folder  the same
    report      writing ranks, background  nobody                          the same
    commit      rank 0, background         all reports                     before the rename the same, then the checkpoint
    verdict     every rank, background     rank 0                          the checkpoint, and the outcome unknown to the others
    ended       every rank, background     nobody                          the checkpoint
    rules       rank 0, background         nobody                          the checkpoint; the next commit deletes the old ones

A save is committed when its folder gets its name, in ``Publication.commit``: the verdict only tells of it. The save has
``lengthy_s``, counted from the moment at which its turn in the background comes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.rounds import TwoPhaseCommit, from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout, StoreClient
from safe_ckpt.core.formats.file_plan import ITSELF, WriteTask
from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry, Manifest
from safe_ckpt.core.saving.after_commit import AfterCommit
from safe_ckpt.core.saving.extension import Extensions, Outcome
from safe_ckpt.core.saving.handle import Handles, OpenSave, skipped
from safe_ckpt.core.saving.queue import SaveQueue
from safe_ckpt.core.saving.request import SaveRequest
from safe_ckpt.core.saving.save import SaveJob, answer, decide, failed, is_to_be_skipped
from safe_ckpt.core.saving.stager import Stager
from safe_ckpt.core.storage.copier import FileCopy, first_changed
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.writer.existing import Existing
from safe_ckpt.core.writer.sink import WriteJob
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    PeerLostError,
    SafeCheckpointError,
    SaveError,
    SourceChangedError,
    StateError,
    named,
)
from safe_ckpt.hooks.emitter import Emitter

_LOOK_S = 1.0
_LAST_WORD_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The parts that the saves of one rank go through, as long as its engine is open.

    Attributes:
        config: settings.
        coordinator: where the ranks meet.
        emit: receives what happens.
        extensions: what stands beside the saves.
        handles: of the saves that are under way, and of those whose error was not reported yet.
        stager: takes the copies.
        writer: writes this rank's files.
        queue: runs the background's half of one save after the other.
        after_commit: deletes what is not kept, on rank 0.
        store_client: the background's connection to the store in which the ranks meet.
    """

    config: CheckpointConfig
    coordinator: Coordinator
    emit: Emitter
    extensions: Extensions
    handles: Handles
    stager: Stager
    writer: WriterSupervisor
    queue: SaveQueue
    after_commit: AfterCommit
    store_client: StoreClient

    @property
    def rank(self) -> int:
        """This rank."""
        return self.coordinator.rank


def begin(pipeline: Pipeline, request: SaveRequest) -> OpenSave:
    """The caller's half, on every rank. When it returns, the state may change.

    Raises:
        SafeCheckpointError: it was not started, on any rank; see ``Engine.save``.
    """
    started = time.monotonic()
    decision = _agree(pipeline, request)
    if not decision:
        if pipeline.rank == 0:
            request.destination.home.abandon(request.on_commit.prefilled)
        return skipped(request.name)
    job = _job_of(pipeline, request, decision, started)
    try:
        _put(pipeline, job)
        pipeline.stager.copy(job)  # writing begins behind the copying
    except BaseException:
        if job.copy is not None:
            job.copy.abandon()
        raise
    return job.save


def finish(pipeline: Pipeline, job: SaveJob) -> None:
    """The background's half, on every rank, one save after the other: no collectives. The handle gets the outcome."""
    turn = Turn(pipeline, job)
    pipeline.extensions.ask("the turn of a save", lambda one: one.started(job))
    try:
        turn.learn(info=_lead(turn) if pipeline.rank == 0 else _follow(turn))
    except SafeCheckpointError as error:
        turn.learn(error=error)
    except BaseException as error:
        pipeline.extensions.ended(job, Outcome(error=pipeline.queue.unexpected(job, error)))
        raise
    finally:
        pipeline.stager.give_back(job)
    info = turn.outcome.info
    if info is not None:
        pipeline.queue.last_save_s = time.monotonic() - job.started
    # Here and not on the caller's thread: hooks write to files.
    raised = pipeline.extensions.ended(job, turn.outcome)
    if info is not None and pipeline.rank == 0:
        pipeline.after_commit.apply_rules(job, info)
    pipeline.queue.conclude(job, info, turn.outcome.error or raised)


def _agree(pipeline: Pipeline, request: SaveRequest) -> dict[str, Any]:
    """Returns what ``decide`` returned, but for an earlier failure: that is raised."""
    if isinstance(request.error, StateError):
        request.error.rank = pipeline.rank
    config, handles, extensions, begun = pipeline.config, pipeline.handles, pipeline.extensions, time.monotonic()
    handles.forget_reported()
    earlier = handles.unreported()
    skip = is_to_be_skipped(config, request, handles.in_flight)
    try:
        decision: dict[str, Any] = pipeline.coordinator.agree(
            "save",
            timeout_s=config.timeouts.barrier_s,
            must_match={"step": request.facts.step, "path": request.destination.path, **request.must_match},
            local=lambda: answer(request, earlier, pipeline.rank, extensions.spared_bytes(request)),
            decide=lambda answers: decide(request, answers, skip=skip, fields=extensions.decided(request)),
            phase="planning the save",
        )
    except Exception as problem:
        error = named(problem, rank=pipeline.rank, phase="planning the save")
        if pipeline.coordinator.unsure:  # rank 0 has this rank's answer, and may have gone on to commit
            cause, name = str(error), request.name
            error = CommitOutcomeUnknown(name=name, cause=cause, rank=pipeline.rank, phase="commit")
        pipeline.emit(failed(request, error, pipeline.rank, time.monotonic() - begun))
        if isinstance(error, CommitOutcomeUnknown):
            raise error from (None if error is problem else problem)
        raise
    if "earlier" in decision:
        handles.mark_reported(decision["earlier"]["op_id"])
        raise from_wire(decision["earlier"]["error"])
    return decision


def _job_of(pipeline: Pipeline, request: SaveRequest, decision: Mapping[str, Any], started: float) -> SaveJob:
    manifest = Manifest.from_json(decision["manifest"], str(request.destination.path))
    timeouts, home = pipeline.config.timeouts, request.destination.home
    # Its own deadline once its turn comes, plus what follows the verdict: deleting old checkpoints.
    turns = 1 + pipeline.handles.in_flight
    limit_s = turns * (timeouts.lengthy_s + timeouts.barrier_s)
    job = SaveJob(
        request=request,
        manifest=manifest,
        publication=home.begin(request.new(manifest, decision["needed_bytes"]), timeouts),
        writers=tuple(decision["writers"]),
        save=OpenSave(request.name, limit_s, manifest.op_id, home),
        started=started,
        agreed_s=time.monotonic() - started,
        call=pipeline.coordinator.call,
    )
    # A placeholder that ``Stager.lay_out`` clears. If the caller is interrupted before that, the background finds this error,
    # and not a save that looks planned.
    job.error = SaveError(name=job.name, cause="interrupted", rank=pipeline.rank, phase="snapshot")
    return job


def _put(pipeline: Pipeline, job: SaveJob) -> None:
    """Plan the copy and put the save into the queue: from here on its handle is sure to get an outcome."""
    raised_here = False
    try:
        # With several saves in flight only some ranks may know of a failure. It is reported at the next agreement.
        pipeline.handles.await_room(pipeline.config.max_in_flight)
        if pipeline.config.max_in_flight == 1 and pipeline.handles.unreported() is not None:
            # Nothing is in flight any more, so every rank knows of it and raises here.
            raised_here = True
            pipeline.handles.raise_unreported()
        size = sum(file.total_bytes for file in job.request.payload.files)
        if pipeline.rank == 0 and pipeline.writer.needs_process(size):
            pipeline.writer.start()  # while the copy is taken; the other ranks start theirs at their turn
        pipeline.stager.lay_out(job)
    finally:
        # Also when this was interrupted, because the other ranks wait for this rank's report.
        if not raised_here:
            pipeline.handles.add(job.save)
            pipeline.queue.put(job)


@dataclass
class Turn:
    """The turn of one save in the background of one rank.

    Attributes:
        pipeline: the parts that it goes through.
        job: the save.
        round: where the ranks report how it goes.
        outcome: what is known by now of how it ends.
    """

    pipeline: Pipeline
    job: SaveJob
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        pipeline, job = self.pipeline, self.job
        others = [rank for rank in job.writers if rank != 0]
        check = self._check_giving_up
        self.round = TwoPhaseCommit(pipeline.coordinator, pipeline.store_client, job.op_id, others, check, job.call)
        self._deadline = time.monotonic() + pipeline.config.timeouts.lengthy_s
        self._next_look = 0.0

    def left_s(self) -> float:
        """How long it may still take."""
        return max(0.001, self._deadline - time.monotonic())

    def check_still_wanted(self) -> None:
        """Called again and again while this rank writes.

        Raises:
            SafeCheckpointError: it is to be given up.
        """
        self._check_giving_up()
        for source in (self.job, self.job.copy):
            if source is not None and source.error is not None:
                raise source.error
        now = time.monotonic()
        if now > self._deadline:
            cause = f"not done after {self.pipeline.config.timeouts.lengthy_s:.0f} s (timeouts.lengthy_s)"
            raise self.error(cause, "write")
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if (failure := self.round.failed_elsewhere()) is not None:
            raise failure

    def explained(self, error: BaseException, phase: str) -> SafeCheckpointError:
        """An error of this package for any error."""
        if (explained := self.job.publication.explain(error, rank=self.pipeline.rank, phase=phase)) is not None:
            return explained
        return (
            error if isinstance(error, SafeCheckpointError) else self.error(f"{type(error).__name__}: {error}", phase)
        )

    def error(self, cause: str, phase: str) -> SaveError:
        """Make the error of this save, on this rank."""
        return SaveError(name=self.job.name, cause=cause, rank=self.pipeline.rank, phase=phase)

    def learn(self, **facts: Any) -> None:
        """These are fields of its outcome."""
        self.outcome = dataclasses.replace(self.outcome, **facts)

    def _check_giving_up(self) -> None:
        self.pipeline.queue.check_giving_up(self.job.name)


def _lead(turn: Turn) -> CheckpointInfo:
    """Rank 0."""
    job, publication = turn.job, turn.job.publication
    try:
        if job.error is not None:
            raise job.error
        publication.prepare()
        turn.round.prepared()
        own = {0: write(turn)} if 0 in job.writers else {}
        others = turn.round.reports(turn.left_s()) if any(job.writers) else {}
        for rank in sorted(others):
            if "error" in others[rank]:
                raise from_wire(others[rank]["error"])
        info = _commit(turn, {**own, **others})
    except BaseException as error:
        ours = turn.explained(error, "commit")
        # Publish the cause first: the other ranks need not wait for the cleaning up.
        turn.round.conclude({"error": to_wire(ours, rank=0, phase="save")})
        if not isinstance(ours, CommitOutcomeUnknown):
            publication.abort()
        raise ours from error
    turn.round.conclude({"ok": info.to_json(), "summary": dict(turn.outcome.summary)})
    return info


def _commit(turn: Turn, reports: Mapping[int, Any]) -> CheckpointInfo:
    turn.round.refuse_if_a_rank_left()
    entries = _entries(turn, reports)
    said = {rank: reports[rank]["extensions"] for rank in sorted(reports)}
    fields, summary = turn.pipeline.extensions.concluding(turn.job, said)
    turn.learn(summary=summary)
    sections = {"items": _merge_items(reports), **fields}
    return turn.job.publication.commit(entries, sections, turn.check_still_wanted)


def _entries(turn: Turn, reports: Mapping[int, Any]) -> tuple[FileEntry, ...]:
    """The files that the ranks report: each of them by one rank, with its size and its whole digest."""
    entries: dict[str, FileEntry] = {}
    for rank in sorted(reports):
        for row in reports[rank]["files"]:
            try:
                entry = FileEntry(**row)
                if entries.setdefault(entry.path, entry) is not entry:
                    raise ValueError(f"rank {entries[entry.path].rank} reports {entry.path}, too")
            except (TypeError, ValueError) as error:
                cause = f"rank {rank} reports a file that could not be resumed from: {error}"
                raise SaveError(name=turn.job.name, cause=cause, rank=rank, phase="commit") from error
    return tuple(entries.values())


def _merge_items(reports: Mapping[int, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for rank in sorted(reports):
        for name, item in reports[rank]["items"].items():
            entry = merged.setdefault(name, {"per_rank": item["per_rank"], "form": item["form"], "files": {}})
            entry["files"][str(rank)] = item["file"]
    return merged


def _follow(turn: Turn) -> CheckpointInfo:
    """Every other rank."""
    job, rank, may_be_reported, rank_0_has_error = turn.job, turn.pipeline.rank, False, False
    if rank in job.writers:
        try:
            if job.error is not None:
                raise job.error
            turn.round.await_prepared(turn.left_s())
            if turn.round.failed_elsewhere() is None:
                job.publication.await_folder(rank, turn.left_s)
                report = write(turn)
                may_be_reported = True
                turn.round.report(report)
        except PeerLostError as error:
            turn.round.leave()
            if not may_be_reported:
                raise
            # Rank 0 may have received it all the same, and committed.
            raise CommitOutcomeUnknown(name=job.name, cause=str(error), phase="commit") from error
        except Exception as error:
            _report_failure(turn, turn.explained(error, "write"))
            rank_0_has_error = True
    return _read_verdict(turn, rank_0_has_error=rank_0_has_error)


def _report_failure(turn: Turn, error: SafeCheckpointError) -> None:
    try:
        turn.round.report({"error": to_wire(error, rank=turn.pipeline.rank, phase="write")})
    except PeerLostError:
        turn.round.leave()
        raise error from None


def _read_verdict(turn: Turn, *, rank_0_has_error: bool) -> CheckpointInfo:
    try:
        # Rank 0 has the same deadline and publishes a verdict then. Waiting a little longer avoids an unknown outcome.
        verdict = turn.round.verdict(turn.left_s() + turn.pipeline.config.timeouts.peer_stall_s)
    except (KeyTimeout, PeerLostError) as error:
        cause = str(error) if isinstance(error, PeerLostError) else "rank 0 gave no verdict in time"
        raise CommitOutcomeUnknown(name=turn.job.name, cause=cause, phase="commit") from error
    except SaveError as error:  # this rank gives up; rank 0 may commit, unless it was told of an error
        if rank_0_has_error:
            raise
        verdict = _last_word(turn, error)
    if "error" in verdict:
        raise from_wire(verdict["error"])
    turn.learn(summary=verdict["summary"])
    return CheckpointInfo.from_json(verdict["ok"], beside=turn.job.path)


def _last_word(turn: Turn, error: SaveError) -> Any:
    try:
        # Rank 0 may give up, too, at the same moment.
        return turn.round.verdict(_LAST_WORD_S, given_up=True)
    except (KeyTimeout, PeerLostError):
        name, rank = turn.job.name, turn.pipeline.rank
        raise CommitOutcomeUnknown(name=name, cause=error.cause, rank=rank, phase="commit") from error


def write(turn: Turn) -> dict[str, Any]:
    """Write this rank's part of a save, on the background thread. Returns the report of this rank.

    Raises:
        OSError: something could not be written.
        SafeCheckpointError: the save was given up, or its source changed.
    """
    job, pipeline, begun = turn.job, turn.pipeline, time.monotonic()
    directories = list(job.publication.folders)
    results = [*_copy_files(turn), *_adopt(turn, job.existing.values())]
    if job.streamed:
        streamed = _write_job(job, pipeline.rank, files=_observed(turn), directories=directories)
        results += pipeline.writer.stream(streamed, job.files, pipeline.config.max_host_bytes, turn.check_still_wanted)
        job.save.mark_snapshot_taken()
    elif job.buffer is not None:
        results += _run_writer(turn, buffer=job.buffer, files=_observed(turn), directories=directories)
        _await_copy(turn)
    else:
        raise turn.error("there is no snapshot", "write")
    ended = time.monotonic()
    turn.learn(written_at=ended, write_s=ended - begun)
    files = {_place(job, one.path): one for one in results}
    found = pipeline.extensions.merged("what was written", lambda one: one.recognised(job, files))
    if found:
        for one in _adopt(turn, found.values()):
            place = _place(job, one.path)
            files[place] = dataclasses.replace(one, observed={**files[place].observed, **one.observed})
        _run_writer(turn, directories=directories)
    turn.learn(written_bytes=sum(file.size_bytes - file.shared_bytes for file in files.values()))
    reports = pipeline.extensions.ask("what was written", lambda one: one.written(job, files))
    entries = [_entry(turn, file) for file in files.values()]
    return {"files": entries, "items": dict(job.request.facts.items), "extensions": reports}


def _observed(turn: Turn) -> list[WriteTask]:
    """Return the write tasks, each with what the writer's observers are told of it."""
    job, extensions = turn.job, turn.pipeline.extensions
    return [
        dataclasses.replace(task, observed=extensions.observed(job, _place(job, task.path), plan))
        for task, plan in zip(job.tasks, job.files, strict=True)
    ]


def _adopt(turn: Turn, files: Iterable[Existing]) -> list[WrittenFile]:
    """Give files of an earlier checkpoint one more name, in this one; copy them where a file cannot have two."""
    places = [(one, f"{turn.job.folder}/{one.path}") for one in files]
    for one, path in places:
        one.how = one.link(path)
    left = [(one, one.adoption(path)) for one, path in places if one.how != "linked"]
    told = [adoption for _, adoption in left]
    results = {result.path: result for result in _run_writer(turn, adoptions=told)} if told else {}
    for one, adoption in left:
        result = results[adoption.path]
        if result.xxh3_128 != one.before.xxh3_128:
            source = one.before.sources[0]
            cause = f"{one.path} was to be taken from {source}, whose bytes are not those that were written"
            raise turn.error(cause, "write")
        if adoption.sources and not result.shared_bytes:
            one.how = "sent"
    return [one.written(path, shared=path not in results or results[path].shared_bytes > 0) for one, path in places]


def _place(job: SaveJob, path: str) -> str:
    """Return the place of a file in the checkpoint; the same for every single file."""
    if job.request.destination.kind == "file":
        return ITSELF
    return path.removeprefix(f"{job.folder}/")


def _run_writer(turn: Turn, **what: Any) -> list[WrittenFile]:
    """Have the writer do what the other fields of a ``WriteJob`` say."""
    return turn.pipeline.writer.write(_write_job(turn.job, turn.pipeline.rank, **what), turn.check_still_wanted)


def _write_job(job: SaveJob, rank: int, **what: Any) -> WriteJob:
    return WriteJob(name=job.name, rank=rank, folder=str(job.folder), **what)


def _copy_files(turn: Turn) -> list[WrittenFile]:
    """Copy what lies in files, and hash what is there already. The caller goes on once they are read."""
    job, payload = turn.job, turn.job.request.payload
    chosen = [*payload.copies, *payload.in_place]
    if not chosen:
        return []
    copies = [dataclasses.replace(copy, path=f"{job.folder}/{copy.path}") for copy in chosen]
    try:
        results = _run_writer(turn, copies=copies)
    except OSError:
        _refuse_changed(turn, copies)  # one that was cut off or replaced is an error of the disk at first sight
        raise
    _refuse_changed(turn, copies)
    job.read.set()
    return results


def _refuse_changed(turn: Turn, copies: Sequence[FileCopy]) -> None:
    if (changed := first_changed(copies)) is not None:
        place = changed.removeprefix(f"{turn.job.folder}/")
        until = "the call returns" if place == changed else "the checkpoint is committed"
        cause = f"{place}: it changed while it was being read: nothing may write to it until {until}"
        raise SourceChangedError(name=turn.job.name, cause=cause, source=changed, rank=turn.pipeline.rank)


def _await_copy(turn: Turn) -> None:
    """The bytes are written. Whether they are right is known when the copy is over."""
    copy, limit_s = turn.job.copy, turn.pipeline.config.timeouts.barrier_s
    if copy is not None and not copy.wait(limit_s):
        raise turn.error(f"the copy did not end within {limit_s:.0f} s (timeouts.barrier_s)", "snapshot")
    if copy is not None and copy.error is not None:
        raise copy.error


def _entry(turn: Turn, result: WrittenFile) -> dict[str, Any]:
    besides = turn.pipeline.extensions.merged("an entry of the manifest", lambda one: one.entry(result))
    return {
        "path": result.path.removeprefix(f"{turn.job.folder}/"),
        "rank": turn.pipeline.rank,
        "size_bytes": result.size_bytes,
        "xxh3_128": result.xxh3_128,
        **besides,
    }
