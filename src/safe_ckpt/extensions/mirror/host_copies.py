"""Copies of one host, made when rank 0 asks, where each host has a directory of its own: its files to the mirror, and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import FileEntry
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.home.places import with_deadline
from safe_ckpt.core.saving.extension import Run
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import place_of
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.writer.sink import WriteJob
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.extensions.mirror.fetching import fetch_verified, make_durable

NICENESS = 19


class CopiesOfHost:
    """One host's copies. Its leader does them, on the thread that answers rank 0; on other ranks nobody asks.

    Args:
        run: the job.
        home: the directory.
    """

    def __init__(self, run: Run, home: Home) -> None:
        self._run = run
        self._home = home
        self._writer: WriterSupervisor | None = None

    def send(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Copy files of a checkpoint to where the mirror makes its copy. Returns what was read of each.

        Raises:
            OSError: one could not be read, or the store gave no answer.
        """
        path, folder = Path(args["path"]), args["folder"]
        names = args["files"].get(str(self._run.rank), [])
        copies = [
            FileCopy(source=str(path / name), path=f"{folder}/{name}", stamp=Stamp.of(os.stat(path / name)))
            for name in names
        ]
        if not copies:
            return []
        job = WriteJob(name=path.name, rank=self._run.rank, folder=folder, copies=copies, directories=args["folders"])
        written = self._of_writer().write(job, lambda: None)
        rank, start = self._run.rank, f"{folder}/"
        return [
            {"path": one.path.removeprefix(start), "size_bytes": one.size_bytes, "xxh3_128": one.xxh3_128, "rank": rank}
            for one in written
        ]

    def fetch(self, args: Mapping[str, Any]) -> None:
        """Fetch files of a copy to what is under way here, but for those that are there by now.

        Raises:
            CorruptCheckpointError: bytes are not those that were written.
            OSError: the store gave no answer, or the disk refuses.
        """
        config, folder = self._run.config, Path(args["folder"])
        entries = [FileEntry(**row) for row in args["files"][str(self._run.rank)]]
        source = place_of(args["source"], config.storage, config.timeouts.lengthy_s)
        left = [entry for entry in entries if not os.path.lexists(folder / entry.path)]
        limit_s = config.timeouts.lengthy_s
        fetch_verified(with_deadline(source, limit_s), left, folder, limit_s=limit_s)
        make_durable(folder)

    def progress(self) -> int:
        """A number that changes as long as bytes move."""
        return self._writer.progress() if self._writer is not None else 0

    def close(self) -> None:
        """The directories were given back: nobody asks any more."""
        if self._writer is not None:
            self._writer.close()

    def _of_writer(self) -> WriterSupervisor:
        if self._writer is None:
            config = self._run.config
            nice = dataclasses.replace(config.writer, niceness=NICENESS, inline_bytes=0)
            options = StorageOptions.of(config.storage, config.timeouts.lengthy_s)
            self._writer = WriterSupervisor(nice, config.timeouts, lambda *_: None, options)
        return self._writer
