"""The base classes: of ``lightning``, of ``pytorch_lightning``, or of both.

Each package has its own ``ModelCheckpoint`` and each Trainer recognises only its own. Where both are installed our classes
derive from both, so that it does not matter which Trainer they are given to.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from safe_ckpt.errors import ConfigError

if TYPE_CHECKING:
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


def fit_loops() -> list[Any]:
    """The classes of the loops of ``fit``: those of all packages that are installed."""
    homes = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
    return [import_module(home)._FitLoop for home in homes if find_spec(home.partition(".")[0])]


__all__ = ["CheckpointIO", "ModelCheckpoint", "fit_loops"]
