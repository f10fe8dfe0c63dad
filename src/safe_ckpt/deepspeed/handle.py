"""``install``: makes the checkpoints of a DeepSpeed engine safe, and returns the handle on it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from safe_ckpt.adapters import AttachedHandle
from safe_ckpt.adapters.handle import begin
from safe_ckpt.config import CheckpointConfig, ConfigLike
from safe_ckpt.deepspeed import load, save
from safe_ckpt.deepspeed.arguments import check_engine, check_settings, default_tag
from safe_ckpt.deepspeed.data_place import EngineDataPlace, refuse_without_place
from safe_ckpt.deepspeed.directories import TagSaver
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.events import Hook

logger = logging.getLogger(__name__)
_REPLACED = ("save_checkpoint", "load_checkpoint", "save_16bit_model", "destroy")
_ENDED = "this engine's checkpoints were closed, by destroy() or remove()"


def install(
    engine: Any,
    config: ConfigLike | None = None,
    *,
    async_save: bool = True,
    resume_data: bool = False,
    hooks: Iterable[Hook] = (),
) -> Handle:
    """Make a DeepSpeed engine's checkpoints safe and asynchronous. Every rank calls this, after ``deepspeed.initialize``.

    ``save_checkpoint``, ``load_checkpoint``, ``save_16bit_model`` and ``destroy`` of this one object are replaced until
    ``handle.remove()``; they take what they took and return what they returned. Installed again, it is first taken back.

    Args:
        engine: a ``DeepSpeedEngine``, ZeRO 0 to 3, with or without offload.
        config: settings, equal on all ranks: a ``CheckpointConfig``, a mapping of its keys, or the path of a YAML file. None
            reads the file that ``SAFE_CKPT_CONFIG`` names, or takes the defaults.
        async_save: return from ``save_checkpoint`` when the snapshot is taken; False waits until it is durable.
        resume_data: save the random generators and the place of ``engine.training_dataloader`` in its data, and go on there
            after ``load_checkpoint``. Leave it out where your script leaves out batches itself.
        hooks: called with what happens; see ``safe_ckpt.events``.

    Returns:
        The handle, to wait for what is in flight and to take it all back.

    Raises:
        ConfigError: a setting is not allowed, or the engine's own settings are not covered; ``resume_data``, and the engine
            has no loader.
        DesyncError: the ranks were given different settings.
        RendezvousTimeout: some ranks did not call this.

    Example:
        ```python
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        handle = install(engine, CheckpointConfig(retention=Retention(keep_last=2)))
        path, client_state = engine.load_checkpoint("runs/deepspeed")  # (None, None) on a fresh start
        engine.save_checkpoint("runs/deepspeed", client_state={"epoch": 3})  # returns when the copy is taken
        handle.wait()
        ```
    """
    checked = begin(engine, config, functools.partial(check, resume_data=resume_data))
    return Handle(engine, checked, async_save=async_save, resume_data=resume_data, hooks=hooks)


class Handle(AttachedHandle):
    """The result of ``install``. As a context manager it finishes what is in flight and takes the installation back.

    Every method is called on every rank, on the thread that trains.

    Example:
        ```python
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        with install(engine) as handle:
            engine.save_checkpoint("runs/deepspeed", tag="best")
            handle.wait()  # until it is committed
        ```
    """

    saver: TagSaver
    endings: Mapping[str, str] = {"destroy": _ENDED, "remove": _ENDED}

    def __init__(
        self,
        engine: Any,
        config: CheckpointConfig,
        *,
        async_save: bool = True,
        resume_data: bool = False,
        hooks: Iterable[Hook] = (),
    ) -> None:
        saver = TagSaver(engine, config, hooks)
        super().__init__(engine, saver)
        self._engine = engine
        self._async_save = async_save
        with self._whole_or_nothing():
            if resume_data:
                saver.data_place = EngineDataPlace(engine)
                self._undo.also(saver.data_place.forget)
            self._load_checkpoint = engine.load_checkpoint
            self._destroy: Callable[[], None] = engine.destroy
            self._attach({name: getattr(self, name) for name in _REPLACED})

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """Stands in for ``DeepSpeedEngine.save_checkpoint``. When this returns, training may go on.

        The tag appears, and ``latest`` names it, when every rank's part of it is durable; until then both are as they were.
        With NVMe offload this returns when the swap files have been copied, for the next step writes to them.

        Args:
            save_dir: the directory of tags, on a file system that all ranks share.
            tag: the checkpoint's name; None for ``global_step<n>``. One that is there is replaced as a whole; files that
                others keep in it go along. It may lie in folders, as in ``"warmup/step10"``: retention then counts the tags
                of that folder.
            client_state: as for DeepSpeed. A name that DeepSpeed uses itself takes the place of its own, with a warning.
            save_latest: whether ``latest`` is to name it.
            exclude_frozen_parameters: as for DeepSpeed.
            metrics: numbers for ``Retention(keep_best=...)`` and for ``safe-ckpt list``; rank 0's count.

        Returns:
            True.

        Raises:
            ClosedError: ``destroy`` or ``remove`` was called.
            ConfigError: ``save_dir`` is none, or the tag no name of a directory, on any rank.
            StateError: a metric or something else cannot be saved; names it, on every rank. Nothing was started.
            SourceChangedError: a swap file changed while it was copied.
            DirectoryError: something that is no checkpoint of DeepSpeed stands where the tag goes.
            DirectoryInUseError: a live job holds ``save_dir``.
            DesyncError: the ranks differ in directory or tag.
            RendezvousTimeout: some ranks did not call this; names them.
            SafeCheckpointError: the error of an earlier save that was not raised yet; this one was not started. With
                ``async_save=False`` also that of this one.
        """
        with self._call("save_checkpoint"):
            handle = save.save(
                self.saver,
                save_dir,
                default_tag(self._engine) if tag is None else tag,
                client_state or {},
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
                metrics=metrics or {},
            )
        if not self._async_save:
            handle.result()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Stands in for ``DeepSpeedEngine.load_checkpoint``: what is loaded was verified, and is the same on every rank.

        Args:
            load_dir: the directory of tags.
            tag: which one; None for the one that ``latest`` names, or if that is damaged or gone, the newest good one before
                it. A tag that stock DeepSpeed wrote is taken as it is, with a warning.
            load_module_strict: as for DeepSpeed.
            load_optimizer_states: the same.
            load_lr_scheduler_states: the same.
            load_module_only: the same.
            custom_load_fn: the same.

        Returns:
            As DeepSpeed: the file that was loaded and the client state; ``(None, None)`` when there is nothing to load.

        Raises:
            ClosedError: ``destroy`` or ``remove`` was called.
            ConfigError: ``load_dir`` is none, or the tag no name of a directory, on any rank.
            CorruptCheckpointError: the one that ``tag`` names is damaged.
            NoValidCheckpointError: there are checkpoints and none is usable; says why not, one by one.
            CheckpointNotFoundError: there is no ``tag``; names those that are there.
            RestoreError: with NVMe offload, another number of ranks saved it. With ``load_universal_checkpoint`` in DeepSpeed's
                settings, there is none, or it is not complete.
            Exception: what DeepSpeed, or ``custom_load_fn``, raised on this rank, as it was raised.
            SafeCheckpointError: it failed on another rank; names it.
        """

        def restore(folder: str, chosen: str | None) -> Any:
            return self._load_checkpoint(
                folder,
                chosen,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )

        with self._call("load_checkpoint"):
            # One that failed is no reason not to go back to the one before it; its error stays to be raised.
            TagSaver.wait_until_over()
            optimizer_states = load_optimizer_states and not load_module_only
            loaded = load.load(self.saver, load_dir, tag, restore, optimizer_states=optimizer_states)
        return cast("tuple[str | None, Any]", loaded)

    def resume(self, load_dir: str | os.PathLike[str], **arguments: Any) -> Any:
        """Load what ``latest`` names, or the newest good tag before it, if there is one. Every rank calls this.

        Args:
            load_dir: the directory of tags; of one tag, that one alone is taken.
            arguments: further ones of ``load_checkpoint``.

        Returns:
            The client state, a dict; None on a fresh run, which is one without any tag.

        Raises:
            NoValidCheckpointError: there are tags and none is usable; says why not, one by one.
            CheckpointNotFoundError: ``load_dir`` names a tag that is not there.
            SafeCheckpointError: all else that ``load_checkpoint`` raises.

        Example:
            ```python
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
            client_state = install(engine).resume("runs/deepspeed")
            first = client_state["epoch"] if client_state is not None else 0
            ```
        """
        with self._call("resume"):
            folder, tag, is_fresh = load.run_of(self.saver, load_dir)
            path, client_state = self.load_checkpoint(folder, tag, **arguments)
        if path is None and not is_fresh:
            message = "there are tags, and DeepSpeed loaded none of them. Name one: load_checkpoint(load_dir, tag)"
            raise NoValidCheckpointError(path=str(folder), message=message)
        return client_state if path is not None else None

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Stands in for ``DeepSpeedEngine.save_16bit_model``, and so for ``save_fp16_model``.

        When this returns the file is there, complete and durable, and replaced what was there in one step; or the file of
        before is. DeepSpeed gathers the weights of ZeRO-3 itself, under the process group's own timeout.

        Args:
            save_dir: the directory, on a file system that all ranks share.
            save_filename: the file's name.
            exclude_frozen_parameters: as for DeepSpeed.

        Returns:
            As DeepSpeed: False where its settings say that the weights of ZeRO-3 are not gathered. Nothing is written then.

        Raises:
            ClosedError: ``destroy`` or ``remove`` was called.
            ConfigError: ``save_dir`` is none, or ``save_filename`` no name of a file, on any rank.
            DirectoryError: a directory stands there.
            DesyncError: the ranks differ in what they ask for.
            RendezvousTimeout: some ranks did not call this; names them.
            SafeCheckpointError: it failed, on every rank.
        """
        with self._call("save_16bit_model"):
            handle = save.save_weights(
                self.saver, save_dir, save_filename, exclude_frozen_parameters=exclude_frozen_parameters
            )
        if handle is not None:
            handle.result()
        return handle is not None

    def destroy(self) -> None:
        """Stands in for ``DeepSpeedEngine.destroy``: finishes what is in flight and gives the directories back first.

        Raises:
            SafeCheckpointError: a save failed, and its error was not raised yet. The engine is destroyed all the same.
        """
        try:
            self._end("destroy")
        finally:
            self._destroy()


def check(engine: Any, config: CheckpointConfig, *, resume_data: bool = False) -> None:
    """Refuse what is not covered.

    Raises:
        ConfigError: names the setting.
    """
    check_engine(engine)
    check_settings(config)
    if resume_data:
        refuse_without_place(engine)
    elif engine.training_dataloader is not None and engine.global_rank == 0:
        logger.warning(
            "the place of engine.training_dataloader in its data is not saved: after a resume the epoch begins anew, "
            "unless your script leaves out batches. Say install(engine, resume_data=True)"
        )
    if engine.use_node_local_storage() and engine.global_rank == 0:
        logger.warning(
            "use_node_local_storage: checkpoints go to a directory that all nodes share all the same; one of each node's own "
            "is refused at the first save (DirectoryNotSharedError)"
        )
