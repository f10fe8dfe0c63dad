"""``SafeCheckpointEngine``: a checkpoint engine for DeepSpeed in the place of its decoupled one."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import logging
import multiprocessing.util
import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from safe_ckpt.adapters import Engine, OnCommit, SaveHandle, config_of_all, torch_file
from safe_ckpt.adapters.directories import manifest_of, verify_entry
from safe_ckpt.adapters.extras import FileByFile, FileStream, SharedBuffer
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.deepspeed.arguments import check_settings
from safe_ckpt.deepspeed.directories import ADAPTER, CheckpointDirectory, step_of
from safe_ckpt.deepspeed.save import agree_place, latest_pointer
from safe_ckpt.errors import ClosedError, ConfigError, NotEnoughSpaceError, SafeCheckpointError, SaveError, StateError
from safe_ckpt.events import Hook

logger = logging.getLogger(__name__)


class SafeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves in the background and commits as a whole.

    Put it where DeepSpeed has its own, on every rank::

        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        engine.checkpoint_engine = SafeCheckpointEngine()

    DeepSpeed then calls ``create``, ``save`` for every file, and ``commit`` before the next optimizer step. Each ``save``
    copies what it is given, so that it may change at once; the tag and ``latest`` are there when ``commit`` returns, on all
    ranks or on none. A writer process that dies or stalls is replaced and the same copy is written again. With optimizer
    states on NVMe use ``install`` instead: DeepSpeed copies those past its checkpoint engine.

    A save is complete when DeepSpeed's ``save_checkpoint`` has handed over its last file. One that an exception interrupted
    before that is never committed, whoever asks for it. Where DeepSpeed is not the caller, ``commit`` says that it is complete:
    without it the save is dropped with an error, which the next ``create`` or ``cleanup`` raises, or the end of the program
    logs.

    Called on the thread that trains.

    Args:
        config: settings, equal on all ranks; None reads the file that ``SAFE_CKPT_CONFIG`` names, or takes the defaults.
        hooks: called with what happens; see ``safe_ckpt.events``.

    Raises:
        ConfigError: a setting means nothing here, or this release of DeepSpeed does not show when a save is complete.
        DesyncError: the ranks were given different settings.
        RendezvousTimeout: some ranks did not make one.
    """

    def __init__(self, config: CheckpointConfig | None = None, *, hooks: Iterable[Hook] = ()) -> None:
        super().__init__()
        self.name = "SafeCheckpointEngine"
        _refuse_without_sign(DeepSpeedEngine.save_checkpoint)
        settings = config_of_all(config)
        check_settings(settings)
        if settings.max_host_bytes is not None:
            message = "each file must be copied at once here, whatever its size: leave it out, or use install"
            raise ConfigError(key="max_host_bytes", message=message)
        self._core = Engine(settings, hooks=hooks, owner="a SafeCheckpointEngine; its cleanup() frees it")
        weak = weakref.ref(self)
        self._directories = CheckpointDirectory(
            self._core, self._core.config.retention, lambda wanted: _settle(weak, wanted)
        )
        self._pool: list[SharedBuffer] = []
        self._closed = False
        self._open: _Open | None = None
        self._concluded: SaveHandle | None = None
        # Before the engine's own (priority 100), which would wait for files that are never handed over.
        self._at_exit = multiprocessing.util.Finalize(None, _finish_at_exit, (weak, os.getpid()), exitpriority=110)

    def create(self, info: CheckpointCommitInfo) -> None:
        """A save begins. One before it that is complete and not committed yet is committed first. Every rank calls this.

        Raises:
            ClosedError: ``cleanup`` was called.
            ConfigError: the tag is no name of a directory.
            DirectoryError: something that must not be replaced stands where the tag goes.
            DesyncError: the ranks differ in directory or tag.
            SafeCheckpointError: the error of an earlier save that was not raised yet; this one was not started.
        """
        if self._closed:
            raise ClosedError(message="create: this checkpoint engine was closed; make a new one")
        self._conclude("another save began before its last file was handed over")
        by_deepspeed = _is_deepspeeds()
        with self._core.together():
            top, tag = agree_place(self._core, "create", info.save_dir, info.tag, {})
            path, directory = top / tag, self._directories.hold(top, tag)
            stream = FileStream(self._pool)
            handle = directory.save(
                self._core,
                path,
                FileByFile(stream=stream),
                step=step_of(path.name),
                notes={"adapter": ADAPTER, "latest": bool(info.save_latest), "tag": tag},
                must_match={"save_latest": str(info.save_latest)},
                on_commit=OnCommit(
                    carry=lambda name: not name.endswith("_states.pt"),  # swap files are put there by DeepSpeed itself
                    pointers=latest_pointer(top, tag, wanted=info.save_latest),
                    retention=self._directories.retention,
                ),
                patient=True,
            )
            self._open = _Open(info=info, path=path, stream=stream, handle=handle, by_deepspeed=by_deepspeed)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As ``os.makedirs``, but for the tag: that appears when it is complete."""
        made = Path(os.path.abspath(path))
        if self._open is None or (made != self._open.path and self._open.path not in made.parents):
            os.makedirs(made, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Copy one file's content; it may change when this returns.

        Raises:
            ConfigError: no save was begun, or the file lies outside of its tag, as that of ``save_16bit_model`` does: for that
                one put DeepSpeed's own engine back.
            StateError: something in it cannot be saved; that save will not be committed.
            NotEnoughSpaceError: the machine has not that much memory left; neither will it.
        """
        target = Path(os.path.abspath(path))
        if self._open is None or self._open.complete:
            raise ConfigError(key=f"save: {path}", message="create() was not called, or the save is complete already")
        try:
            if target.parent != self._open.path:
                raise ConfigError(key=f"save: {path}", message=f"expected a file in {self._open.path}")
            self._open.stream.add(torch_file(target.name, state_dict))
        except BaseException as error:
            if isinstance(error, StateError | NotEnoughSpaceError):
                error.rank = self._core.rank
            self._give_up(f"{target.name}: {type(error).__name__}: {error}")
            self._open.handle.mark_reported()  # it is raised here and now
            raise

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file, verified where this package wrote it.

        Raises:
            CorruptCheckpointError: its bytes are not those that were written.
        """
        file = Path(path)
        manifest = manifest_of(file.parent)
        for entry in manifest.files if manifest is not None else ():
            if entry.path == file.name:
                verify_entry(file.parent, entry, cached=True)
        return torch.load(file, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Wait until every rank's files are durable and the tag has its name. Every rank calls this.

        Returns:
            True.

        Raises:
            ConfigError: ``info`` is not that of the save that was begun.
            SaveError: DeepSpeed's ``save_checkpoint`` was interrupted before its last file.
            SafeCheckpointError: it failed, with the same error on every rank.
        """
        if self._open is None or info not in (self._open.info, self.get_commit_info()):
            begun = self._open.info if self._open is not None else None
            raise ConfigError(key="commit", message=f"expected {begun}, which was begun, got {info}")
        under_way = self._open
        if not under_way.by_deepspeed:
            under_way.complete = True
            under_way.stream.seal()
        self._conclude("save_checkpoint was interrupted before its last file was handed over")
        under_way.handle.result()
        return True

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What was begun and is not committed yet. It asks for no ``latest``: DeepSpeed would write it once more, in place."""
        return dataclasses.replace(self._open.info, save_latest=False) if self._open is not None else None

    def is_decoupled(self) -> bool:
        """True: DeepSpeed commits before the next step, not at the end of ``save_checkpoint``."""
        # Only save_checkpoint asks right after the last file, and this is the only sign: the step after an interrupted save
        # asks, too, and the files of a rank are not known before. See ``_refuse_without_sign``.
        if self._open is not None and sys._getframe(1).f_code.co_name == "save_checkpoint":
            self._open.complete = True
            self._open.stream.seal()
        return True

    def cleanup(self) -> None:
        """Commit what is complete and end the writer process. Again: nothing happens. Bounded by ``Timeouts``.

        Raises:
            SafeCheckpointError: an earlier save failed. It is logged instead while another exception is on its way.
        """
        self._at_exit.cancel()
        self._conclude("it was never committed, and not all of its files may have been handed over")
        try:
            self._core.close(quiet=sys.exc_info()[0] is not None)
        finally:
            self._closed = True
            self._directories.close()
            for buffer in self._pool:
                buffer.close()
            self._pool.clear()

    def _conclude(self, why_not: str) -> None:
        """An open save continues if it is complete, and fails otherwise."""
        if self._open is not None and not self._open.complete:
            if not self._open.by_deepspeed:
                why_not += ", as far as is known: commit() was not called, which says that it is complete"
            self._give_up(why_not)
        if self._open is not None:
            self._concluded = self._open.handle
        self._open = None

    def _give_up(self, cause: str) -> None:
        if self._open is not None:
            name, rank = self._open.path.name, self._core.rank
            self._open.stream.fail(SaveError(name=name, cause=cause, rank=rank, phase="snapshot"))


def _refuse_without_sign(save_checkpoint: Any) -> None:
    """Refuse a DeepSpeed whose ``save_checkpoint`` does not ask ``is_decoupled`` once it has handed over the last file.

    Raises:
        ConfigError: it does not, or the order is unknown.
    """
    code = getattr(inspect.unwrap(save_checkpoint), "__code__", None)
    names = [step.argval for step in dis.get_instructions(code)] if code is not None else []
    last = {name: number for number, name in enumerate(names) if isinstance(name, str)}
    order = [last.get(name, -1) for name in ("create", "_save_checkpoint", "_save_zero_checkpoint", "is_decoupled")]
    if -1 in order or order != sorted(order) or names.count("is_decoupled") != 1:
        message = f"DeepSpeed {deepspeed.__version__} does not ask is_decoupled() after the last file: use install"
        raise ConfigError(key="SafeCheckpointEngine", message=message)


def _is_deepspeeds() -> bool:
    """Whether the method that asks was called by DeepSpeed's ``save_checkpoint``."""
    frame = sys._getframe(2)
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_name == "save_checkpoint" and module.split(".", maxsplit=1)[0] == "deepspeed"


@dataclasses.dataclass(kw_only=True)
class _Open:
    """A save that was begun and is not committed.

    Attributes:
        complete: whether its last file was handed over.
        by_deepspeed: whether DeepSpeed's ``save_checkpoint`` began it, and so says when it is complete.
    """

    info: CheckpointCommitInfo
    path: Path
    stream: FileStream
    handle: SaveHandle
    by_deepspeed: bool
    complete: bool = False


def _settle(weak: weakref.ref[SafeCheckpointEngine], wanted: Path | None) -> None:
    """Another engine of this process waits. The remaining files of an open save can come from this thread only."""
    engine = weak()
    if engine is None:
        return
    if engine._open is not None and not engine._open.complete:
        # An exception interrupted DeepSpeed's save_checkpoint, maybe on this rank alone.
        if wanted is None and not engine._open.by_deepspeed:
            if engine._concluded is not None:
                engine._concluded.settle()  # saves are written in their order
            return
        engine._give_up("its last file had not been handed over when another engine of this process saved or loaded")
    engine._core.settle()


def _finish_at_exit(weak: weakref.ref[SafeCheckpointEngine], pid: int) -> None:
    engine = weak()
    if engine is None or engine._open is None or os.getpid() != pid:
        return
    try:
        engine.cleanup()
    except SafeCheckpointError as error:
        logger.error("%s", error)  # noqa: TRY400 - there is nobody left to raise it to
