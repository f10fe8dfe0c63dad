"""A pytest plugin: ``save``, ``async_save`` and ``load`` of ``torch.distributed.checkpoint`` are ours in every process.

A ``FileSystemWriter`` or ``FileSystemReader`` becomes ``checkpoint_id``, as docs/start/dcp.md tells users to write it; other
storages are given to ours, which refuses them. The two deprecated names are swapped as well: most of these tests use them.
"""

import functools

import saves
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.testing._internal.common_distributed import MultiProcessTestCase

from safe_ckpt import dcp

_PLAIN = (stock.FileSystemWriter, stock.FileSystemReader)
_OF_OLD = ("state_dict", "storage", "process_group", "coordinator_rank", "no_dist", "planner")


def _translated(call, storage, state_dict, *old, **given):
    named = dict(zip(_OF_OLD[1:], old, strict=False))
    given = {storage if name == "storage" else name: value for name, value in named.items()} | given
    given.pop("coordinator_rank", None)
    where = given.get(storage)
    transforms = getattr(where, "transforms", None)
    if type(where) in _PLAIN and not getattr(transforms, "extensions", None):
        given[storage] = None
        given["checkpoint_id"] = given.get("checkpoint_id") or where.path
    return call(state_dict, **given)


def _swapped(call, storage):
    @functools.wraps(call)
    def ours(state_dict, *old, **given):
        return _translated(call, storage, state_dict, *old, **given)

    return ours


def swap() -> None:
    """Put ours in their place, in this process."""
    save, load = _swapped(dcp.save, "storage_writer"), _swapped(dcp.load, "storage_reader")
    async_save = _swapped(dcp.async_save, "storage_writer")
    for home in (stock, state_dict_saver):
        home.save, home.save_state_dict, home.async_save = save, save, async_save
    for home in (stock, state_dict_loader):
        home.load, home.load_state_dict = load, load


class _Process:
    """Starts a rank in which ours are swapped in before its test runs."""

    def __init__(self, process):
        self._process = process

    def __call__(self, *, target, **given):
        return self._process(target=_Run(target), **given)


class _Run:
    """What a rank runs: unpickling it there imports this module, and so swaps."""

    def __init__(self, target):
        self.target = target

    def __call__(self, *args, **given):
        self.target(*args, **given)


_start = MultiProcessTestCase._start_processes
MultiProcessTestCase._start_processes = lambda self, proc: _start(self, _Process(proc))
swap()
saves.count()
