"""The manager that torchtitan's Trainer builds from its Config: torchtitan's own decisions, and our saving and loading."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from safe_ckpt.adapters import OpenSave
from safe_ckpt.adapters.extras import agree_on_settings, policy_of, refused_retention
from safe_ckpt.config import CheckpointConfig, ConfigLike, settings_of
from safe_ckpt.errors import ConfigError
from safe_ckpt.layouts.table import TORCHTITAN
from safe_ckpt.torchtitan.saver import ManagerSaver


class SafeCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager`` whose checkpoints are whole or absent, within deadlines.

    What is saved when, under which name, and what a start loads, is decided by torchtitan's own code and options. ``step-N``
    appears in one step, when all of it is durable, with checksums. torchtitan's own manager reads it, and this one reads
    those of torchtitan's own. A start takes the newest commit that all ranks have verified. ``keep_latest_k`` counts what
    this manager has committed, and nothing is deleted before its successor is there.

    Every rank makes one, and calls every method, on the thread that trains. ``close`` frees the folder.

    Attributes:
        metrics: numbers that the next saves are to have, such as the loss: torchtitan's Trainer gives none.

    Args:
        config: see ``Config``.
        stock: see ``CheckpointManager``.
        base_folder: the same.

    Raises:
        ConfigError: a setting is not allowed; on every rank.
        SafeCheckpointError: the ranks did not meet.

    Example:
        ```python
        config = llama3_debugmodel()
        settings = CheckpointConfig(timeouts=Timeouts(barrier_s=90))
        config.checkpoint = SafeCheckpointManager.Config(enable=True, interval=500, keep_latest_k=3, settings=settings)
        ```
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of ``CheckpointManager``, and ours.

        ``async_mode``: ``"async"`` and ``"async_with_pinned_mem"`` do the same here: the state is copied before ``save``
        returns, and a process of its own writes it.
        """

        settings: Annotated[ConfigLike | None, tyro.conf.Suppress] = None
        """Settings of safe_ckpt, equal on all ranks; None takes what the environment says (``SAFE_CKPT_CONFIG``)."""

        def to_dict(self) -> dict[str, Any]:
            """For logs: the settings as they differ from the defaults, without what is secret."""
            plain: dict[str, Any] = CheckpointManager.Config.to_dict(replace(self, settings=None))
            settings = settings_of(self.settings, "settings")
            return plain | {"settings": settings.deviations() if settings is not None else None}

    def __init__(self, config: Config, *, base_folder: str = "", **stock: Any) -> None:
        # With these two torchtitan's own makes a process group and a thread, which nobody would use.
        without: dict[str, Any] = {"async_mode": "disabled", "keep_latest_k": 0}
        super().__init__(replace(config, **without), base_folder=base_folder, **stock)
        self.metrics: Mapping[str, Any] = {}
        self._of_this_save: Mapping[str, Any] = {}
        if not self.enable:
            return
        self.async_mode = AsyncMode.DISABLED if config.async_mode == "disabled" else AsyncMode.ASYNC
        settings, _ = agree_on_settings(config.settings, functools.partial(_check, config, self.folder), key="settings")
        self._folder = Path(os.path.abspath(self.folder))
        self._saver = ManagerSaver(settings, self.states[MODEL].model, config.keep_latest_k)
        try:
            if not self.load_only:
                self._saver.home(self._folder)
                self._saver.prepare([*self.states[MODEL].model, *getattr(self.states["optimizer"], "optimizers", ())])
        except BaseException:
            self._saver.close(quiet=True)
            raise

    def save(self, curr_step: int, last_step: bool = False, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """See ``CheckpointManager.save``: whether to save is torchtitan's decision.

        Args:
            curr_step: the step.
            last_step: see there.
            metrics: numbers for ``safe-ckpt list``; None for the attribute ``metrics``.

        Raises:
            SafeCheckpointError: it failed, or an earlier one did; the same on every rank.
        """
        self._of_this_save = self.metrics if metrics is None else metrics
        return bool(super().save(curr_step, last_step))

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | None:
        """In the place of torchtitan's own, which calls ``torch.distributed.checkpoint``.

        Returns:
            What ``save_future`` becomes; None when it is committed already.

        Raises:
            SafeCheckpointError: it failed, or an earlier one did; the same on every rank.
        """
        path = self._folder / Path(checkpoint_id).name
        step = TORCHTITAN.number_of(path.name) or 0
        if to_hf:
            stock = functools.partial(super().dcp_save, state_dict, async_mode=AsyncMode.DISABLED, to_hf=True)
            handle = self._saver.save_others(path, lambda folder: stock(checkpoint_id=str(folder)), step)
        else:
            handle = self._saver.save_states(path, state_dict, step, self._of_this_save)
        if async_mode == AsyncMode.DISABLED:
            self._saver.wait()
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None if async_mode == AsyncMode.DISABLED else PendingOutcome(self._saver, handle)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """In the place of torchtitan's own: what is loaded is verified first. What is elsewhere than in files is not.

        Raises:
            CorruptCheckpointError: it is damaged; on every rank.
            RestoreError: it has not what is asked for; on every rank.
            SafeCheckpointError: it could not be read; on every rank.
        """
        path = Path(os.path.abspath(checkpoint_id))
        if filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        elif from_hf:
            self._saver.check(path)
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            self._saver.load(path, state_dict)
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        self._saver.wait()  # what is in flight may be what is asked for
        with self._saver.engine.together("CheckpointManager.load"):
            return bool(super()._load(step))

    def _find_load_step(self, folder: str = "") -> int:
        stock = super()._find_load_step
        if folder:
            return int(stock(folder))
        if self.load_only:  # without holding the folder: what torchtitan's own chooses, on rank 0
            match = {"folder": self._folder}
            return int(self._saver.engine.agree("latest", must_match=match, decide=lambda _: stock(self.folder)))
        return self._saver.newest_step(self._folder)

    def _should_purge(self) -> bool:
        return False  # retention follows each commit

    def _close(self) -> None:
        if hasattr(self, "_saver"):  # what comes before may raise
            self._saver.close(quiet=sys.exc_info()[0] is not None)

    def __del__(self) -> None:
        """Nothing: an engine that is not referenced any more ends by itself, and waits for no other rank."""


class PendingOutcome(Future[None]):
    """The commit of one save, for which torchtitan waits before the next one.

    Args:
        saver: whose.
        handle: of the save.
    """

    def __init__(self, saver: ManagerSaver, handle: OpenSave) -> None:
        super().__init__()
        self._saver = saver
        self._handle = handle

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._handle.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the commit.

        Args:
            timeout: seconds; None for as long as a save may take.

        Raises:
            SafeCheckpointError: it failed, with the same error on every rank.
        """
        self._handle.wait_until_over(timeout)
        self._saver.wait()


def _check(config: SafeCheckpointManager.Config, folder: str, settings: CheckpointConfig) -> None:
    if filesystem.is_remote(folder):
        message = (
            f"{folder!r} is no folder of a file system. Give a local one, and the address as mirror.url in settings"
        )
        raise ConfigError(key="checkpoint.folder", message=message)
    if settings.save_on_signals:
        message = "is not supported: torchtitan's loop does not ask its manager whether to stop. Leave it empty"
        raise ConfigError(key="save_on_signals", message=message)
    if policy_of(settings.retention) is not None:
        own = "torchtitan has its own: use checkpoint.keep_latest_k"
        raise refused_retention(
            key="checkpoint.settings.retention", instead=own, from_environment=config.settings is None
        )
