"""The handle on a registered Accelerator: its own ``save_state``, ``load_state``, ``save_model`` and others."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType

from safe_ckpt.accelerate import load, save, strategies
from safe_ckpt.accelerate import save_model as models
from safe_ckpt.accelerate.directories import AcceleratorSaver
from safe_ckpt.adapters import AttachedHandle
from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.errors import ConfigError
from safe_ckpt.events import Hook

if TYPE_CHECKING:
    import torch

    from safe_ckpt import CheckpointInfo

logger = logging.getLogger(__name__)
_OTHERS = ("MEGATRON_LM", "XLA")
"""They write their checkpoints with functions that are not replaced here."""
_LOCAL = ", which Accelerate cannot load since torch 2.6, whose torch.load refuses the ShardedTensors in its files"
_REPLACED = (
    *("save_state", "load_state", "save_model", "end_training", "free_memory"),
    *("prepare_data_loader", "skip_first_batches"),
)


class Handle(AttachedHandle):
    """The result of ``register``. As a context manager it finishes what is in flight and takes the registration back.

    Every method is called on every rank, on the thread that trains.

    Args:
        accelerator: what it is put on.
        config: the settings.
        hooks: called with what happens.
        project: name -> what takes its place in the Accelerator's project configuration until the handle is removed.

    Attributes:
        project: the project directory that is held for automatically named checkpoints; None where these are named by hand.

    Example:
        ```python
        accelerator = Accelerator(cpu=True, project_dir="runs/accelerate")
        model = accelerator.prepare(model)
        with register(accelerator) as handle:
            accelerator.save_state("runs/accelerate/best")
            handle.wait()  # until it is committed
        ```
    """

    saver: AcceleratorSaver
    endings: Mapping[str, str] = {
        "end_training": (
            "end_training() finished the saves and ended this registration, and the process group. Save before it; in a "
            "process that goes on without one, call register(accelerator) again"
        ),
        "free_memory": "free_memory() or clear() gave the directory back: call register(accelerator) again to save",
        "remove": "handle.remove() gave the Accelerator back as it was: call register(accelerator) again",
        "end": "another Accelerator was registered for the same project: save with that one, or register this one again",
        "copy": "this is a copy of the handle: use the one that register returned, in the process that trains",
    }

    def __init__(
        self,
        accelerator: Any,
        config: CheckpointConfig,
        *,
        hooks: Iterable[Hook] = (),
        project: Mapping[str, str] | None = None,
    ) -> None:
        saver = AcceleratorSaver(accelerator, config, retention(accelerator, config), hooks)
        super().__init__(accelerator, saver)
        self._accelerator = accelerator
        with self._whole_or_nothing():
            self._put_on(project or {})

    def _put_on(self, project: Mapping[str, str]) -> None:
        accelerator = self._accelerator
        self._undo.put(accelerator.project_configuration, project)
        naming = accelerator.project_configuration.automatic_checkpoint_naming
        self.project: str | None = accelerator.project_dir if naming else None
        self.saver.hold_automatic()
        self._undo.also(self.saver.loaders.forget)
        for loader in accelerator._dataloaders:
            self.saver.loaders.watch(loader)
        self._stock: dict[str, Callable[..., Any]] = {name: getattr(accelerator, name) for name in _REPLACED}
        methods = {name: getattr(self, name) for name in _REPLACED}
        # A copy, also one in a worker, is as if it were not registered.
        self._attach({**methods, "__getstate__": lambda: self._undo.state_without(accelerator)})
        self.prepare()

    def __getstate__(self) -> dict[str, Any]:
        # Threads, locks and a process stay here: a copy, also one in a worker, is a handle that has ended.
        return {"accelerator": self._accelerator, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._accelerator = self._owner = state["accelerator"]
        self.config = state["config"]
        self.ended = "copy"

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
        async_save: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Stands in for ``Accelerator.save_state``. When this returns, the state may change; nothing is on disk yet.

        The checkpoint appears under its name when all of it is durable; before that the directory is not there.

        Args:
            output_dir: as for Accelerate; ignored with ``automatic_checkpoint_naming``. A checkpoint that is there already,
                ours or of stock Accelerate, is replaced; files that others keep in that directory go along.
            safe_serialization: safetensors for the models, or pickle.
            metrics: numbers for ``Retention(keep_best=...)``.
            step: the training step, for the manifest and the trackers; None for the number in ``output_dir``'s name, such as
                ``step_90``, or else Accelerate's own count of saves.
            async_save: False waits until it is durable.
            save_model_func_kwargs: as for Accelerate, which uses them for DeepSpeed only; else ignored, with a warning.

        Returns:
            Where it will be.

        Raises:
            StateError: something cannot be saved; names it, on every rank. Nothing was started.
            DirectoryError: ``output_dir`` is there, and what is in it would be lost: other checkpoints, or files of the names
                that a checkpoint has.
            DesyncError: the ranks differ in path, or in what one file holds for all of them.
            ClosedError: the registration has ended; says by what, and what to do.
            RendezvousTimeout: some ranks did not call this; names them.
            SafeCheckpointError: the error of an earlier save that was not raised yet; this one was not started. With
                ``async_save=False`` also that of this one.
        """
        with self._call("save_state"):
            self.saver.tracking.report()
            if save_model_func_kwargs and not strategies.engines_of(self._accelerator):
                own = [*inspect.signature(Handle.save_state).parameters][1:-1]
                near = {name: difflib.get_close_matches(name, own, n=1) for name in save_model_func_kwargs}
                ignored = [f"{name} (did you mean {found[0]}?)" if found else name for name, found in near.items()]
                logger.warning("save_state ignores %s: only DeepSpeed has them", ", ".join(ignored))
            options = save.SaveOptions(
                safe_serialization=safe_serialization,
                metrics=metrics or {},
                step=step,
                arguments=save_model_func_kwargs,
            )
            path, handle = save.save(self.saver, output_dir, options)
        self.saver.tracking.follow(handle)
        if not async_save:
            handle.result()
            self.saver.tracking.report()
        return path

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Stands in for ``Accelerator.load_state``: what is restored was verified, and is the same on every rank.

        Args:
            input_dir: the checkpoint; None for the newest valid one. A checkpoint that stock Accelerate wrote is taken as
                it is, with a warning; without a path only when there is no valid one of ours.
            load_kwargs: as for Accelerate.
            load_model_func_kwargs: as for Accelerate.

        Raises:
            NoValidCheckpointError: there is none, or none is usable; says why not, one by one.
            CheckpointNotFoundError: the one that ``input_dir`` names is not there.
            CorruptCheckpointError: the one that ``input_dir`` names is damaged.
            ConfigError: neither ``input_dir`` nor automatic naming says where to look.
            SafeCheckpointError: it does not fit what is restored; the same on every rank.
        """

        def restore(path: str) -> None:
            self._stock["load_state"](path, load_kwargs, **load_model_func_kwargs)

        with self._call("load_state"):
            self.saver.land()  # one that failed is no reason not to go back to the one before it; its error stays to be raised
            load.load(self.saver, input_dir, restore, load_model_func_kwargs)
        self.prepare()

    def resume(
        self,
        directory: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> CheckpointInfo | None:
        """Load the newest valid checkpoint, if there is one: the start of a script that may run for the first time.

        Args:
            directory: where the checkpoints are that you name yourself, such as ``"out"`` for ``out/step_90``; of one
                checkpoint, that one alone is taken. None for those that Accelerate names.
            load_kwargs: as for ``load_state``.
            load_model_func_kwargs: the same.

        Returns:
            What was loaded; None on a fresh run, which is one without any checkpoint.

        Raises:
            NoValidCheckpointError: there are checkpoints and none is usable; says why not, one by one.
            CheckpointNotFoundError: ``directory`` names a checkpoint that is not there.
            ConfigError: neither ``directory`` nor automatic naming says where to look; or there is a mirror and ``directory``.
            SafeCheckpointError: it does not fit what is restored; the same on every rank.

        Example:
            ```python
            project = ProjectConfiguration("runs/accelerate", automatic_checkpoint_naming=True)
            accelerator = Accelerator(cpu=True, project_config=project)
            model = accelerator.prepare(model)
            info = register(accelerator).resume()
            print("fresh run" if info is None else f"goes on from {info.name}")
            ```
        """

        def restore(path: str) -> None:
            self._stock["load_state"](path, load_kwargs, **load_model_func_kwargs)

        with self._call("resume"):
            self.saver.land()
            info = load.load_if_any(self.saver, directory, restore, load_model_func_kwargs)
        self.prepare()
        return info

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for ``Accelerator.prepare_data_loader``, which ``prepare`` calls: the same, and the loader is watched."""
        self._refuse_copy("prepare_data_loader")
        given = args[0] if args else kwargs.get("data_loader")
        loader = self._stock["prepare_data_loader"](*args, **kwargs)
        self.saver.loaders.watch(loader, given)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Stands in for ``Accelerator.skip_first_batches``: a loader that begins there after ``load_state`` stays as it is."""
        if not self.closed and self.saver.loaders.is_at(dataloader, num_batches, self.saver.engine):
            return dataloader
        return self._stock["skip_first_batches"](dataloader, num_batches)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        dtype: torch.dtype | None = None,
    ) -> Path:
        """Stands in for ``Accelerator.save_model``: the weights alone, offloaded or not. Returns when they are durable.

        Every rank calls this, not only the main one. Every parameter and persistent buffer is fetched or, where FSDP2 shards
        it, gathered when its turn comes and let go again, so that this takes no more memory than the largest of them and
        buffers of 64 MiB (160 where it is gathered); ``safe_serialization=False`` and ZeRO-3 take the whole. The directory is
        replaced as a whole: weights of an earlier save are gone, other files in it stay. In one that holds directories, such
        as checkpoints, the files are renamed one by one, once all of them are durable; the index comes last.

        Args:
            model: wrapped or not; offloaded by ``cpu_offload``, ``disk_offload``, ``dispatch_model``, or not at all. It must
                not change meanwhile.
            save_directory: gets ``model.safetensors`` (``pytorch_model.bin``), or shards and an index, under the names that
                Accelerate gives them.
            max_shard_size: bytes, or text such as ``"5GB"``.
            safe_serialization: safetensors, with tied tensors stored once, or pickle.
            dtype: floating-point tensors are converted to it; for safetensors.

        Returns:
            The directory.

        Raises:
            ConfigError: an argument is not allowed.
            StateError: a tensor is on the meta device and nobody knows its values, or does not fit safetensors; names it.
            DirectoryError: the directory is a checkpoint.
            ClosedError: the registration has ended.
            SafeCheckpointError: it could not be written; the same on every rank.
        """
        options = models.ModelOptions(max_shard_size=max_shard_size, safe_serialization=safe_serialization, dtype=dtype)
        with self._call("save_model"):
            self.saver.tracking.report()
            return models.save(self.saver, model, save_directory, options)

    def end_training(self) -> None:
        """Stands in for ``Accelerator.end_training``: finishes what is in flight first, for that ends the process group.

        From then on ``save_model`` of the Accelerator is stock's, and ``save_state`` and ``load_state`` raise ``ClosedError``.

        Raises:
            SafeCheckpointError: a save failed, and its error was not raised yet. Training is ended all the same.
        """
        self._refuse_copy("end_training")
        try:
            self._end("end_training")
        finally:
            self._stock["end_training"]()

    def free_memory(self, *objects: Any) -> Any:
        """Stands in for ``Accelerator.free_memory`` and ``clear``: finishes what is in flight and gives the directory back.

        To save again with this Accelerator, ``register`` it again.

        Raises:
            SafeCheckpointError: a save failed, and its error was not raised yet. The memory is freed all the same.
        """
        self._refuse_copy("free_memory")
        try:
            self._end("free_memory")
        finally:
            objects = self._stock["free_memory"](*objects)
        return objects

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until everything in flight is committed. Every rank calls this.

        Args:
            mirrored: wait, too, until each save or a newer one has its copy in the mirror: for ``lengthy_s`` at most.

        Raises:
            ConfigError: there is no mirror.
            MirrorBehindError: the copies did not come; the same on every rank.
            SafeCheckpointError: a save failed, and its error was not raised yet; the same on every rank.
        """
        self._refuse_copy("wait")
        if not self.closed:
            super().wait(mirrored=mirrored)

    def prepare(self) -> None:
        """Make host memory for snapshots of what ``prepare()`` was given ready, in the background.

        Called by ``register`` and after ``load_state``. Worth a call of its own when ``prepare()`` came after ``register``.
        """
        self._refuse_ended("prepare")
        self.saver.prepare([*self._accelerator._models, *strategies.plain_optimizers(self._accelerator)])

    def end(self) -> None:
        """Finish what is in flight and give the directory back. The Accelerator stays registered: its saves raise."""
        self._end("end")

    def _leave(self, project: Any) -> None:
        """Another Accelerator with this very project configuration is about to be registered: leave it as it was."""
        if self._accelerator.project_configuration is project:
            self._undo.give_back(project)

    def _end(self, by: str, *, quiet: bool = False) -> None:
        if self.closed:
            return
        try:
            if not quiet:
                self.saver.land()  # the trackers end with the training
        finally:
            self._undo.give_back(self._accelerator, "save_model")  # needs no registration: from here on it is stock's
            super()._end(by, quiet=quiet)

    def _refuse_copy(self, call: str) -> None:
        if self.ended == "copy":
            self._refuse_ended(call)


def check(accelerator: Any, config: CheckpointConfig) -> None:
    """Refuse what is not covered.

    Raises:
        ConfigError: names the setting.
    """
    kind = accelerator.distributed_type
    if kind in [getattr(DistributedType, name, None) for name in _OTHERS]:
        message = f"{kind} writes its checkpoints itself and is not covered: use save_state without register"
        raise ConfigError(key="accelerator.distributed_type", message=message)
    if kind == DistributedType.DEEPSPEED and config.snapshot == "overlapped":
        message = 'DeepSpeed\'s optimizers may change parameters outside of step(): use "eager" or "auto"'
        raise ConfigError(key="snapshot", message=message)
    if kind == DistributedType.FSDP:
        form = str(getattr(accelerator.state.fsdp_plugin.state_dict_type, "name", "?"))
        if form not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            reason = _LOCAL if form == "LOCAL_STATE_DICT" else ""
            message = f"expected SHARDED_STATE_DICT or FULL_STATE_DICT, got {form}{reason}: use one of these"
            raise ConfigError(key="fsdp_plugin.state_dict_type", message=message)
        _refuse_hybrid(accelerator.state.fsdp_plugin, form)
    project = accelerator.project_configuration
    _refuse_near(accelerator, config)
    if project.automatic_checkpoint_naming and accelerator.project_dir is None:
        message = "is missing: automatic_checkpoint_naming puts the checkpoints there. Give one"
        raise ConfigError(key="ProjectConfiguration.project_dir", message=message)
    retention(accelerator, config)


def _refuse_near(accelerator: Any, config: CheckpointConfig) -> None:
    """Refuse what cannot be on each host's own disk, and a disk of each host's own without a mirror."""
    per_host = config.mirror.near == "per-host"
    if accelerator.project_configuration.save_on_each_node and not per_host:
        message = (
            "is not supported by itself: all ranks commit one checkpoint. Use a file system that they share; or, for a "
            'directory on each host\'s own disk, mirror.near = "per-host" and mirror.url'
        )
        raise ConfigError(key="ProjectConfiguration.save_on_each_node", message=message)
    if per_host and accelerator.distributed_type == DistributedType.DEEPSPEED:
        message = '"per-host" is not supported with DeepSpeed: give "shared", and a directory that all ranks see'
        raise ConfigError(key="mirror.near", message=message)


def check_names(accelerator: Any, config: CheckpointConfig) -> None:
    """Refuse names of the user's where each host has its own disk: each would need a lock there.

    Raises:
        ConfigError: says what to use.
    """
    if config.mirror.near == "per-host" and not accelerator.project_configuration.automatic_checkpoint_naming:
        own = "Accelerate must name the checkpoints: use ProjectConfiguration(automatic_checkpoint_naming=True)"
        raise ConfigError(key="mirror.near", message=f'"per-host": {own}')


def _refuse_hybrid(plugin: Any, form: str) -> None:
    """Refuse what was seen to come back wrong, on four ranks in two groups. The weights were right."""
    chosen = getattr(plugin, "sharding_strategy", None) or getattr(plugin, "reshard_after_forward", None)
    way = str(getattr(chosen, "name", chosen))
    if "HYBRID" in way and form == "SHARDED_STATE_DICT":
        message = f"with {way} of FSDP 1 the optimizer's moments come back wrong: use FULL_STATE_DICT, or FSDP2"
        raise ConfigError(key="fsdp_plugin.state_dict_type", message=message)


def retention(accelerator: Any, config: CheckpointConfig) -> Retention:
    """Return the rules of retention: ``total_limit`` is ``keep_last``, beside the other rules of ``config``.

    Raises:
        ConfigError: both are given and differ.
    """
    limit = accelerator.project_configuration.total_limit
    if limit is None or not accelerator.project_configuration.automatic_checkpoint_naming:
        return config.retention
    if limit < 1:
        raise ConfigError(key="ProjectConfiguration.total_limit", message=f"expected at least 1, got {limit!r}")
    if config.retention.keep_last not in (None, limit):
        message = f"is {config.retention.keep_last}, but ProjectConfiguration.total_limit is {limit}: give one of them"
        raise ConfigError(key="retention.keep_last", message=message)
    return dataclasses.replace(config.retention, keep_last=limit)
