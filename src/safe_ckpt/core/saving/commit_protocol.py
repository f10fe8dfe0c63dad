"""The background phases of a save: prepare, write, commit, retain. They issue no collectives.

Rank 0 leads: it makes the pending directory, collects what every writing rank reports, commits and publishes the verdict.
The others write, report and wait for the verdict.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.mailbox import TwoPhaseCommit
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.core.directory import extra_files
from safe_ckpt.core.directory.shared import Patience, await_visible
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry
from safe_ckpt.core.saving.job import SaveJob
from safe_ckpt.core.saving.streamed_files import FileStream
from safe_ckpt.core.storage import durable as commit
from safe_ckpt.core.storage.copier import FileCopy, first_changed
from safe_ckpt.core.storage.durable import WrittenFile, sync_directory
from safe_ckpt.core.writer.client import WriteJob
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    DirectoryError,
    DirectoryInUseError,
    DirectoryNotSharedError,
    PeerLostError,
    SafeCheckpointError,
    SaveError,
    SourceChangedError,
    from_wire,
    to_wire,
)

_LOOK_S = 1.0
_VISIBLE_S = 60.0


class CommitProtocol:
    """Runs one save on one rank, on the background thread.

    Args:
        job: the save.
        two_phase: where the ranks report how it goes.
        writer: writes this rank's files.
        config: settings.
        rank: this rank.
        give_up: raises when the save is to be abandoned.

    Attributes:
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
    ) -> None:
        self._job = job
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
        return self._lead() if self._rank == 0 else self._follow()

    def _lead(self) -> CheckpointInfo:
        job = self._job
        try:
            if job.error is not None:
                raise job.error
            self._prepare()
            self._two_phase.prepared()
            own = {0: self._write()} if 0 in job.writers else {}
            others = self._two_phase.reports(self._left_s()) if any(job.writers) else {}
            for rank in sorted(others):
                if "error" in others[rank]:
                    raise from_wire(others[rank]["error"])
            info = self._commit({**own, **others})
        except BaseException as error:
            ours = self._named(self._taken_over(error) or error, "commit")
            # Publish the cause first: the other ranks need not wait for the cleaning up.
            self._two_phase.conclude({"error": to_wire(ours, rank=0, phase="save")})
            if not isinstance(ours, CommitOutcomeUnknown):
                job.workspace.drop_pending(job.op_id)
                if job.request.on_commit.prefilled is not None:
                    job.workspace.drop_pending(job.request.on_commit.prefilled.parent.name)
            raise ours from error
        self._two_phase.conclude({"ok": info.to_json()})
        return info

    def _follow(self) -> CheckpointInfo:
        job, reporting = self._job, False
        if self._rank in job.writers:
            try:
                if job.error is not None:
                    raise job.error
                self._two_phase.await_prepared(self._left_s())
                if self._two_phase.failed_elsewhere() is None:
                    self._await_folder()
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
                self._report_failure(self._named(error, "write"))
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
        return CheckpointInfo.from_json(verdict["ok"])

    def _prepare(self) -> None:
        job = self._job
        why = "Earlier checkpoints are deleted only after the new one is committed, so both must fit."
        commit.require_space(job.workspace.path, job.needed_bytes, why)
        job.workspace.make_pending(job.op_id)
        if job.request.destination.kind == "directory":
            if job.request.on_commit.prefilled is not None:
                extra_files.enter(job.request.on_commit.prefilled, job.staged)
            else:
                job.staged.mkdir()
            for name in job.request.content.folders:
                (job.staged / name).mkdir(exist_ok=True)  # a hook may have made it
            sync_directory(str(job.staged.parent))

    def _await_folder(self) -> None:
        if not all(await_visible(folder, min(_VISIBLE_S, self._left_s())) for folder in self._job.folders):
            path = str(self._job.workspace.path)
            raise DirectoryNotSharedError(path=path, rank=self._rank, ranks=(self._rank,))

    def _write(self) -> dict[str, Any]:
        job = self._job
        begun, directories = time.monotonic(), [str(folder) for folder in job.folders]
        results = self._copy_files()
        if job.stream is not None:
            results += self._write_parts(job.stream, directories)
        elif job.streamed:
            most = self._config.max_host_bytes
            results += self._writer.stream(job.tasks, job.request.content.files, directories, most, self._look_around)
            job.handle.mark_snapshot_taken()
        elif job.buffer is not None:
            results += self._run_writer(buffer=job.buffer, files=job.tasks, directories=directories)
            self._await_copy(job)
        else:
            raise SaveError(name=job.name, cause="there is no snapshot", rank=self._rank, phase="write")
        self.written_at = time.monotonic()
        self.write_s = self.written_at - begun
        self.written_bytes = sum(result.size_bytes for result in results)
        return {"files": [self._entry(result) for result in results], "items": dict(job.request.facts.items)}

    def _run_writer(self, **what: Any) -> list[WrittenFile]:
        """Have the writer do what the other fields of a ``WriteJob`` say."""
        return self._writer.write(WriteJob(name=self._job.name, rank=self._rank, **what), self._look_around)

    def _write_parts(self, parts: FileStream, directories: list[str]) -> list[WrittenFile]:
        results: dict[str, WrittenFile] = {}  # the second of two with the same name counts
        for buffer, tasks in parts.take(self._look_around):
            results.update({result.path: result for result in self._run_writer(buffer=buffer, files=tasks)})
        for directory in directories:
            sync_directory(directory)
        return list(results.values())

    def _copy_files(self) -> list[WrittenFile]:
        """Copy what lies in files. The caller goes on once they are read."""
        job = self._job
        if not job.request.content.copies:
            return []
        copies = [dataclasses.replace(copy, path=str(job.folder / copy.path)) for copy in job.request.content.copies]
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
        path = Path(result.path).relative_to(self._job.folder).as_posix()
        return {"path": path, "size_bytes": result.size_bytes, "xxh3_128": result.xxh3_128, "rank": self._rank}

    def _look_around(self) -> None:
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
        job, on_commit = self._job, self._job.request.on_commit
        self._two_phase.refuse_left()
        entries = tuple(FileEntry(**row) for rank in sorted(reports) for row in reports[rank]["files"])
        self._check_staged(entries)
        if job.stream is not None and not entries:
            raise SaveError(name=self._job.name, cause="no rank handed over a file", rank=0, phase="commit")
        if job.request.destination.kind == "file":
            return self._commit_file(entries)
        if on_commit.prefilled is not None:
            entries = (*entries, *extra_files.adopt(job.staged, {entry.path for entry in entries}))
        if on_commit.carry is not None:
            extra_files.carry(job.path, job.staged, on_commit.carry)
        manifest = dataclasses.replace(job.manifest, files=entries, items=_merge_items(reports))
        commit.write_durably(job.staged / MANIFEST_NAME, manifest.to_bytes())
        self._publish()
        self._link()
        self._point()
        return CheckpointInfo.of(manifest, job.path, sum(entry.size_bytes for entry in entries))

    def _commit_file(self, entries: tuple[FileEntry, ...]) -> CheckpointInfo:
        """Without a file written, only names are given to, or taken from, what is there already."""
        if entries:
            self._publish()
        self._link()
        return CheckpointInfo.of(self._job.manifest, self._job.path, sum(entry.size_bytes for entry in entries))

    def _publish(self) -> None:
        """Give it its name, if the directory is still this job's."""
        final = self._job.path
        commit.make_directory(final.parent)
        aside = self._aside(final)
        self._job.workspace.confirm()
        commit.publish(self._job.staged, final, aside)

    def _link(self) -> None:
        job = self._job
        for number, link in enumerate(job.request.on_commit.links):
            staged = job.staged.parent / f"link{number}-{link.path.name}"
            aside = self._aside(link.path)
            job.workspace.confirm()
            commit.publish_link(job.path, staged, link, aside)

    def _point(self) -> None:
        for pointer in self._job.request.on_commit.pointers:
            staged = self._job.staged.parent / f"pointer-{pointer.path.name}"
            try:
                commit.write_durably(staged, pointer.data)
                if pointer.mode is not None:
                    staged.chmod(pointer.mode)
                commit.publish_file(staged, pointer.path)
            except OSError as error:
                raise commit.HalfCommittedError(error.errno, f"{pointer.path}: {error.strerror}") from error

    def _aside(self, path: Path) -> Callable[[], Path]:
        job = self._job
        if job.request.destination.kind != "directory" and not os.path.lexists(path):
            return lambda: job.workspace.aside(job.op_id, path)  # a file is replaced in one step
        made = job.workspace.aside(job.op_id, path)

        def durable() -> Path:
            if made.parent.parent == job.workspace.trash and os.path.lexists(path):
                for folder in (job.workspace.trash, job.workspace.hidden):  # both are made when they are needed
                    sync_directory(str(folder))
            return made

        return durable

    def _check_staged(self, entries: tuple[FileEntry, ...]) -> None:
        # The files on disk must be those that were reported: another rank's file may have vanished, or lie on another disk.
        # Caches of network file systems lag behind, so rank 0 waits for a file that it does not see yet, or with an old size.
        patience = Patience(self._config.timeouts)
        for entry in entries:
            size = patience.until_sized(self._job.folder / entry.path, entry.size_bytes, self._look_around)
            if size != entry.size_bytes:
                cause = f"{entry.path}, written by rank {entry.rank} with {entry.size_bytes} bytes, "
                cause += "is not there" if size < 0 else f"has {size} bytes here"
                self._job.workspace.confirm()  # a job that took over has swept it away
                raise SaveError(name=self._job.name, cause=cause, rank=entry.rank, phase="commit")

    def _taken_over(self, error: BaseException) -> DirectoryInUseError | None:
        """The error that names the job that took over, if that is why a file was missing or could not be moved."""
        if isinstance(error, OSError) and not isinstance(error, DirectoryInUseError | commit.HalfCommittedError):
            try:
                self._job.workspace.confirm()
            except DirectoryInUseError as taken:
                return taken
            except OSError:
                pass
        return None

    def _left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _named(self, error: BaseException, phase: str) -> SafeCheckpointError:
        if isinstance(error, SafeCheckpointError):
            return error
        name = self._job.name
        if isinstance(error, commit.HalfCommittedError):
            cause = f"it has its name, but the disk did not confirm that: {error}"
            return CommitOutcomeUnknown(name=name, cause=cause, rank=self._rank, phase="commit", code=error.errno or 0)
        if isinstance(error, OSError):
            folder, needed = self._job.workspace.path, self._job.known_bytes
            path = str(error.filename or folder)
            facts = {"path": path, "message": f"Saving {name}: {error.strerror}.", "rank": self._rank, "phase": phase}
            full = commit.out_of_space(error, folder, needed_bytes=needed, **facts)
            if full is not None:
                return full
            return DirectoryError.of(error, path=path, rank=self._rank, phase=f"saving {name}: {phase}")
        return SaveError(name=name, cause=f"{type(error).__name__}: {error}", rank=self._rank, phase=phase)


def _merge_items(reports: Mapping[int, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for rank in sorted(reports):
        for name, item in reports[rank]["items"].items():
            entry = merged.setdefault(name, {"per_rank": item["per_rank"], "form": item["form"], "files": {}})
            entry["files"][str(rank)] = item["file"]
    return merged
