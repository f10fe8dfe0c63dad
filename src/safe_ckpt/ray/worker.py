"""The worker's side: a ``Checkpointer`` in the folder of the run, whose commits Ray is told of."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow.fs
import ray.train
import torch.distributed
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.execution.context import get_train_context

from safe_ckpt.adapters import CheckpointInfo
from safe_ckpt.checkpointer import Checkpointer
from safe_ckpt.config import CheckpointConfig, ConfigLike
from safe_ckpt.errors import ConfigError
from safe_ckpt.ray.run_config import SafeRunConfig

if TYPE_CHECKING:
    from safe_ckpt.adapters.extras import SaveHandle
    from safe_ckpt.events import Hook

FOLDER = "checkpoints"


class RayCheckpointer(Checkpointer):
    """A ``Checkpointer`` for the function that a ``TorchTrainer`` runs: in the folder of the run, and Ray is told of commits.

    Each commit is reported once (``ray.train.report``), by all workers, with its metrics and the directory itself: nothing is
    uploaded again. As a commit comes in the background, it is reported within the next ``save``, ``resume``, ``wait`` or
    ``close``. ``resume`` takes the newest commit, also if a kill came between that and the report, and reports it then.

    Every method is called on every worker, in the same order. Use it as a context manager.

    Args:
        config: settings, equal on all workers; see ``Checkpointer``.
        hooks: see ``Checkpointer``.

    Raises:
        ConfigError: this is no worker of a ``TorchTrainer``, its run has no ``SafeRunConfig``, the storage is in an object
            store, or ``retention.keep_last`` is so low that what Ray calls the newest would be deleted. On every worker.
        SafeCheckpointError: as of ``Checkpointer``.

    Example:
        ```python
        def train(config):
            with RayCheckpointer(CheckpointConfig(retention=Retention(keep_last=3))) as ckpt:
                state = {"model": model, "optimizer": optimizer, "step": 0}
                ckpt.resume(state)
                for step in range(state["step"] + 1, 101):
                    loss = train_one_step(model, optimizer)
                    if step % 50 == 0 or ckpt.save_requested:
                        ckpt.save(step, {**state, "step": step}, metrics={"loss": loss})
        ```
    """

    def __init__(self, config: ConfigLike | None = None, *, hooks: Iterable[Hook] = ()) -> None:
        self._storage = _storage()
        self._awaited: list[SaveHandle] = []
        self._going: set[str] = set()
        super().__init__(self._path(), config, hooks=hooks)
        try:
            _check_retention(self.config)
        except ConfigError:
            self._engine.close(quiet=True)
            raise

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, Any] | None = None) -> SaveHandle:
        """Save as ``Checkpointer.save`` does, and report to Ray what was committed before.

        Args:
            step: the training step.
            state: see ``Checkpointer.save``.
            metrics: numbers for ``Retention(keep_best=...)``, and for the report.

        Raises:
            SafeCheckpointError: as of ``Checkpointer.save``.
        """
        if self.config.on_busy == "wait":  # the save would wait for the same: Ray knows of that one before this begins
            for handle in self._awaited[: len(self._awaited) - self.config.max_in_flight + 1]:
                handle.wait_until_over()
        self._report()
        handle = super().save(step, state, metrics=metrics)
        self._awaited.append(handle)
        return handle

    def resume(self, state: Mapping[str, Any], *, step: int | None = None) -> CheckpointInfo | None:
        """Resume as ``Checkpointer.resume`` does. If Ray calls another checkpoint the newest, it is told of this one.

        Args:
            state: see ``Checkpointer.resume``.
            step: go back to this step.

        Raises:
            SafeCheckpointError: as of ``Checkpointer.resume``.
        """
        info = super().resume(state, step=step)
        self._report()
        if info is None:
            return None

        def not_told() -> list[dict[str, Any] | None]:
            newest = ray.train.get_checkpoint()
            return [] if newest is not None and newest.path == self._path(info.name) else [_facts(info)]

        self._tell(not_told)
        return info

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until everything in flight is committed and reported.

        Args:
            mirrored: see ``Checkpointer.wait``.

        Raises:
            SafeCheckpointError: a save failed and that was not reported yet; the same on every rank.
        """
        self._report_all()
        super().wait(mirrored=mirrored)

    def close(self) -> None:
        """Finish and report what is in flight, and give the directory back. While an exception is handled nothing is reported.

        Raises:
            SafeCheckpointError: a save failed and that was not reported yet.
        """
        self._end(super().close, quiet=sys.exc_info()[0] is not None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(lambda: super(RayCheckpointer, self).__exit__(kind, error, trace), quiet=error is not None)

    @property
    def save_requested(self) -> bool:
        """Whether to save now and go on training: a node of the run is about to go. True once for each such notice.

        Look once per step, on every worker; all get the same answer at the same step. It is a message to an actor of Ray and
        back. Do not leave the loop: a function that returns has ended the run for Ray, which then starts no other workers.
        """
        notice = ray.train.get_preemption_info()
        going = set(notice.preempted_node_ids) - self._going if notice is not None else set()
        self._going |= going
        return bool(going)

    def _end(self, end: Callable[[], None], *, quiet: bool) -> None:
        try:
            if not quiet:
                self._report_all()
        except BaseException:
            self._engine.close(quiet=True)
            raise
        self._awaited.clear()
        end()

    def _report_all(self) -> None:
        for handle in self._awaited:
            handle.wait_until_over()
        self._report()

    def _report(self) -> None:
        """Tell Ray of the saves that are over by what rank 0 knows, in their order."""
        if not self._awaited:  # on all ranks alike
            return
        over = self._tell(self._committed)
        del self._awaited[:over]

    def _committed(self) -> list[dict[str, Any] | None]:
        """On rank 0: of each save that is over, up to the first that is not, what was committed; None where nothing was."""
        found: list[dict[str, Any] | None] = []
        for handle in self._awaited:
            if not handle.done():
                break
            info = handle.committed
            # One that was deleted already was saved again, or is one of many in flight: a newer one follows.
            found.append(_facts(info) if info is not None and os.path.isdir(self._path(info.name)) else None)
        return found

    def _tell(self, decide: Callable[[], list[dict[str, Any] | None]]) -> int:
        """Report what rank 0 says, on every rank. Returns how many rows that were."""
        rows = self._engine.agree("report", must_match={"saves": len(self._awaited)}, decide=lambda _: decide())
        for row in rows:
            if row is not None:
                ray.train.report(
                    {"step": row["step"], **row["metrics"]},
                    checkpoint=Checkpoint(self._path(row["name"]), filesystem=self._storage.storage_filesystem),
                    checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
                )
        return len(rows)

    def _path(self, name: str = "") -> str:
        """A path below the folder of the run as Ray spells that: it takes nothing else for a part of the run."""
        return os.path.join(self._storage.experiment_fs_path, FOLDER, *([name] if name else []))


def _facts(info: CheckpointInfo) -> dict[str, Any]:
    return {"name": info.name, "step": info.step, "metrics": dict(info.metrics)}


def _storage() -> Any:
    """Where Ray keeps this run. Judged alike on all workers: each of them raises."""
    try:
        context = get_train_context()
    except RuntimeError as error:
        message = (
            "this is no worker of Ray Train. Make it within the function that TorchTrainer runs (with at least one worker); "
            "elsewhere safe_ckpt.Checkpointer and safe_ckpt.load do the same without Ray"
        )
        raise ConfigError(key="RayCheckpointer", message=message) from error
    if not isinstance(context.train_run_context.run_config, SafeRunConfig):
        message = (
            "the run needs run_config=SafeRunConfig(...), from safe_ckpt.ray too, instead of ray.train.RunConfig(...)"
        )
        raise ConfigError(key="TorchTrainer", message=message)
    here = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if here != context.get_world_size():
        message = f"a process group of {here} ranks beside {context.get_world_size()} workers. Use ray.train.torch.TorchTrainer"
        raise ConfigError(key="RayCheckpointer", message=message)
    storage = context.get_storage()
    if not isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        message = f"{storage.storage_fs_path} is no path of a file system. Give one, and an object store as mirror.url"
        raise ConfigError(key="RunConfig.storage_path", message=message)
    return storage


def _check_retention(config: CheckpointConfig) -> None:
    rules = config.retention
    if (rules.keep_last, rules.keep_best, rules.keep_every_steps) == (None, None, None):
        return
    least = config.max_in_flight + (2 if config.on_busy == "skip" else 1)
    if (rules.keep_last or 1) < least:
        message = (
            f"{least} is the least: Ray hears of a checkpoint after its commit, and names the one before it until then"
        )
        raise ConfigError(key="retention.keep_last", message=message)
