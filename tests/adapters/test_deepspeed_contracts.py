"""The parts of DeepSpeed that the adapter stands in for, calls or reads; the messages say which file of ours needs a look."""

import inspect

import pytest

pytest.importorskip("deepspeed")
import deepspeed.runtime.engine as upstream
from contracts import Part, unlisted
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
from deepspeed.utils import groups

ENGINE = upstream.DeepSpeedEngine
SELF = ("self",)

PARTS = [
    Part(ENGINE, "save_checkpoint", "deepspeed/handle.py", "is stood in for",
         ("self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters")),
    Part(ENGINE, "load_checkpoint", "deepspeed/handle.py", "is stood in for",
         ("self", "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
          "load_module_only", "custom_load_fn")),
    Part(ENGINE, "save_16bit_model", "deepspeed/handle.py", "is stood in for",
         ("self", "save_dir", "save_filename", "exclude_frozen_parameters")),
    Part(ENGINE, "load_universal_checkpoint", "deepspeed/handle.py", "whether what is loaded was converted", SELF),
    Part(ENGINE, "_checkpoint_tag_validation", "deepspeed/save.py", "is a collective: we agree on the tag", ("self", "tag")),
    Part(ENGINE, "_copy_recovery_script", "deepspeed/save.py", "what lies beside the tags", ("self", "save_path")),
    Part(ENGINE, "_zero3_consolidated_16bit_state_dict", "deepspeed/nested.py", "a gather that the Trainer calls itself"),
    Part(ENGINE, "_optimizer_has_ckpt_event_epilogue", "deepspeed/save.py", "tidies after an error", SELF),
    Part(ENGINE, "zero_nvme_offload_optimizer", "deepspeed/save.py", "the copy of the swap files is ours", SELF),
    Part(ENGINE, "checkpoint_writer_enabled", "deepspeed/load.py", "its files are read with the plain engine", SELF),
    Part(ENGINE, "_common_checkpoint_state", "deepspeed/save.py", "which names client_state replaces", SELF,
         optional=True),  # since 0.19.5; before, nothing is said of it
    Part(ENGINE, "is_first_weights_partition_group", "deepspeed/save.py", "which ranks write the weights of ZeRO-3", SELF),
    Part(DeepSpeedDataLoader, "_create_dataloader", "deepspeed/data_place.py", "makes the loader of an epoch", SELF),
    Part(groups, "_get_sequence_data_parallel_rank", "deepspeed/save.py", "which rank writes those of other stages", ()),
    Part(ENGINE, "use_node_local_storage", "deepspeed/nvme.py", "which name a rank's swap files have", SELF),
    Part(ENGINE, "_get_zero_ckpt_name", "deepspeed/nvme.py", "the file of the optimizer's states",
         ("self", "checkpoints_path", "tag")),
    Part(upstream, "get_fp32_state_dict_from_zero_checkpoint", "deepspeed/load.py", "is bound to the tag that is loaded",
         ("checkpoint_dir", "tag")),
    Part(upstream.dist, "barrier", "deepspeed/save.py", "nothing is on the disk yet that one could wait for"),
    Part(ds_to_universal, "dp_index_to_str", "deepspeed/nvme.py", "the folder of a rank's swap files", ("dp_index",)),
    Part(CheckpointEngine, "create", "deepspeed/save.py", "is overridden", ("self", "info")),
    Part(CheckpointEngine, "makedirs", "deepspeed/save.py", "is overridden", ("self", "path", "exist_ok")),
    Part(CheckpointEngine, "save", "deepspeed/save.py", "is overridden: one file", ("self", "state_dict", "path")),
    Part(CheckpointEngine, "load", "deepspeed/save.py", "is overridden: one file", ("self", "path", "map_location")),
    Part(CheckpointEngine, "commit", "deepspeed/save.py", "is overridden", ("self", "info")),
    Part(Stage3, "_set_fp32_optimizer_param_groups", "deepspeed/nvme.py", "the order of the states", SELF),
    Part(Stage3, "_clear_fp32_optimizer_param_groups", "deepspeed/nvme.py", "the order of the states", SELF),
    Part(Stage3, "_reassign_or_swap_out_partitioned_parameters", "deepspeed/nvme.py", "small parameters come back"),
    Part(Stage3, "_swappable_optimizer_subgroup", "deepspeed/nvme.py", "which ones are in files", ("self", "sub_group_id")),
    Part(Stage3, "checkpoint_event_prologue", "deepspeed/nvme.py", "before states change", SELF),
    Part(Stage3, "checkpoint_event_epilogue", "deepspeed/nvme.py", "after states have changed", SELF),
    Part(Stage3, "reset_swap_buffers", "deepspeed/nvme.py", "after files have changed", SELF),
    Part(OptimizerSwapper, "_get_param_swap_info", "deepspeed/nvme.py", "makes states known", ("self", "parameter")),
    Part(OptimizerSwapper, "purge_state", "deepspeed/nvme.py", "forgets states", SELF),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_each_listed_part_of_deepspeed_exists_and_takes_our_arguments(part):
    """It is there, takes what we give it, and the file that is named does use it."""
    part.check()


def test_no_private_part_is_used_without_a_contract():
    """Every private part of DeepSpeed that we use is listed with the reason."""
    assert unlisted("deepspeed", PARTS) == {}


def test_the_fields_of_zeros_optimizer_that_we_read_exist():
    """deepspeed/nvme.py reads where the parameters of ZeRO-3 are, and puts the scaling of the loss back."""
    source = inspect.getsource(Stage3)
    names = ["fp32_partitioned_groups_flat", "fp16_groups", "optimizer_swapper", "sub_group_to_group_id", "overflow",
             "fp16_partitioned_groups_flat_numel", "dynamic_loss_scale", "loss_scaler"]  # fmt: skip
    assert [name for name in names if f"self.{name}" not in source] == []
