"""The background phases of a save: prepare, write, commit, retain. They issue no collectives.

Rank 0 leads: it makes the pending directory, collects what every writing rank reports, commits and publishes the verdict.
The others write, report and wait for the verdict.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.rounds import TwoPhaseCommit, from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry
from safe_ckpt.core.health import examine
from safe_ckpt.core.health.verdict import ITSELF, Expectation, Known, described, of_checkpoint
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.copier import FileCopy, first_changed
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.writer.existing import UNCHANGED, Existing
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


class CommitProtocol:
    """Runs one save on one rank, on the background thread.

    Args:
        job: the save.
        two_phase: where the ranks report how it goes.
        writer: writes this rank's files.
        config: settings.
        rank: this rank.
        give_up: raises when the save is to be abandoned.
        known: what this rank knows of the health of the files that it writes.

    Attributes:
        health: what is wrong with the numbers of what was committed, in words; empty where nothing is.
        write_s: how long this rank's writing took; 0 while it has not come to its end.
        written_at: when that was, on the monotonic clock.
        written_bytes: how much it was.
    """

    def __init__(
        self,
        job: SaveJob,
        two_phase: TwoPhaseCommit,
        writer: WriterSupervisor,
        config: CheckpointConfig,
        rank: int,
        give_up: Callable[[], None],
        known: Known,
    ) -> None:
        self._job = job
        self._known = known
        self._found: dict[str, Mapping[str, Any]] = {}
        self._results: Sequence[WrittenFile] = ()
        self.health = ""
        self._publication = job.publication
        self._two_phase = two_phase
        self._writer = writer
        self._config = config
        self._rank = rank
        self._give_up = give_up
        self._deadline = time.monotonic() + config.timeouts.lengthy_s
        self._next_look = 0.0
        self.write_s = 0.0
        self.written_at = 0.0
        self.written_bytes = 0

    def run(self) -> CheckpointInfo:
        """Run it to its end.

        Raises:
            SafeCheckpointError: it failed; the same error on every rank.
        """
        sharing = self._job.sharing
        try:
            info = self._lead() if self._rank == 0 else self._follow()
            if sharing is not None:
                folder = str(self._job.folder) if self._job.request.destination.kind == "directory" else ""
                sharing.learn(info.path, self._results, folder)
        except BaseException as error:
            if sharing is not None:
                sharing.failed(error)
            raise
        finally:
            if sharing is not None:
                sharing.close()
        self._known.learn(self._found, healthy=not self.health)
        return info

    def _lead(self) -> CheckpointInfo:
        job = self._job
        try:
            if job.error is not None:
                raise job.error
            self._publication.prepare()
            self._two_phase.prepared()
            own = {0: self._write()} if 0 in job.writers else {}
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
        self._two_phase.conclude({"ok": info.to_json(), "health": self.health})
        return info

    def _follow(self) -> CheckpointInfo:
        job, reporting = self._job, False
        if self._rank in job.writers:
            try:
                if job.error is not None:
                    raise job.error
                self._two_phase.await_prepared(self._left_s())
                if self._two_phase.failed_elsewhere() is None:
                    self._publication.await_folder(self._rank, self._left_s)
                    report = self._write()
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
        return self._read_verdict()

    def _report_failure(self, error: SafeCheckpointError) -> None:
        try:
            self._two_phase.report({"error": to_wire(error, rank=self._rank, phase="write")})
        except PeerLostError:
            self._two_phase.leave()
            raise error from None

    def _read_verdict(self) -> CheckpointInfo:
        try:
            # Rank 0 has the same deadline and publishes a verdict then. Waiting a little longer avoids an unknown outcome.
            verdict = self._two_phase.verdict(self._left_s() + self._config.timeouts.peer_stall_s)
        except (KeyTimeout, PeerLostError) as error:
            cause = str(error) if isinstance(error, PeerLostError) else "rank 0 gave no verdict in time"
            raise CommitOutcomeUnknown(name=self._job.name, cause=cause, phase="commit") from error
        if "error" in verdict:
            raise from_wire(verdict["error"])
        self.health = verdict["health"]
        return CheckpointInfo.from_json(verdict["ok"], beside=self._job.path)

    def _write(self) -> dict[str, Any]:
        job = self._job
        begun, directories = time.monotonic(), list(self._publication.folders)
        results = self._copy_files()
        if job.sharing is not None:
            results += self._share(job.sharing.shared)
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
        self._results = results = self._share_found(results, directories)
        self.written_bytes = sum(result.size_bytes - result.shared_bytes for result in results)
        self._found = {
            self._place(one.path): one.observed[examine.NAME] for one in results if examine.NAME in one.observed
        }
        items = dict(job.request.facts.items)
        return {"files": [self._entry(result) for result in results], "items": items, "health": self._found}

    def _observed(self) -> list[WriteTask]:
        """What is written, with what the writer is told of what is expected of the numbers, and of what is there already."""
        job, settings, unexamined = self._job, self._config.health, self._job.request.facts.unexamined
        looks = settings.action != "off" and "*" not in unexamined
        ignored = (*settings.ignore, *unexamined)
        usual = Expectation(ignored=ignored, norm_jump=settings.norm_jump, action=settings.action)
        tasks = []
        for task, plan in zip(job.tasks, job.files, strict=True):
            place, observed = self._place(task.path), dict[str, Any]()
            if job.sharing is not None:
                observed[UNCHANGED] = job.sharing.told(place)
            if looks:
                observed[examine.NAME] = examine.told(plan, self._known.expectation(place, usual))
            tasks.append(dataclasses.replace(task, observed=observed))
        return tasks

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
        """Copy what lies in files. The caller goes on once they are read."""
        job = self._job
        if not job.request.content.copies:
            return []
        copies = [dataclasses.replace(copy, path=f"{job.folder}/{copy.path}") for copy in job.request.content.copies]
        try:
            results = self._run_writer(copies=copies)
        except OSError:
            self._refuse_changed(copies)  # one that was cut off or replaced is an error of the disk at first sight
            raise
        self._refuse_changed(copies)
        job.read.set()
        return results

    def _share_found(self, results: Sequence[WrittenFile], directories: list[str]) -> list[WrittenFile]:
        """Share what the writer has found to be there already."""
        found = {self._place(one.path): one for one in results if "left_out" in one.observed.get(UNCHANGED, {})}
        if not found or self._job.sharing is None:
            return list(results)
        shared = self._share([self._job.sharing.found[place] for place in found])
        self._run_writer(directories=directories)
        now = {
            one.path: dataclasses.replace(
                one, observed={**found[self._place(one.path)].observed, UNCHANGED: one.observed[UNCHANGED]}
            )
            for one in shared
        }
        return [now.get(result.path, result) for result in results]

    def _share(self, chosen: Sequence[Existing]) -> list[WrittenFile]:
        """Give files of a checkpoint before a further name; copy them where there are no such names."""
        job, sharing = self._job, self._job.sharing
        if sharing is None or not chosen:
            return []
        outcomes = [(one, f"{job.folder}/{one.path}", one.link(f"{job.folder}/{one.path}")) for one in chosen]
        done = [one.written(path, shared=True) for one, path, how in outcomes if how == "linked"]
        left = [(one, one.adoption(path)) for one, path, how in outcomes if how != "linked"]
        if not left:
            return done
        results = {result.path: result for result in self._run_writer(adoptions=[told for _, told in left])}
        if any(how == "never" for *_, how in outcomes):
            sharing.refused()
        if any(told.sources and not results[told.path].shared_bytes for _, told in left):
            sharing.not_copied()
        for one, told in left:
            result = results[told.path]
            if result.xxh3_128 != one.before.xxh3_128:
                cause = f"{one.path} was to be taken from {one.before.sources[0]}, whose bytes are not those that were written"
                raise SaveError(name=job.name, cause=cause, rank=self._rank, phase="write")
            done.append(one.written(told.path, shared=result.shared_bytes > 0))
        return done

    def _refuse_changed(self, copies: Sequence[FileCopy]) -> None:
        if (changed := first_changed(copies)) is not None:
            cause = f"{changed}: it changed while it was being copied: nothing may write to it until the call returns"
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
        path = result.path.removeprefix(f"{self._job.folder}/")
        facts = {
            "size_bytes": result.size_bytes,
            "xxh3_128": result.xxh3_128,
            "age": result.observed.get(UNCHANGED, {}).get("age", 0),
        }
        return {"path": path, "rank": self._rank, **facts}

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
        found = {path: facts for rank in sorted(reports) for path, facts in reports[rank]["health"].items()}
        health = of_checkpoint(found, self._config.health.action)
        self.health = described(health)
        return self._publication.commit(
            entries, {"items": _merge_items(reports), "health": health}, self._check_still_wanted
        )

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
