"""The parts of torchtitan that the manager overrides, calls or reads; the messages say which file of ours needs a look."""

import inspect

import pytest

pytest.importorskip("torchtitan")
import dataclasses

from contracts import Part, unlisted
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import BaseCheckpointManager, ModelWrapper

MANAGER = "torchtitan/manager.py"
SELF = ("self",)
PARTS = [
    Part(CheckpointManager, "dcp_save", MANAGER, "is overridden: writes one checkpoint",
         ("self", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf")),
    Part(CheckpointManager, "dcp_load", MANAGER, "is overridden: reads one checkpoint",
         ("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized")),
    Part(CheckpointManager, "_load", MANAGER, "is overridden: decides what is loaded", ("self", "step")),
    Part(CheckpointManager, "_find_load_step", MANAGER, "is overridden: the newest step", ("self", "folder")),
    Part(CheckpointManager, "_should_purge", MANAGER, "is overridden: retention is ours", SELF),
    Part(CheckpointManager, "_close", MANAGER, "is overridden", SELF),
    Part(BaseCheckpointManager, "close", MANAGER, "calls _close of one that is enabled", SELF),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_each_listed_part_of_torchtitan_exists_and_takes_our_arguments(part):
    """It is there, takes what we give it, and the file that is named does use it."""
    part.check()


def test_no_private_part_is_used_without_a_contract():
    """Every private part of torchtitan that we use is listed with the reason."""
    assert unlisted("torchtitan", PARTS) == {}


def test_torchtitans_own_code_calls_our_save_and_purge():
    """What is saved when and under which name is torchtitan's code: it comes to these two methods, and purges by that one."""
    source = inspect.getsource(CheckpointManager)
    for call in ("self.dcp_save(", "self.dcp_load(", "self._find_load_step()", "if self._should_purge()"):
        assert call in source, f"torchtitan's manager has no {call} any more: look at safe_ckpt/{MANAGER}"
    assert "assert isinstance(result, Future)" in source
    assert {"async_mode", "keep_latest_k"} <= {field.name for field in dataclasses.fields(CheckpointManager.Config)}
    assert "self.model =" in inspect.getsource(ModelWrapper)
