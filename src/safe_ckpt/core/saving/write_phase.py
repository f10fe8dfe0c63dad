"""What one rank writes in one save, and what it reports. On the background thread."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.formats.file_plan import ITSELF, WriteTask
from safe_ckpt.core.saving.extension import Extensions
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.copier import FileCopy, first_changed
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.writer.existing import Existing
from safe_ckpt.core.writer.sink import WriteJob
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import SaveError, SourceChangedError


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
