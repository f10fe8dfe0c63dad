"""A pytest plugin: ``install`` takes every engine that ``deepspeed.initialize`` returns in DeepSpeed's own tests.

These run in processes of a fork server, which imports this too. ``UPSTREAM_VARIANT=sync``: ``save_checkpoint`` waits.
"""

import functools
import multiprocessing
import os

import deepspeed

from safe_ckpt.deepspeed import install

_stock = deepspeed.initialize


@functools.wraps(_stock)
def _initialize(*args, **kwargs):
    engine, *others = _stock(*args, **kwargs)
    install(engine, async_save=os.environ.get("UPSTREAM_VARIANT") != "sync")
    return engine, *others


deepspeed.initialize = _initialize
multiprocessing.set_forkserver_preload([__name__])
