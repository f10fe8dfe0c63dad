"""The CheckpointIO that the callback installs in the strategy, and that Fabric takes as a plugin.

Each package, ``lightning`` and ``pytorch_lightning``, has its own ``ModelCheckpoint``, and each Trainer recognises only its
own. Where both are installed our classes derive from both, so that it does not matter which Trainer they are given to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safe_ckpt.adapters.extras import one_shot, presence, verify_if_ours
from safe_ckpt.adapters.pickles import refuse_code, warn_if_no_data, warn_if_refused
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.errors import ConfigError
from safe_ckpt.layouts.table import has_training
from safe_ckpt.lightning.directories import NO_DATA, WEIGHTS_NOTE

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint
else:

    def _derive(name: str, *homes: str) -> Any:
        bases = [getattr(import_module(home), name) for home in homes if find_spec(home.partition(".")[0])]
        if not bases:
            raise ConfigError(key="safe_ckpt.lightning", message="needs lightning or pytorch_lightning to be installed")
        return bases[0] if len(bases) == 1 else type(name, tuple(bases), {"__module__": __name__})

    ModelCheckpoint = _derive("ModelCheckpoint", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
    CheckpointIO = _derive("CheckpointIO", "lightning.fabric.plugins", "lightning_fabric.plugins")
    TorchCheckpointIO = _derive("TorchCheckpointIO", "lightning.fabric.plugins", "lightning_fabric.plugins")

TRAINERS_MARK = "pytorch-lightning_version"
"""The key that a Trainer's checkpoint has, and a dict of Fabric's user has not."""

__all__ = ["CheckpointIO", "ModelCheckpoint"]


class SaverOfFit(Protocol):
    """The saver while ``fit`` runs, as the I/O needs it.

    Attributes:
        reads_freely: whether a resume runs what a pickle names.
    """

    reads_freely: bool

    def next_sequence(self, path: Path) -> int:
        """The number of ``path`` in the order of commits."""

    def land(self) -> None:
        """Wait until nothing is in flight."""

    def end(self) -> None:
        """Finish what is in flight, and close."""


class SafeCheckpointIO(CheckpointIO):
    """Saves atomically, loads verified, and keeps saves and removals in one order.

    In a Trainer the callback installs it. In Fabric it is a plugin: what ``fabric.save`` writes is complete, durable and has a
    manifest, or is not there; ``fabric.load`` compares it with that manifest first, and runs none of its code.

    Within ``saving_to`` a checkpoint is put into a list, and the caller saves it on all ranks together. Outside, as in Fabric,
    or in the launcher of ``ddp_spawn`` after the end of ``fit``, it is written at once, in this process. Fabric calls it on
    rank 0 alone. If it raises there, the other ranks wait in Fabric's own barrier; ``Checkpointer`` tells them.

    Args:
        base: the I/O that was installed before; it still does the reading. None for Lightning's own.

    Attributes:
        saver: what saves while ``fit`` runs; None outside.
        trusted: a file that was verified a moment ago.

    Example:
        ```python
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[SafeCheckpointIO()])
        model, optimizer = fabric.setup(model, optimizer)
        fabric.save("runs/fabric/step-10.ckpt", {"model": model, "optimizer": optimizer, "step": 10})
        rest = fabric.load("runs/fabric/step-10.ckpt", {"model": model, "optimizer": optimizer})
        print(rest)
        ```

        ```text
        {'step': 10}
        ```
    """

    def __init__(self, base: Any = None) -> None:
        super().__init__()
        self.base = base if base is not None else TorchCheckpointIO()
        self.saver: SaverOfFit | None = None
        self._caught: list[dict[str, Any]] | None = None
        self.trusted: Path | None = None

    @contextlib.contextmanager
    def saving_to(self, caught: list[dict[str, Any]] | None) -> Iterator[None]:
        """While this is entered, what a strategy would write lands in ``caught``, on the ranks that would write.

        With None it is written at once: for a save from a signal handler within another save.
        """
        outer, self._caught = self._caught, caught
        try:
            yield
        finally:
            self._caught = outer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Called by the strategy, on rank 0 for unsharded ones.

        Raises:
            TypeError: ``storage_options`` were given.
            ConfigError: ``path`` is the address of an object store.
            SafeCheckpointError: written here, and it failed.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported: safe_ckpt writes to local and mounted file systems")
        if self._caught is not None:
            self._caught.append(checkpoint)
            return
        refuse_url(path, "save_checkpoint: filepath")
        target = Path(os.path.abspath(path))
        next_sequence = self.saver.next_sequence if self.saver is not None else one_shot.sequence_beside
        of_trainer = TRAINERS_MARK in checkpoint
        step = checkpoint.get("global_step" if of_trainer else "step")
        notes = {WEIGHTS_NOTE: of_trainer and not has_training(checkpoint)}
        known = step if type(step) is int and step >= 0 else 0

        def look(data: bytes) -> None:
            warn_if_refused(target.name, data, target.name)
            if of_trainer and has_training(checkpoint) and self.saver is not None and not self.saver.reads_freely:
                warn_if_no_data(data, "checkpoint", NO_DATA)

        one_shot.save_archive(checkpoint, target, sequence=next_sequence(target), step=known, notes=notes, look=look)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load, once no save is in flight. A checkpoint with our manifest is verified first.

        Raises:
            CorruptCheckpointError: its bytes are not those that were written.
            HostileCheckpointError: to load it would run code.
        """
        if self.saver is not None:
            self.saver.land()
        local = Path(os.fspath(path))
        if presence.is_file(local) and local != self.trusted:
            if presence.ends_as_archive(local):
                verify_if_ours(local)
            refuse_code(local)
        self.trusted = None
        loaded: dict[str, Any] = self.base.load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove, once no save is in flight."""
        if self.saver is not None:
            self.saver.land()
        self.base.remove_checkpoint(path)

    def teardown(self) -> None:
        """Called by the strategy at the end of every stage, and after an exception."""
        if self.saver is not None:
            self.saver.end()
        self.base.teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Live resources stay in the process that made them.
        return {"base": self.base}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["base"])  # type: ignore[misc]


def fit_loops() -> list[Any]:
    """The classes of the loops of ``fit``: those of all packages that are installed."""
    homes = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
    return [import_module(home)._FitLoop for home in homes if find_spec(home.partition(".")[0])]
