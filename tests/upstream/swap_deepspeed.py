"""A pytest plugin: ``install`` takes every engine that ``deepspeed.initialize`` returns in DeepSpeed's own tests.

``UPSTREAM_VARIANT``: ``stock`` swaps nothing; ``sync``: ``save_checkpoint`` waits.
These tests run in processes of a fork server, which imports this too; that spares each of them the import of DeepSpeed.
"""

import functools
import multiprocessing
import os

import deepspeed
import saves

_VARIANT = os.environ["UPSTREAM_VARIANT"]


def _swap() -> None:
    from safe_ckpt.deepspeed import install

    stock = deepspeed.initialize

    @functools.wraps(stock)
    def initialize(*args, **kwargs):
        engine, *others = stock(*args, **kwargs)
        install(engine, async_save=_VARIANT != "sync")
        return engine, *others

    deepspeed.initialize = initialize


if _VARIANT != "stock":
    _swap()
    saves.count()
multiprocessing.set_forkserver_preload([__name__])
