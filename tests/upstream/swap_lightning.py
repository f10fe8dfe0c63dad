"""A pytest plugin: every ``ModelCheckpoint`` of Lightning's own tests is a ``SafeCheckpointCallback``.

``UPSTREAM_VARIANT=sync``: with ``async_save=False`` where the test does not say otherwise, which none does.
"""

import functools
import os
import sys

import lightning.pytorch
from lightning.pytorch.callbacks import model_checkpoint

from safe_ckpt.lightning import SafeCheckpointCallback

_STOCK = model_checkpoint.ModelCheckpoint


def _wait_for_each_save() -> None:
    # In the class itself: a subclass of another name could not be pickled, and would have other state keys.
    original = SafeCheckpointCallback.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **{"async_save": False, **kwargs})

    SafeCheckpointCallback.__init__ = init


def _swap() -> None:
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] == lightning.__name__
        if ours and vars(module).get("ModelCheckpoint") is _STOCK:
            module.ModelCheckpoint = SafeCheckpointCallback


if os.environ.get("UPSTREAM_VARIANT") == "sync":
    _wait_for_each_save()
_swap()
