"""The background phases of a save: prepare, write, commit, retain. They issue no collectives.

Rank 0 leads: it makes the pending directory, collects what every writing rank reports, commits and publishes the verdict.
The others write, report and wait for the verdict.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.rounds import TwoPhaseCommit, from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.core.formats.file_plan import ITSELF, WriteTask
from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry
from safe_ckpt.core.saving.extension import Extensions
from safe_ckpt.core.saving.save import SaveJob
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
)

_LOOK_S = 1.0
_LAST_WORD_S = 1.5


class WritePhase:
    """Writes this rank's part of one save.

    Args:
        job: the save.
        writer: writes this rank's files.
        config: settings.
        rank: this rank.
        extensions: tell what the writer looks at, and which files are there already.
        check_still_wanted: called while writing; raises to give up.

    Attributes:
        write_s: how long it took; 0 while it has not come to its end.
        written_at: when that was, on the monotonic clock.
        written_bytes: how much it was.
    """

    def __init__(
        self,
        job: SaveJob,
        writer: WriterSupervisor,
        config: CheckpointConfig,
        rank: int,
        extensions: Extensions,
        check_still_wanted: Callable[[], None],
    ) -> None:
        self._job = job
        self._writer = writer
        self._config = config
        self._rank = rank
        self._extensions = extensions
        self._check_still_wanted = check_still_wanted
        self.write_s = 0.0
        self.written_at = 0.0
        self.written_bytes = 0

    def run(self) -> dict[str, Any]:
        """Write all of it. Returns the report of this rank.

        Raises:
            OSError: something could not be written.
            SafeCheckpointError: the save was given up, or its source changed.
        """
        job, begun, directories = self._job, time.monotonic(), list(self._job.publication.folders)
        results = [*self._copy_files(), *self._adopt(job.existing.values())]
        if job.streamed:
            most = self._config.max_host_bytes
            streamed = self._job_of(files=self._observed(), directories=directories)
            results += self._writer.stream(streamed, job.files, most, self._check_still_wanted)
            job.handle.mark_snapshot_taken()
        elif job.buffer is not None:
            results += self._run_writer(buffer=job.buffer, files=self._observed(), directories=directories)
            self._await_copy(job)
        else:
            raise SaveError(name=job.name, cause="there is no snapshot", rank=self._rank, phase="write")
        self.written_at = time.monotonic()
        self.write_s = self.written_at - begun
        written = {self._place(one.path): one for one in results}
        found = self._extensions.existing("what was written", lambda one: one.recognised(job, written))
        if found:
            for one in self._adopt(found.values()):
                place = self._place(one.path)
                written[place] = dataclasses.replace(one, observed={**written[place].observed, **one.observed})
            self._run_writer(directories=directories)
        self.written_bytes = sum(result.size_bytes - result.shared_bytes for result in written.values())
        reports = self._extensions.ask("what was written", lambda one: one.written(job, written))
        files = [self._entry(result) for result in written.values()]
        return {"files": files, "items": dict(job.request.facts.items), "extensions": reports}

    def _observed(self) -> list[WriteTask]:
        """What is written, with what the writer's observers are told of it."""
        job, extensions = self._job, self._extensions
        return [
            dataclasses.replace(task, observed=extensions.observed(job, self._place(task.path), plan))
            for task, plan in zip(job.tasks, job.files, strict=True)
        ]

    def _adopt(self, files: Iterable[Existing]) -> list[WrittenFile]:
        """Give files of a checkpoint before a further name; copy them where there are no such names."""
        job = self._job
        places = [(one, f"{job.folder}/{one.path}") for one in files]
        for one, path in places:
            one.how = one.link(path)
        left = [(one, one.adoption(path)) for one, path in places if one.how != "linked"]
        told = [adoption for _, adoption in left]
        results = {result.path: result for result in self._run_writer(adoptions=told)} if told else {}
        for one, adoption in left:
            result = results[adoption.path]
            if result.xxh3_128 != one.before.xxh3_128:
                cause = f"{one.path} was to be taken from {one.before.sources[0]}, whose bytes are not those that were written"
                raise SaveError(name=job.name, cause=cause, rank=self._rank, phase="write")
            if adoption.sources and not result.shared_bytes:
                one.how = "sent"
        return [one.written(path, shared=path not in results or results[path].shared_bytes > 0) for one, path in places]

    def _place(self, path: str) -> str:
        """Of a file in the checkpoint; the same for every single file."""
        if self._job.request.destination.kind == "file":
            return ITSELF
        return path.removeprefix(f"{self._job.folder}/")

    def _run_writer(self, **what: Any) -> list[WrittenFile]:
        """Have the writer do what the other fields of a ``WriteJob`` say."""
        return self._writer.write(self._job_of(**what), self._check_still_wanted)

    def _job_of(self, **what: Any) -> WriteJob:
        return WriteJob(name=self._job.name, rank=self._rank, folder=str(self._job.folder), **what)

    def _copy_files(self) -> list[WrittenFile]:
        """Copy what lies in files, and hash what is there already. The caller goes on once they are read."""
        job, content = self._job, self._job.request.content
        chosen = [*content.copies, *content.in_place]
        if not chosen:
            return []
        copies = [dataclasses.replace(copy, path=f"{job.folder}/{copy.path}") for copy in chosen]
        try:
            results = self._run_writer(copies=copies)
        except OSError:
            self._refuse_changed(copies)  # one that was cut off or replaced is an error of the disk at first sight
            raise
        self._refuse_changed(copies)
        job.read.set()
        return results

    def _refuse_changed(self, copies: Sequence[FileCopy]) -> None:
        if (changed := first_changed(copies)) is not None:
            place = changed.removeprefix(f"{self._job.folder}/")
            until = "the call returns" if place == changed else "the checkpoint is committed"
            cause = f"{place}: it changed while it was being read: nothing may write to it until {until}"
            raise SourceChangedError(name=self._job.name, cause=cause, source=changed, rank=self._rank)

    def _await_copy(self, job: SaveJob) -> None:
        """The bytes are written. Whether they are right is known when the copy is over."""
        limit_s = self._config.timeouts.barrier_s
        if job.copy is not None and not job.copy.wait(limit_s):
            cause = f"the copy did not end within {limit_s:.0f} s (timeouts.barrier_s)"
            raise SaveError(name=job.name, cause=cause, rank=self._rank, phase="snapshot")
        if job.copy is not None and job.copy.error is not None:
            raise job.copy.error

    def _entry(self, result: WrittenFile) -> dict[str, Any]:
        facts = {"size_bytes": result.size_bytes, "xxh3_128": result.xxh3_128}
        for besides in self._extensions.ask("an entry of the manifest", lambda one: one.entry(result)).values():
            facts |= besides
        return {"path": result.path.removeprefix(f"{self._job.folder}/"), "rank": self._rank, **facts}


class CommitProtocol:
    """Runs one save on one rank, on the background thread.

    Args:
        job: the save.
        two_phase: where the ranks report how it goes.
        writer: writes this rank's files.
        config: settings.
        rank: this rank.
        give_up: raises when the save is to be abandoned.
        extensions: what stands beside the save.

    Attributes:
        told: what rank 0 concluded for all ranks, by extension.
        writing: this rank's part.
    """

    def __init__(
        self,
        job: SaveJob,
        two_phase: TwoPhaseCommit,
        writer: WriterSupervisor,
        config: CheckpointConfig,
        rank: int,
        give_up: Callable[[], None],
        extensions: Extensions,
    ) -> None:
        self._job = job
        self._extensions = extensions
        self.told: Mapping[str, Any] = {}
        self.writing = WritePhase(job, writer, config, rank, extensions, self._check_still_wanted)
        self._publication = job.publication
        self._two_phase = two_phase
        self._config = config
        self._rank = rank
        self._give_up = give_up
        self._deadline = time.monotonic() + config.timeouts.lengthy_s
        self._next_look = 0.0

    def run(self) -> CheckpointInfo:
        """Run it to its end.

        Raises:
            SafeCheckpointError: it failed; the same error on every rank.
        """
        return self._lead() if self._rank == 0 else self._follow()

    def _lead(self) -> CheckpointInfo:
        job = self._job
        try:
            if job.error is not None:
                raise job.error
            self._publication.prepare()
            self._two_phase.prepared()
            own = {0: self.writing.run()} if 0 in job.writers else {}
            others = self._two_phase.reports(self._left_s()) if any(job.writers) else {}
            for rank in sorted(others):
                if "error" in others[rank]:
                    raise from_wire(others[rank]["error"])
            info = self._commit({**own, **others})
        except BaseException as error:
            ours = self._explained(error, "commit")
            # Publish the cause first: the other ranks need not wait for the cleaning up.
            self._two_phase.conclude({"error": to_wire(ours, rank=0, phase="save")})
            if not isinstance(ours, CommitOutcomeUnknown):
                self._publication.abort()
            raise ours from error
        self._two_phase.conclude({"ok": info.to_json(), "told": dict(self.told)})
        return info

    def _follow(self) -> CheckpointInfo:
        job, reporting, refused = self._job, False, False
        if self._rank in job.writers:
            try:
                if job.error is not None:
                    raise job.error
                self._two_phase.await_prepared(self._left_s())
                if self._two_phase.failed_elsewhere() is None:
                    self._publication.await_folder(self._rank, self._left_s)
                    report = self.writing.run()
                    reporting = True
                    self._two_phase.report(report)
            except PeerLostError as error:
                self._two_phase.leave()
                if not reporting:
                    raise
                # Rank 0 may have received it all the same, and committed.
                raise CommitOutcomeUnknown(name=job.name, cause=str(error), phase="commit") from error
            except Exception as error:
                self._report_failure(self._explained(error, "write"))
                refused = True
        return self._read_verdict(refused=refused)

    def _report_failure(self, error: SafeCheckpointError) -> None:
        try:
            self._two_phase.report({"error": to_wire(error, rank=self._rank, phase="write")})
        except PeerLostError:
            self._two_phase.leave()
            raise error from None

    def _read_verdict(self, *, refused: bool) -> CheckpointInfo:
        try:
            # Rank 0 has the same deadline and publishes a verdict then. Waiting a little longer avoids an unknown outcome.
            verdict = self._two_phase.verdict(self._left_s() + self._config.timeouts.peer_stall_s)
        except (KeyTimeout, PeerLostError) as error:
            cause = str(error) if isinstance(error, PeerLostError) else "rank 0 gave no verdict in time"
            raise CommitOutcomeUnknown(name=self._job.name, cause=cause, phase="commit") from error
        except SaveError as error:  # this rank gives up; rank 0 may commit, unless it was told of an error
            if refused:
                raise
            verdict = self._last_word(error)
        if "error" in verdict:
            raise from_wire(verdict["error"])
        self.told = verdict["told"]
        return CheckpointInfo.from_json(verdict["ok"], beside=self._job.path)

    def _last_word(self, error: SaveError) -> Any:
        try:
            # Rank 0 may give up, too, at the same moment.
            return self._two_phase.verdict(_LAST_WORD_S, given_up=True)
        except (KeyTimeout, PeerLostError):
            name, cause = self._job.name, error.cause
            raise CommitOutcomeUnknown(name=name, cause=cause, rank=self._rank, phase="commit") from error

    def _check_still_wanted(self) -> None:
        self._give_up()
        for source in (self._job, self._job.copy):
            if source is not None and source.error is not None:
                raise source.error
        now = time.monotonic()
        if now > self._deadline:
            cause = f"not done after {self._config.timeouts.lengthy_s:.0f} s (timeouts.lengthy_s)"
            raise SaveError(name=self._job.name, cause=cause, rank=self._rank, phase="write")
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if (failure := self._two_phase.failed_elsewhere()) is not None:
            raise failure

    def _commit(self, reports: Mapping[int, Any]) -> CheckpointInfo:
        self._two_phase.refuse_left()
        entries = self._entries(reports)
        said = {rank: reports[rank]["extensions"] for rank in sorted(reports)}
        fields, self.told = self._extensions.concluding(self._job, said)
        sections = {"items": _merge_items(reports), **fields}
        return self._publication.commit(entries, sections, self._check_still_wanted)

    def _entries(self, reports: Mapping[int, Any]) -> tuple[FileEntry, ...]:
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
                    raise SaveError(name=self._job.name, cause=cause, rank=rank, phase="commit") from error
        return tuple(entries.values())

    def _left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _explained(self, error: BaseException, phase: str) -> SafeCheckpointError:
        if (explained := self._publication.explain(error, rank=self._rank, phase=phase)) is not None:
            return explained
        if isinstance(error, SafeCheckpointError):
            return error
        return SaveError(name=self._job.name, cause=f"{type(error).__name__}: {error}", rank=self._rank, phase=phase)


def _merge_items(reports: Mapping[int, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for rank in sorted(reports):
        for name, item in reports[rank]["items"].items():
            entry = merged.setdefault(name, {"per_rank": item["per_rank"], "form": item["form"], "files": {}})
            entry["files"][str(rank)] = item["file"]
    return merged
