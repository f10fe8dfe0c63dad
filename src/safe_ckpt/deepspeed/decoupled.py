"""``SafeCheckpointEngine``: a checkpoint engine for DeepSpeed in the place of its decoupled one."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core import layout
from safe_ckpt.core.arena import Arena
from safe_ckpt.core.engine import Engine
from safe_ckpt.core.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.operation import Pointer, Request, SaveHandle
from safe_ckpt.core.parts import Parts
from safe_ckpt.core.verify import verify_entry
from safe_ckpt.deepspeed.places import ADAPTER, LATEST, Places, checked_tag, step_of
from safe_ckpt.errors import ConfigError, SafeCheckpointError, SaveError

logger = logging.getLogger(__name__)


class SafeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves in the background and commits as a whole.

    Put it where DeepSpeed has its own, on every rank::

        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        engine.checkpoint_engine = SafeCheckpointEngine()

    DeepSpeed then calls ``create``, ``save`` for every file, and ``commit`` before the next optimizer step. Each ``save``
    copies what it is given, so that it may change at once; the tag and ``latest`` appear in ``commit``, on all ranks or on
    none. A writer process that dies or stalls is replaced and the same copy is written again. With optimizer states on NVMe
    use ``install`` instead: DeepSpeed copies those past its checkpoint engine.

    Called on the thread that trains.

    Args:
        config: settings, equal on all ranks; None reads the file that ``SAFE_CKPT_CONFIG`` names, or takes the defaults.

    Raises:
        DesyncError: the ranks were given different settings.
        RendezvousTimeout: some ranks did not make one.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        super().__init__()
        self.name = "SafeCheckpointEngine"
        self._core = Engine(CheckpointConfig.from_environment() if config is None else config)
        self._places = Places(self._core, self._core.config.retention)
        self._pool: list[Arena] = []
        self._open: _Open | None = None
        # Before the core's own (priority 100), which would wait for files that nobody hands over any more.
        weak = weakref.ref(self)
        self._at_exit = multiprocessing.util.Finalize(None, _finish_at_exit, (weak, os.getpid()), exitpriority=110)

    def create(self, info: CheckpointCommitInfo) -> None:
        """A save begins. One before it that was not committed yet is committed first. Every rank calls this.

        Raises:
            ConfigError: the tag is no name of a directory.
            DesyncError: the ranks differ in directory or tag.
            SafeCheckpointError: the error of an earlier save that nobody was told of yet; this one was not started.
        """
        if self._open is not None:
            self._open.parts.seal()
            self._open = None
        path = Path(os.path.abspath(info.save_dir)) / checked_tag(info.tag)
        place = self._places.hold(path.parent)
        parts = Parts(self._pool)
        latest = [Pointer(path=path.parent / LATEST, data=path.name.encode())] if info.save_latest else []
        handle = self._core.save(
            Request(
                root=place.root,
                path=path,
                kind="directory",
                step=step_of(path.name),
                parts=parts,
                notes={"adapter": ADAPTER, "latest": bool(info.save_latest)},
                view={"save_latest": str(info.save_latest)},
                retain=lambda new: self._places.retain(place, new),
                carry=lambda name: not name.endswith("_states.pt"),
                pointers=latest,
                patient=True,
            )
        )
        self._open = _Open(info, path, parts, handle)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As ``os.makedirs``, but for the tag: that appears when it is complete."""
        made = Path(os.path.abspath(path))
        if self._open is None or (made != self._open.path and self._open.path not in made.parents):
            os.makedirs(made, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Copy one file's content; it may change when this returns.

        Raises:
            ConfigError: no save was begun, or the file lies outside of its tag.
            StateError: something in it cannot be saved; that save will not be committed.
            NotEnoughSpaceError: the machine has not that much memory left; neither will it.
        """
        target = Path(os.path.abspath(path))
        if self._open is None or target.parent != self._open.path:
            within = f"expected a file in {self._open.path}" if self._open is not None else "create() was not called"
            raise ConfigError(key=f"save: {path}", message=within)
        try:
            self._open.parts.add(layout.torch_image(target.name, state_dict, strict=False, key=target.name))
        except BaseException as error:
            cause = f"{target.name}: {type(error).__name__}: {error}"
            self._give_up(SaveError(name=self._open.path.name, cause=cause, rank=self._core.rank, phase="snapshot"))
            raise

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file, verified where this package wrote it.

        Raises:
            CorruptCheckpointError: its bytes are not those that were written.
        """
        file = Path(path)
        if (file.parent / MANIFEST_NAME).exists():
            entries = [entry for entry in read_manifest(file.parent).files if entry.path == file.name]
            for entry in entries:
                verify_entry(file.parent, entry, cached=True)
        return torch.load(file, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Wait until every rank's files are durable and the tag has its name. Every rank calls this.

        Returns:
            True.

        Raises:
            ConfigError: ``info`` is not that of the save that was begun.
            SafeCheckpointError: it failed, with the same error on every rank.
        """
        if self._open is None or info != self._open.info:
            begun = self._open.info if self._open is not None else None
            raise ConfigError(key="commit", message=f"expected {begun}, which was begun, got {info}")
        under_way, self._open = self._open, None
        under_way.parts.seal()
        under_way.handle.result()
        return True

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What was begun and is not committed yet."""
        return self._open.info if self._open is not None else None

    def is_decoupled(self) -> bool:
        """True: DeepSpeed commits before the next step, not at the end of ``save_checkpoint``."""
        return True

    def cleanup(self) -> None:
        """Commit what was begun and end the writer process. Again: nothing happens. Bounded by ``Timeouts``.

        Raises:
            SafeCheckpointError: a save failed and nobody was told yet.
        """
        self._at_exit.cancel()
        if self._open is not None:
            self._open.parts.seal()
            self._open = None
        try:
            self._core.close()
        finally:
            for arena in self._pool:
                arena.close()
            self._pool.clear()

    def _give_up(self, error: SafeCheckpointError) -> None:
        if self._open is not None:
            self._open.parts.fail(error)


class _Open:
    """A save that was begun and is not committed."""

    def __init__(self, info: CheckpointCommitInfo, path: Path, parts: Parts, handle: SaveHandle) -> None:
        self.info = info
        self.path = path
        self.parts = parts
        self.handle = handle


def _finish_at_exit(weak: weakref.ref[SafeCheckpointEngine], pid: int) -> None:
    engine = weak()
    if engine is None or engine._open is None or os.getpid() != pid:
        return
    if getattr(sys, "last_value", None) is not None:
        # The exception may have come out of save_checkpoint: then not all files were handed over.
        cause = "the program ended with an exception before it was committed"
        engine._give_up(SaveError(name=engine._open.path.name, cause=cause, rank=engine._core.rank, phase="snapshot"))
        return
    try:
        engine.cleanup()
    except SafeCheckpointError as error:
        logger.error("%s", error)  # noqa: TRY400 - there is nobody left to raise it to
