"""A pytest plugin: every ``Accelerator`` of Accelerate's own tests is registered when it first saves or loads.

Not when it is built: most of these tests build one that is never saved. ``UPSTREAM_VARIANT=sync``: ``save_state`` waits.
"""

import functools
import os

import saves
from accelerate import Accelerator

from safe_ckpt.accelerate import Handle, register


def _registering(name: str):
    stock = getattr(Accelerator, name)

    @functools.wraps(stock)
    def first(self, *args, **kwargs):
        if getattr(self, "_safe_ckpt", None) is not None:  # ours calls it, or leaves it as it is
            return stock(self, *args, **kwargs)
        register(self)
        return getattr(self, name)(*args, **kwargs)

    return first


if os.environ.get("UPSTREAM_VARIANT") == "sync":
    Handle.save_state.__kwdefaults__["async_save"] = False
for _name in ("save_state", "load_state", "save_model"):
    setattr(Accelerator, _name, _registering(_name))
saves.count()
