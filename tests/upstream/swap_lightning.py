"""A pytest plugin: every ``ModelCheckpoint`` of Lightning's own tests is a ``SafeCheckpointCallback``.

``UPSTREAM_VARIANT=sync``: with ``async_save=False`` where the test does not say otherwise, which none does. There the tests do
not see ``.safe_ckpt`` in a listing: in one of the two runs it must not hide what else they look at.
"""

import functools
import os
import pathlib
import sys

import lightning.pytorch
import saves
from lightning.pytorch.callbacks import model_checkpoint

from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.lightning import SafeCheckpointCallback

_STOCK = model_checkpoint.ModelCheckpoint


def _wait_for_each_save() -> None:
    # In the class itself: a subclass of another name could not be pickled, and would have other state keys.
    original = SafeCheckpointCallback.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **{"async_save": False, **kwargs})

    SafeCheckpointCallback.__init__ = init


def _leave_out_the_hidden_folder() -> None:
    listdir, iterdir = os.listdir, pathlib.Path.iterdir

    def asked_by_a_test() -> bool:
        return "tests_pytorch" in sys._getframe(2).f_globals.get("__name__", "")

    def listed(*args):
        names = listdir(*args)
        return [name for name in names if name != HIDDEN] if asked_by_a_test() else names

    def iterated(self):
        asked = asked_by_a_test()
        return (path for path in iterdir(self) if path.name != HIDDEN or not asked)

    os.listdir, pathlib.Path.iterdir = listed, iterated


def _swap() -> None:
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] == lightning.__name__
        if ours and vars(module).get("ModelCheckpoint") is _STOCK:
            module.ModelCheckpoint = SafeCheckpointCallback


if os.environ.get("UPSTREAM_VARIANT") == "sync":
    _wait_for_each_save()
    _leave_out_the_hidden_folder()
_swap()
saves.count()
