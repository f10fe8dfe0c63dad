"""The private parts of torch, torchdata, Accelerate, Transformers and Lightning that we use.

When one of these fails with a new release, the message names the file of ours to change. Lightning's hooks, which we override
as a whole, are in test_lightning_contract.py. DeepSpeed's parts are in test_deepspeed_contracts.py,
torchtitan's in test_torchtitan_contracts.py, Ray's in test_ray_contracts.py.
"""

import ast
import dataclasses
import importlib
import inspect
import pickle
import re
import textwrap
import types
from typing import NamedTuple

import datasets
import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint._traverse
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.metadata
import torch.distributed.checkpoint.staging
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.placement_types
import torch.utils.data._utils.pin_memory
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils.offload import PrefixedDataset
from contracts import SOURCES, Part, overridden, private_names
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, model_parallel
from torch.distributed.checkpoint import metadata, planner
from torch.storage import TypedStorage
from torch.utils.data import dataloader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedModel, Trainer, modeling_utils, trainer

from accelerate_runs import forget
from safe_ckpt.core.formats import names
from safe_ckpt.transformers import at_load

STORAGE = ("storage", "storage_offset", "size", "stride", "requires_grad", "backward_hooks")
TENSOR = torch.zeros(1)
OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
TYPED = TypedStorage(wrap_storage=TENSOR.untyped_storage(), dtype=torch.float32, _internal=True)
LOADER = torch.utils.data.DataLoader([1])
SELF = ("self",)
ITERATOR = types.SimpleNamespace(
    **dict.fromkeys(re.findall(r"self\.(\w+) =", inspect.getsource(dataloader._MultiProcessingDataLoaderIter.__init__)))
)
"""What an iterator with workers sets in itself."""
STAGING = torch.distributed.checkpoint.staging.StagingOptions(False, False, False, False)
UNPICKLER = torch.serialization._weights_only_unpickler

TORCH = [
    Part(NamedTuple("Pair", [("one", int)]), "_make", "core/sharding/gather.py", "a named tuple takes its fields one by one"),
    Part(pickle, "_Unpickler", "tools/inspection/pickle_reader.py", "Python's machine for pickles whose steps can be replaced",
         ("file",)),
    Part(pickle, "_compat_pickle", "core/formats/pickles.py", "the names of Python 2, as its reader replaces them"),
    Part(torch, "_C", "core/formats/torch_reading.py", "the module of PyTorchFileReader"),
    Part(torch._C, "PyTorchFileReader", "core/formats/torch_reading.py", "reads an archive from memory"),
    Part(torch._C, "_distributed_c10d", "core/coordination/process_groups.py", "the types of the stores, for type checkers"),
    Part(torch.serialization, "_load", "core/formats/torch_reading.py", "reads an archive without a copy",
         ("zip_file", "map_location", "pickle_module", "pickle_file", "overall_storage")),
    Part(torch.serialization, "_weights_only_unpickler", "core/formats/torch_reading.py", "runs no code of a pickle"),
    Part(UNPICKLER, "_get_allowed_globals", "core/formats/torch_archive.py", "the functions that a pickle may name"),
    Part(UNPICKLER, "_get_user_allowed_globals", "core/formats/torch_archive.py", "those that the program admits besides"),
    Part(torch.serialization, "_get_layout", "core/formats/pickles.py", "stands in a .metadata file", ("name",)),
    Part(torch, "_storage_classes", "core/formats/torch_archive.py", "the classes that weights_only admits"),
    Part(torch, "_utils", "core/formats/torch_archive.py", "the module of the functions that rebuild a tensor"),
    Part(torch._utils, "_rebuild_tensor_v2", "core/sharding/dcp_entries.py", "rebuilds a tensor of a plain type", STORAGE),
    Part(torch._utils, "_rebuild_tensor_v3", "core/sharding/dcp_entries.py", "of a newer type", (*STORAGE, "dtype")),
    Part(torch.distributed.checkpoint.metadata, "_MEM_FORMAT_ENCODING", "core/formats/pickles.py", "stands in .metadata"),
    Part(torch.distributed.checkpoint.state_dict, "_init_optim_state", "tools/audit/recorder.py", "a step of DCP's own"),
    Part(torch._utils, "get_tensor_metadata", "core/formats/torch_archive.py", "what torch is yet to compute", ("tensor",)),
    Part(torch, "_tensor", "core/formats/torch_archive.py", "the module of the next one"),
    Part(torch._tensor, "_rebuild_from_type_v2", "core/formats/torch_archive.py", "a tensor with what is set on it",
         ("func", "new_type", "args", "state")),
    Part(torch._utils, "_rebuild_parameter", "extensions/health/regions.py", "a parameter in a pickle"),
    Part(torch._utils, "_rebuild_parameter_with_state", "extensions/health/regions.py", "one with attributes of its own"),
    Part(torch, "_tensor", "core/formats/torch_archive.py", "the module of the next one"),
    Part(torch._tensor, "_rebuild_from_type_v2", "extensions/health/regions.py", "a tensor with attributes of its own",
         ("func", "new_type", "args", "state")),
    Part(TypedStorage, "_pickle_storage_type", "core/formats/torch_archive.py", "the name of a storage's type", SELF),
    Part(TypedStorage, "_size", "core/formats/torch_archive.py", "the number of its elements", SELF),
    Part(TYPED, "_untyped_storage",
         "core/formats/torch_archive.py", "its bytes"),
    Part(TENSOR.untyped_storage(), "_cdata", "core/formats/torch_archive.py", "tells one storage from another"),
    Part(TENSOR, "_backward_hooks", "core/formats/torch_archive.py", "a tensor with hooks is not plain"),
    Part(TENSOR, "_version", "core/state/overlap.py", "counts the changes of a tensor"),
    Part(TENSOR, "_post_accumulate_grad_hooks", "core/state/overlap.py", "an optimizer that steps within backward"),
    Part(torch.nn.Module(), "_parameters", "accelerate/offloaded_models.py", "the parameters of one module"),
    Part(torch.nn.Module(), "_buffers", "accelerate/offloaded_models.py", "the buffers of one module"),
    Part(torch.nn.Module(), "_non_persistent_buffers_set", "accelerate/offloaded_models.py", "those that are not saved"),
    Part(torch.nn.Module(), "_modules", "core/state/fingerprint.py", "the modules in one module"),
    Part(torch.nn.Module(), "_save_to_state_dict", "core/state/fingerprint.py", "what a module may do in its own way"),
    Part(torch.nn.Module(), "_state_dict_hooks", "core/state/fingerprint.py", "change what a module saves"),
    Part(torch.nn.Module(), "_state_dict_pre_hooks", "core/state/fingerprint.py", "such as FSDP2's"),
    Part(torch.nn.Module(), "_load_from_state_dict", "core/state/loading.py", "what a module may do in its own way"),
    Part(torch.nn.Module(), "_load_state_dict_pre_hooks", "core/state/loading.py", "change what a module loads"),
    Part(OPTIMIZER, "_optimizer_load_state_dict_pre_hooks", "core/state/loading.py", "change what an optimizer loads"),
    Part(OPTIMIZER, "_optimizer_state_dict_pre_hooks", "core/state/fingerprint.py", "change what an optimizer saves"),
    Part(OPTIMIZER, "_optimizer_state_dict_post_hooks", "core/state/fingerprint.py", "change what an optimizer saves"),
    Part(torch.nn.Module().state_dict(), "_metadata", "core/formats/safetensors.py", "the versions of the modules"),
    Part(torch.nn.modules.batchnorm, "_BatchNorm", "lightning/beside/epoch_start.py", "what counts anew for averaged weights"),
    Part(torch._utils, "ExceptionWrapper", "data/workers.py", "an error instead of a batch", ("exc_info", "where")),
    Part(torch.utils.data._utils.pin_memory, "pin_memory", "data/workers.py", "a batch with what came along", ("data",)),
    Part(dataloader, "_MultiProcessingDataLoaderIter", "data/workers.py", "the workers of an epoch", ("loader",)),
    Part(dataloader._MultiProcessingDataLoaderIter, "_try_put_index", "data/workers.py", "gives a worker its next batch", SELF),
    Part(dataloader._MultiProcessingDataLoaderIter, "_reset", "data/workers.py", "begins an epoch"),
    Part(dataloader._MultiProcessingDataLoaderIter, "_process_data", "data/workers.py", "hands out what a worker made"),
    Part(ITERATOR, "_workers", "data/loader.py", "the processes of an epoch"),
    Part(dataloader, "_SingleProcessDataLoaderIter", "data/workers.py", "an epoch without workers", ("loader",)),
    Part(dataloader._SingleProcessDataLoaderIter, "_next_index", "data/workers.py", "the indices of a batch", SELF),
    Part(LOADER, "_get_iterator", "data/loader.py", "begins an epoch", ()),
    Part(LOADER, "_index_sampler", "data/loader.py", "what gives the indices"),
    Part(LOADER, "_iterator", "data/order.py", "workers that stay"),
    Part(dist.distributed_c10d, "_get_default_store", "core/coordination/process_groups.py", "where ranks meet", ()),
    Part(torch.distributed.checkpoint, "_traverse", "core/sharding/dcp_read.py", "the module of set_element"),
    Part(torch.distributed.checkpoint._traverse, "set_element", "core/sharding/dcp_read.py", "puts what is missing",
         ("root_dict", "path", "value")),
    Part(torch.distributed.checkpoint.staging.DefaultStager(STAGING), "_config",
         "dcp/saving.py", "whether a stager returns a future"),
    Part(torch.distributed.checkpoint.filesystem, "_StorageInfo", "core/sharding/dcp_plan.py", "where an entry lies in a file",
         ("relative_path", "offset", "length")),
]  # fmt: skip

ACCELERATE = [
    Part(Accelerator, "save_state", "accelerate/handle.py", "is stood in for",
         ("self", "output_dir", "safe_serialization", "save_model_func_kwargs")),
    Part(Accelerator, "load_state", "accelerate/handle.py", "is stood in for",
         ("self", "input_dir", "load_kwargs", "load_model_func_kwargs")),
    Part(Accelerator, "save_model", "accelerate/handle.py", "is stood in for",
         ("self", "model", "save_directory", "max_shard_size", "safe_serialization")),
    Part(Accelerator, "end_training", "accelerate/handle.py", "is stood in for", SELF),
    Part(Accelerator, "prepare_data_loader", "accelerate/handle.py", "is stood in for", ("self", "data_loader")),
    Part(Accelerator, "get_state_dict", "accelerate/save.py", "the models as they are saved", ("self", "model", "unwrap")),
    Part(modeling_utils, "safe_save_file", "transformers/contents.py", "is stood in for while a Trainer saves",
         ("tensors", "filename", "metadata")),
    Part(safetensors.torch, "_remove_duplicate_names", "accelerate/contents.py", "what load_state would refuse",
         ("state_dict", "preferred_names")),
    Part(safetensors.torch, "save_file", "transformers/contents.py", "is stood in for while a Trainer saves",
         ("tensors", "filename", "metadata")),
]  # fmt: skip

TRANSFORMERS = [
    Part(Trainer, "_save_checkpoint", "transformers/mixin.py", "is overridden", ("self", "model", "trial")),
    Part(Trainer, "_load_best_model", "transformers/mixin.py", "is overridden", SELF),
    Part(Trainer, "_determine_best_metric", "transformers/mixin.py", "is overridden", ("self", "metrics", "trial")),
    Part(Trainer, "train", "transformers/mixin.py", "is overridden", ("self", "resume_from_checkpoint")),
    Part(Trainer, "_load_rng_state", "transformers/mixin.py", "is overridden", ("self", "checkpoint")),
    Part(Trainer, "_finalize_training", "transformers/mixin.py", "is overridden", optional=True),
    Part(Trainer, "_sorted_checkpoints", "transformers/mixin.py", "is overridden, before 5.3", optional=True),
    Part(
        Trainer,
        "_load_from_checkpoint",
        "transformers/mixin.py",
        "its errors name the checkpoint",
        ("self", "resume_from_checkpoint", "model"),
    ),
    Part(Trainer, "_load_optimizer_and_scheduler", "transformers/mixin.py", "is overridden", ("self", "checkpoint")),
    Part(torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda _: 1), "_last_lr", "transformers/at_load.py",
         "the rates of the groups of a schedule"),
    Part(Trainer, "create_accelerator_and_postprocess", "transformers/mixin.py", "is overridden", SELF),
    Part(Trainer, "call_model_init", "transformers/mixin.py", "is overridden", ("self", "trial")),
    Part(PreTrainedModel, "gather_sharded_state_dict_for_save", "transformers/at_load.py",
         "gathers: is stood in for while a Trainer saves", ("self", "model_to_save", "state_dict"), optional=True),
    Part(PreTrainedModel, "barrier_after_gathered_checkpoint_save", "transformers/at_load.py",
         "is left out while a Trainer saves", ("self", "distributed_config"), optional=True),
    Part(PreTrainedModel, "is_distributed_loading_by_transformers", "transformers/at_load.py",
         "whether it is sharded when it is loaded", optional=True),
    Part(Trainer, "_get_output_dir", "transformers/mixin.py", "where the checkpoints go", ("self", "trial")),
    Part(Trainer, "_push_from_checkpoint", "transformers/mixin.py", "pushes one", ("self", "checkpoint_folder")),
    Part(Trainer, "store_flos", "transformers/saver.py", "is called before a save", SELF),
    Part(Trainer, "save_model", "transformers/saver.py", "writes the model", ("self", "output_dir", "_internal_call")),
    Part(Trainer, "_save_optimizer_and_scheduler", "transformers/saver.py", "writes them", ("self", "output_dir")),
    Part(Trainer, "_save_scaler", "transformers/saver.py", "writes it", ("self", "output_dir")),
    Part(Trainer, "_save_rng_state", "transformers/data_place.py", "writes it", ("self", "output_dir")),
    Part(trainer, "save_fsdp_model", "transformers/strategies.py", "is stood in for while a Trainer saves"),
    Part(trainer, "save_fsdp_optimizer", "transformers/strategies.py", "is stood in for while a Trainer saves"),
    Part(trainer, "deepspeed_load_checkpoint", "transformers/strategies.py", "is stood in for while a Trainer trains",
         ("deepspeed_engine", "checkpoint_path", "load_module_strict")),
    Part(Accelerator, "get_state_dict", "transformers/strategies.py", "gathers: is stood in for while a Trainer saves",
         ("self", "model")),
    Part(torch.distributed.checkpoint, "save", "transformers/contents.py", "is stood in for while a Trainer saves",
         ("state_dict", "checkpoint_id")),
]  # fmt: skip

LIGHTNING = [
    Part(ModelParallelStrategy(), "_save_distributed_checkpoint", "lightning/strategies.py", "which layout it writes"),
    Part(model_parallel, "_align_compiled_param_names_with_module", "lightning/strategies.py",
         "the names of a compiled module", ("state_dict", "module"), optional=True),
    Part(getattr(pl.callbacks, "WeightAveraging", object), "_swap_models", "lightning/beside/averages.py",
         "averaged weights stand in the module in a validation", ("self", "pl_module"), optional=True),
]  # fmt: skip

ELSEWHERE = {
    "_extra_state": "test_an_extra_state_has_the_known_name",
    "_get_backend": "test_the_timeouts_of_a_process_group_can_be_read_and_set",
    "_timeout": "test_the_timeouts_of_a_process_group_can_be_read_and_set",
    "_set_default_timeout": "test_the_timeouts_of_a_process_group_can_be_read_and_set",
    "_device_types": "test_the_timeouts_of_a_process_group_can_be_read_and_set",
    "_local_tensor": "test_a_dtensor_has_local_tensor_and_spec_and_fsdp2_its_hooks",
    "_spec": "test_a_dtensor_has_local_tensor_and_spec_and_fsdp2_its_hooks",
    "_orig_mod": "test_a_compiled_module_has_the_plain_one",
    "_checkpoint_wrapped_module": "test_wrappers_of_modules_have_the_known_names_and_classes",
    "_fsdp_wrapped_module": "test_wrappers_of_modules_have_the_known_names_and_classes",
    "_hf_hook": "test_hooks_of_offloaded_modules_hold_their_values",
    "_models": "test_an_accelerator_keeps_what_was_prepared_and_registered",
    "_optimizers": "test_an_accelerator_keeps_what_was_prepared_and_registered",
    "_schedulers": "test_an_accelerator_keeps_what_was_prepared_and_registered",
    "_dataloaders": "test_an_accelerator_keeps_what_was_prepared_and_registered",
    "_custom_objects": "test_an_accelerator_keeps_what_was_prepared_and_registered",
    "_save_model_state_pre_hook": "test_an_accelerator_keeps_what_was_prepared_and_registered",
    "_iterator_finished": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_num_yielded": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_snapshot": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_snapshot_step": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_sampler_iter": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_sampler_iter_yielded": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_steps_since_snapshot": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_initial_iter_for_state_dict": "test_the_state_of_a_stateful_loader_has_the_known_fields",
    "_base_seed": "test_the_workers_of_a_loader_keep_seed_and_turn_where_we_read_them",
    "_worker_queue_idx_cycle": "test_the_workers_of_a_loader_keep_seed_and_turn_where_we_read_them",
    "_ex_iterable": "test_a_stream_of_datasets_keeps_its_buffer_and_place_where_we_look",
    "_starting_state_dict": "test_a_stream_of_datasets_keeps_its_buffer_and_place_where_we_look",
    "_restarting": "test_the_fields_of_lightnings_loops",
    "_state_dict_type": "test_the_fields_of_lightnings_loops",
    "_drop_last": "test_a_prepared_loader_leaves_out_batches",
    **dict.fromkeys(
        [
            "_checkpoint_connector",
            "_restore_modules_and_callbacks",
            "_combined_loader",
            "_combined_loader_states_to_load",
            "_load_combined_loader_states",
            "_load_state_dicts",
            "_FitLoop",
            "_skip_next_val",
            "_should_check_val_fx",
            "_should_accumulate",
            "_num_ready_batches_reached",
            "_on_evaluation_end",
            "_has_run",
            "_ckpt_path",
            "_loaded_checkpoint",
            "_batches_that_stepped",
            "_every_n_train_steps",
            "_train_time_interval",
            "_should_save_on_train_epoch_end",
            "_val_check_time_interval",
            "_mode",
            "_should_save_on_exception",
            "_sigterm_notifier_fn",
            "_slurm_sigusr_handler_fn",
            "_hpc_resume_path",
            "_accelerator_connector",
            "_signal_connector",
            "_last_checkpoint_saved",
            "_last_global_step_saved",
            "_data_fetcher",
            "_can_stop_early",
            "_monitor_candidates",
            "_generate_state_key",
            "_save_topk_checkpoint",
            "_save_last_checkpoint",
            "_find_last_checkpoints",
            "_link_checkpoint",
            "_remove_checkpoint",
            "_should_remove_checkpoint",
            "_should_skip_saving_checkpoint",
        ],
        "test_lightning_contract.py",
    ),
    **dict.fromkeys(
        [
            "_scheduler_state",
            "_latest_update_epoch",
            "_model_contains_batch_norm",
            "_accumulate_grad_batches",
            "_skip_backward",
            "_defer_save_until_validation",
        ],
        "test_lightning_contract.py",
    ),
    **dict.fromkeys(
        [
            "_logger_connector",
            "_seen_batches_per_dataloader",
            "_last_val_dl_reload_epoch",
            "_first_loop_iter",
            "_results",
            "_forward_cache",
            "_sync",
            "_should",
            "_update_count",
            "_computed",
            "_defaults",
            "_Metadata",
            "_Sync",
            "_ResultMetric",
        ],
        "test_lightning_contract.py",
    ),
    "_LoggerConnector": "test_audit.py",
    "_loader": "tests/unit/tools/audit/test_recorder.py",  # ours, of ``safe_ckpt.data``
    **dict.fromkeys(["_tr_loss", "_globalstep_last_logged"], "test_transformers_data.py"),
    "_current_fx_name": "test_lightning_hooks.py",
    **dict.fromkeys(["_log_artifacts", "_log_checkpoints", "_log_model"], "test_transformers_callbacks.py"),
}
"""Names that can only be checked on an object -> the test that checks them."""


@pytest.mark.parametrize("part", [*TORCH, *ACCELERATE, *TRANSFORMERS, *LIGHTNING], ids=str)
def test_each_listed_private_part_exists_and_takes_our_arguments(part):
    """The part exists, takes the arguments that we pass, and is used by the file that the list names."""
    part.check()


# Parts of classes of our own that another file of the same room derives from: nobody else's release changes these.
OF_OUR_HOMES = {"_check_written", "_new", "_publish", "_repair", "_seal", "_told"}


def test_no_private_part_is_used_without_a_contract():
    """Every private API that any of our files uses or overrides must be listed here with the reason."""
    known = {part.name for part in [*TORCH, *ACCELERATE, *TRANSFORMERS, *LIGHTNING]} | set(ELSEWHERE) | OF_OUR_HOMES
    elsewhere = ("deepspeed", "torchtitan", "ray", "__pycache__")
    folders = [path.name for path in SOURCES.iterdir() if path.is_dir() and path.name not in elsewhere]
    found = private_names(".", but=("deepspeed", "torchtitan", "ray")) | overridden(*folders)
    assert {name: where for name, where in found.items() if name not in known} == {}
    assert set(ELSEWHERE) <= set(found), "no longer used"


PLANNED_WITH = {
    planner.SavePlan: {"items", "storage_data", "planner_data", "usable"},
    planner.WriteItem: {"index", "type", "bytes_io_data", "tensor_data"},
    **({planner.BytesIOWriteData: {"nbytes"}} if hasattr(planner, "BytesIOWriteData") else {}),  # since torch 2.7
    planner.TensorWriteData: {"chunk", "properties", "size"},
    metadata.MetadataIndex: {"fqn", "offset", "index"},
    metadata.ChunkStorageMetadata: {"offsets", "sizes"},
    metadata.TensorProperties: {"dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"},
}


@pytest.mark.parametrize("kind", PLANNED_WITH, ids=lambda kind: kind.__name__)
def test_torchs_plans_of_sharded_saves_have_the_known_fields(kind):
    """core/sharding/plan_data.py passes on what it does not know: this says that a release has something new, to be judged."""
    new = {field.name for field in dataclasses.fields(kind)} - PLANNED_WITH[kind]
    assert not new, (
        f"torch {torch.__version__} plans with {kind.__name__}.{new}: does it have to be more than passed on?"
    )


KNOWN_DTYPES = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *("bool", "float16", "bfloat16", "float32", "float64", "complex32", "bcomplex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
}


def test_torchs_dtypes_are_all_known():
    """What is new is saved, but not looked at: health/regions, formats/dtypes and dtypes."""
    found = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert not found - KNOWN_DTYPES, f"torch {torch.__version__} has new types of tensors: {found - KNOWN_DTYPES}"


def test_the_workers_of_a_loader_keep_seed_and_turn_where_we_read_them():
    """data/loader.py reads the seed of an epoch's workers, data/workers.py asks them in turn from another one on."""
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    assert loader._iterator is batches, "data/order.py: is_warm"
    assert type(batches._base_seed) is int, "data/loader.py"
    assert {next(batches._worker_queue_idx_cycle) for _ in range(2)} == {0, 1}, "data/workers.py"
    assert "_try_put_index" in inspect.getsource(type(batches)._reset), "data/workers.py: after the turn is known"


def test_a_stream_of_datasets_keeps_its_buffer_and_place_where_we_look():
    """data/order.py looks for a shuffle buffer, data/workers.py for the place at which a stream began."""
    stream = datasets.Dataset.from_dict({"x": [0, 1]}).to_iterable_dataset()
    assert stream._ex_iterable is not None
    assert stream._starting_state_dict is None
    shuffled = stream.shuffle(buffer_size=2)
    kinds, step = [], shuffled._ex_iterable
    while step is not None:
        kinds.append(type(step).__name__)
        step = getattr(step, "ex_iterable", None)
    assert "BufferShuffledExamplesIterable" in kinds
    stream.load_state_dict(stream.state_dict())
    assert stream._starting_state_dict is not None


def test_the_timeouts_of_a_process_group_can_be_read_and_set():
    """core/coordination/process_groups.py reads and sets the timeout of each backend.
    It reads which devices have a backend, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert "cpu" in {device.type for device in world._device_types}, (
            "core/coordination/process_groups.py: device_types"
        )
        backend = world._get_backend(torch.device("cpu"))
        before = backend.options._timeout
        backend._set_default_timeout(before * 2)
        assert backend.options._timeout == before * 2, (
            "core/coordination/process_groups.py: lengthy_timeouts would raise nothing"
        )
    finally:
        dist.destroy_process_group()


OWN_STATE = {
    torch.nn.Module.state_dict: (
        {"_version", "_state_dict_pre_hooks", "_save_to_state_dict", "_modules", "_state_dict_hooks"}
    ),
    torch.nn.Module._save_to_state_dict: (
        {"_parameters", "_buffers", "_non_persistent_buffers_set", "__class__", "get_extra_state"}
    ),
    torch.optim.Optimizer.state_dict: (
        {"_optimizer_state_dict_pre_hooks", "param_groups", "state", "_optimizer_state_dict_post_hooks"}
    ),
}


@pytest.mark.parametrize("method", OWN_STATE, ids=lambda method: method.__qualname__)
def test_a_state_dict_is_made_of_the_known_parts(method):
    """core/state/fingerprint.py looks at all of it: a further part could change while a known plan is used."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert used == OWN_STATE[method]


def test_an_extra_state_has_the_known_name():
    """core/sharding/dtensor.py knows by it what may have another size at each save."""

    class Extra(torch.nn.Module):
        def get_extra_state(self):
            return 1

    assert list(torch.nn.Sequential(Extra()).state_dict()) == ["0._extra_state"]


def test_a_dtensor_has_local_tensor_and_spec_and_fsdp2_its_hooks():
    """core/state/fingerprint.py reads ``_local_tensor`` and ``_spec`` of a DTensor, and runs FSDP2's hooks before a save."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        layer = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        part = layer.weight
        assert type(part) is torch.distributed.tensor.DTensor
        assert part._local_tensor.data_ptr() == part.to_local().data_ptr()
        assert part._spec.placements == part.placements
        strided = torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2)
        assert (strided.dim, strided.split_factor) == (0, 2), "core/sharding/dtensor.py: is_scattered"
        layer(torch.zeros(1, 2))
        hooks = layer._state_dict_pre_hooks.values()
        assert [hook.__module__ for hook in hooks] == ["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
    finally:
        dist.destroy_process_group()


def test_a_compiled_module_has_the_plain_one():
    """core/formats/hugging_face.py takes a module out of ``torch.compile``."""
    module = torch.nn.Linear(1, 1)
    assert torch._dynamo.OptimizedModule(module, torch._dynamo.disable)._orig_mod is module


def test_wrappers_of_modules_have_the_known_names_and_classes():
    """core/formats/names.py leaves out what wrappers put into names; those of data parallelism it knows by their classes."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

    module = torch.nn.Linear(1, 1)
    compiled = torch._dynamo.OptimizedModule(module, torch._dynamo.disable)
    assert fsdp.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module"
    assert checkpoint_wrapper(module)._checkpoint_wrapped_module is module
    assert [names.wrapped(one) for one in (compiled, checkpoint_wrapper(module), torch.nn.DataParallel(module), module)] == [
        "_orig_mod", "_checkpoint_wrapped_module", "module", "",
    ]  # fmt: skip
    for name, home in (names._COMPILED | names._PARALLEL_KINDS).items():
        assert home.startswith("deepspeed") or isinstance(getattr(importlib.import_module(home), name), type)


def test_hooks_of_offloaded_modules_hold_their_values():
    """accelerate/offloaded_models.py reads the hooks of a module on the meta device to find its values."""
    module = torch.nn.Linear(1, 1)
    values = PrefixedDataset({"a.weight": torch.zeros(1)}, "a.")
    add_hook_to_module(module, AlignDevicesHook(offload=True, weights_map=values))
    hook = module._hf_hook
    assert hook.offload
    assert hook.weights_map is values
    assert (values.prefix, list(values.dataset)) == ("a.", ["a.weight"])


def test_an_accelerator_keeps_what_was_prepared_and_registered():
    """accelerate/*.py reads the objects given to ``prepare`` and to the registrations, and the settings of the project."""
    forget()
    accelerator = Accelerator(cpu=True)
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"):
        assert isinstance(getattr(accelerator, name), list), f"accelerate/contents.py, accelerate/save.py: {name}"
    assert hasattr(accelerator._save_model_state_pre_hook, "values"), "accelerate/save.py calls the hooks"
    for name in ("iteration", "total_limit", "automatic_checkpoint_naming", "save_on_each_node"):
        assert hasattr(accelerator.project_configuration, name), f"accelerate/handle.py: {name}"


def test_the_state_of_a_stateful_loader_has_the_known_fields():
    """accelerate/dataloaders.py resumes torchdata's loader, and accelerate/contents.py compares its position."""
    loader = StatefulDataLoader(range(4))
    assert loader._initial_iter_for_state_dict is False, "accelerate/dataloaders.py: _is_ready"
    loader.state_dict()
    assert loader._initial_iter_for_state_dict is True, "accelerate/dataloaders.py: _is_ready"
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert {"_num_yielded", "_iterator_finished"} <= set(state), "accelerate/contents.py: _place"
    of_workers = StatefulDataLoader(range(4), num_workers=1).state_dict()
    assert "_snapshot_step" in of_workers["_snapshot"], "accelerate/dataloaders.py: pending"
    assert state["_sampler_iter_yielded"] == 1, "accelerate/contents.py: _place"
    loader.load_state_dict(state)
    assert loader.next_iter_state is state, "accelerate/dataloaders.py: resume"
    assert hasattr(iter(loader), "_sampler_iter"), "accelerate/dataloaders.py: _begun_iterator"
    worked = importlib.import_module("torchdata.stateful_dataloader.stateful_dataloader")
    kind = worked._StatefulMultiProcessingDataLoaderIter
    assert kind._STEPS_SINCE_SNAPSHOT == "_steps_since_snapshot", "accelerate/contents.py: _place"
    shard = DataLoaderShard([1], use_stateful_dataloader=True)
    assert isinstance(shard.base_dataloader, StatefulDataLoader), "accelerate/dataloaders.py: watch"
    assert shard.iteration == 0, "accelerate/dataloaders.py: state"


def test_the_trainer_saves_what_we_save():
    """transformers/saver.py writes the same files as ``_save_checkpoint``; the mixin overrides the deletion at the end."""
    source = inspect.getsource(Trainer._save_checkpoint)
    for step in ("store_flos", "save_model", "best_model_checkpoint", "ExportableState", "save_to_json"):
        assert step in source, f"transformers/saver.py: _write does not know how this release handles {step}"
    source = inspect.getsource(Trainer)
    for step in ("model_wrapped.save_checkpoint(output_dir", "save_fsdp_model(", "accelerator.get_state_dict("):
        assert step in source, f"transformers/strategies.py: {step} is not what this release calls"
    source = inspect.getsource(trainer.save_fsdp_model) + inspect.getsource(trainer.save_fsdp_optimizer)
    assert source.count("dist_cp.save(") == source.count("storage_writer=dist_cp.FileSystemWriter(ckpt_dir)") == 2, (
        "transformers/contents.py: FSDP2's shards are caught there"
    )
    assert hasattr(torch.distributed.checkpoint.FileSystemWriter("there"), "path"), "transformers/contents.py"
    end = [name for name in ("_finalize_training", "_sorted_checkpoints") if hasattr(Trainer, name)]
    assert end, "transformers/mixin.py: nothing keeps the end of training from deleting the newest checkpoint"


def test_a_trainer_refuses_and_saves_models_sharded_at_load_as_known():
    """transformers/at_load.py: its refusal asks for ``save_only_model``, and all ranks come to ``save_pretrained``."""
    if not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"):
        pytest.skip("this release has no such models")
    source = inspect.getsource(Trainer.__init__)
    asks, refuses = (
        source.index("not args.save_only_model"),
        source.index("Resuming is not supported for models sharded"),
    )
    made = source.index("create_accelerator_and_postprocess()")
    assert made < source.index("call_model_init()") < asks < refuses
    saves = inspect.getsource(Trainer.save_model) + inspect.getsource(Trainer._save)
    assert "self.is_distributed_loading_by_transformers" in saves
    source = inspect.getsource(PreTrainedModel.save_pretrained)
    gathers, waits = (source.index(f"self.{name}(") for name in (at_load._GATHER, at_load._BARRIER))
    assert gathers < source.index("safe_save_file(") < waits


def test_the_fields_of_lightnings_loops():
    """lightning/loop_state.py resets the restarting flag; lightning/strategies.py reads FSDP's layout."""
    import lightning.pytorch as pl

    loop = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False).fit_loop
    assert loop._restarting is False, "lightning/loop_state.py: let_next_epoch_begin"
    assert "self._state_dict_type = state_dict_type" in inspect.getsource(FSDPStrategy.__init__), (
        "lightning/strategies.py"
    )
    assert isinstance(StatefulDataLoader([1]), _Stateful), (
        "lightning/dataloader.py: such a loader is asked for its state"
    )


def test_a_prepared_loader_leaves_out_batches():
    """accelerate/dataloaders.py lets a loop begin behind the last batch by these, which are asked at each turn."""
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        source = inspect.getsource(kind.__iter__)
        assert source.index("self.begin()") < source.index("self.set_epoch(self.iteration)")
        assert "if batch_index >= self.skip_batches" in source
        assert source.rindex("self.iteration += 1") < source.rindex("self.end()")
        assert "_drop_last" in inspect.signature(kind.__init__).parameters
