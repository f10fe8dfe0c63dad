"""Install safe_ckpt in a Trainer: check what is supported, replace the strategy's I/O and ``save_checkpoint``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import Patch
from safe_ckpt.adapters.extras import config_of_all, refused_retention
from safe_ckpt.adapters.patch import replace_for_good
from safe_ckpt.adapters.spool import is_url, refuse_url, spooled
from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.errors import ConfigError
from safe_ckpt.events import Hook
from safe_ckpt.lightning import dataloader, signals, strategies
from safe_ckpt.lightning import resume as resuming
from safe_ckpt.lightning.checkpoint_io import SafeCheckpointIO
from safe_ckpt.lightning.saver import TrainerSaver


def install(
    trainer: Any, config: CheckpointConfig, hooks: Sequence[Hook], directory: Path, suffix: str
) -> TrainerSaver:
    """Make ``trainer`` save through safe_ckpt; the same saver for all callbacks of a Trainer.

    Args:
        trainer: as it was, where this fails for its first callback.
        config: settings.
        hooks: called with what happens.
        directory: is taken.
        suffix: of the checkpoints in it.

    Raises:
        DirectoryError: the directory cannot be used; ``DirectoryInUseError`` where a live job holds it.
        ConfigError: the strategy is not covered, another CheckpointIO is in use, or the callbacks disagree.
    """
    config = signals.with_requeue_signal(trainer, config)
    strategy = trainer.strategy
    present = strategy.checkpoint_io
    before = present.saver if isinstance(present, SafeCheckpointIO) else None
    if isinstance(before, TrainerSaver) and not before.closed:
        if before.config != config:
            message = "all SafeCheckpointCallbacks of a Trainer must have the same one: give each the same config"
            raise ConfigError(key="config", message=message)
        before.take(hooks, directory, suffix)
        return before
    undo = Patch()  # of what stays when fit has ended
    undo.also(functools.partial(setattr, strategy, "checkpoint_io", present))
    with undo.whole_or_nothing():
        io = _install_io(trainer)
        saver = TrainerSaver(trainer, config, io)
        if isinstance(before, TrainerSaver):
            saver.come_after(before)
        undo.also(saver.give_up)
        undo.put(io, {"saver": saver})
        saver.take(hooks, directory, suffix)
        resuming.keep_from_tuner(trainer, saver)
        resuming.keep_types(strategy, saver)
        if strategies.form_of(strategy) is not None:
            strategies.guard(trainer, saver)
    _let_savers_save(_home(trainer))
    dataloader.let_places_be_used()
    return saver


def overrides_saving(trainer: Any) -> bool:
    """Whether a subclass, or the object itself, has a ``save_checkpoint`` of its own."""
    kinds = type(trainer).__mro__
    below = kinds[: kinds.index(_home(trainer))]
    return any("save_checkpoint" in vars(one) for one in (trainer, *below))


def _home(trainer: Any) -> type[Any]:
    """The Trainer of Lightning: the last class that has a ``save_checkpoint``."""
    return next(kind for kind in reversed(type(trainer).__mro__) if "save_checkpoint" in vars(kind))


def _let_savers_save(home: type[Any]) -> None:
    """Replace ``Trainer.save_checkpoint``: a Trainer that has a saver saves through it; others are not changed.

    The method of the class is replaced, so that a subclass's own method is called and reaches this one with ``super()``. The
    user's own saves, SLURM's and the tuners' come here. All ranks agree on them and wait for them.
    """

    def made(stock: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(
            trainer: Any, filepath: Any, weights_only: bool | None = None, storage_options: Any = None
        ) -> None:
            saver = getattr(trainer.strategy.checkpoint_io, "saver", None)
            if isinstance(saver, TrainerSaver):
                saver.save_now(filepath, weights_only, storage_options)
            else:
                stock(trainer, filepath, weights_only, storage_options)

        return save_checkpoint

    replace_for_good(home, "save_checkpoint", made)


def install_for_loading(trainer: Any) -> None:
    """Outside of ``fit``: verify what is loaded, if the strategy leaves loading to Lightning's own I/O."""
    strategy = trainer.strategy
    if _is_unsharded(strategy) and _writes_as_torch(strategy.checkpoint_io):
        _install_io(trainer)


def _install_io(trainer: Any) -> SafeCheckpointIO:
    """Install our I/O in the strategy.

    Raises:
        ConfigError: the strategy is not covered, or another CheckpointIO is in use.
    """
    strategy = trainer.strategy
    if not _is_unsharded(strategy) and strategies.form_of(strategy) is None:
        supported = "a single device, DDP, ModelParallelStrategy, FSDPStrategy or DeepSpeedStrategy"
        message = f"{type(strategy).__name__} is not supported: it writes its checkpoints itself. Use {supported}"
        raise ConfigError(key="strategy", message=message)
    strategies.refuse_hybrid(strategy)
    present = strategy.checkpoint_io
    if isinstance(present, SafeCheckpointIO):
        return present
    if not _writes_as_torch(present):
        problem = f"{type(present).__name__} writes or removes files in a way of its own, which is not verified"
        message = f"{problem}: remove it from the Trainer's plugins, or use ModelCheckpoint with it"
        raise ConfigError(key="SafeCheckpointCallback", message=message)
    io = SafeCheckpointIO(present)
    strategy.checkpoint_io = io
    return io


def _writes_as_torch(io: Any) -> bool:
    """Whether it inherits writing and removing from Lightning's own I/O; it may read in its own way."""
    names = ("save_checkpoint", "remove_checkpoint")
    # One that only stands for another, such as a proxy, has them on no class.
    methods = {name: getattr(type(io), name, None) for name in names}
    return all(getattr(one, "__qualname__", "") == f"TorchCheckpointIO.{name}" for name, one in methods.items())


def _is_unsharded(strategy: Any) -> bool:
    # Those that inherit saving from the base class: rank 0 gives one dict to the I/O.
    return bool(type(strategy).save_checkpoint.__qualname__ == "Strategy.save_checkpoint")


def check_arguments(
    dirpath: str | Path | None,
    config: CheckpointConfig,
    resume: str | None,
    *,
    save_weights_only: bool,
    from_environment: bool = False,
) -> None:
    """Refuse arguments that exclude each other. ``from_environment``: the program gave no ``config``.

    Raises:
        ConfigError: naming the argument.
    """
    if config.on_busy != "wait" or config.max_in_flight != 1:
        message = "a Trainer saves one after the other: leave on_busy and max_in_flight alone"
        raise ConfigError(key="config.on_busy", message=message)
    if resume == "auto" and save_weights_only:
        message = 'excludes resume="auto": training cannot resume from weights alone. Use a second callback for them'
        raise ConfigError(key="save_weights_only", message=message)
    if config.retention != Retention():
        own = "save_top_k, monitor and save_last are the retention in Lightning"
        raise refused_retention(key="config.retention", instead=own, from_environment=from_environment)
    if resume not in ("auto", None):
        raise ConfigError(key="resume", message=f'expected "auto" or None, got {resume!r}')
    if resume == "auto" and dirpath is None:
        message = 'is missing: resume="auto" needs it, for the default one is new with every run. Give a dirpath'
        raise ConfigError(key="dirpath", message=message)
    refuse_url(dirpath or ".", "dirpath")


def settings_of_this_process() -> CheckpointConfig:
    """The settings of the environment, or the defaults where it is wrong: ``settings_of_all`` says that, on all ranks."""
    try:
        return CheckpointConfig.from_environment()
    except ConfigError:
        return CheckpointConfig()


def settings_of_all(callback: Any, given: str | Path | None, config: CheckpointConfig | None) -> CheckpointConfig:
    """The settings of a callback, where the program gave none those of the environment. Every rank calls this.

    Args:
        callback: a SafeCheckpointCallback.
        given: the ``dirpath`` that it was given; its own is another one where that is an address.
        config: the settings that it was given.

    Raises:
        ConfigError: what one rank's environment says is not allowed; on every rank.
        DesyncError: the ranks' environments say different things.
    """
    if config is not None:
        return callback.config  # type: ignore[no-any-return]
    config = config_of_all(None)
    if given is not None and is_url(given, "dirpath"):
        config = spooled(str(given), config, key="dirpath")[1]
    resume, only = callback.resume, callback.save_weights_only
    check_arguments(callback.dirpath, config, resume, save_weights_only=only, from_environment=True)
    return config
