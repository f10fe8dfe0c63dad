"""``save_model``: the weights alone, in the files that Accelerate would write."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import utils
from accelerate.utils import DistributedType
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory, split_torch_state_dict_into_shards

from safe_ckpt.accelerate import offloaded_models, strategies
from safe_ckpt.accelerate.directories import AcceleratorSaver
from safe_ckpt.accelerate.offloaded_models import OffloadedValue
from safe_ckpt.adapters import Attempt, FilePlan, Planned, torch_file
from safe_ckpt.adapters.extras import (
    HIDDEN,
    MANIFEST_NAME,
    NAMES,
    Exporter,
    FileHome,
    LazyTensor,
    absolute,
    dtensor,
    durable,
    export,
    file_plan,
    gather_nested,
    hugging_face,
    safetensors,
)
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.errors import ConfigError, DirectoryError, StateError

logger = logging.getLogger(__name__)
_WEIGHTS = ".weights"  # in the place of a name
_READY = "ready"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """See ``Handle.save_model``."""

    max_shard_size: int | str
    safe_serialization: bool
    dtype: torch.dtype | None

    def most_bytes(self) -> int:
        """How large a shard may be.

        Raises:
            ConfigError: an argument is not allowed.
        """
        if self.dtype is not None and not self.safe_serialization:
            raise ConfigError(key="save_model: dtype", message="is for safe_serialization=True only: leave it out")
        return hugging_face.parse_size(self.max_shard_size, "save_model: max_shard_size")


def save(
    saver: AcceleratorSaver, model: torch.nn.Module, directory: str | os.PathLike[str], options: ModelOptions
) -> Path:
    """Write the weights. Every rank calls this; rank 0 writes. Returns the directory when they are durable.

    Raises:
        SafeCheckpointError: see ``Handle.save_model``.
    """
    engine, accelerator, named = saver.engine, saver.accelerator, saver.names
    refuse_url(directory, "save_model: directory")
    path = absolute(directory)
    values = {name: str(value) for name, value in dataclasses.asdict(options).items()}
    whole = saver.for_weights(path, values, options.most_bytes)
    parts: Any = model if strategies.is_sharding(accelerator) and dtensor.has_parts(model) else None
    if strategies.is_first_version(accelerator):
        parts = saver.parts.of_model(model)
    if whole and options.safe_serialization and parts is not None:
        exported = Exporter(engine, named).export(
            parts, path, format="safetensors", max_shard_size=options.max_shard_size, dtype=options.dtype
        )
        return exported.result().file_path
    files: list[FilePlan] = []
    attempt = Attempt()
    with attempt:
        if parts is None or parts is model:
            state = _state_of(accelerator, model)
        else:
            state = gather_nested(parts, engine.config.timeouts.lengthy_s, engine.group) or {}
        if engine.rank == 0:
            files = _files(_values_of(state), options)
    planned = Planned(files=files, error=attempt.error)
    if whole:
        engine.save(export.request_of(named.hold(path), path, planned.payload(streamed=True))).result()
    else:
        _replace_each(saver, path, planned)
    return path


def _state_of(accelerator: Any, model: torch.nn.Module) -> Mapping[str, Any]:
    """Names to tensors, or to ``OffloadedValue``, on rank 0. Accelerate gathers sharded tensors. Every rank calls this."""
    plain = hugging_face.unwrapped(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plain = getattr(model, "module", model)
        try:
            dtensor.refuse_partitioned(plain)
        except StateError as apart:
            try:
                return accelerator.get_state_dict(model) or {}
            except ValueError as error:  # a setting of DeepSpeed forbids it
                raise StateError(key=apart.key, message=f"{apart.message}. {error}") from error
    elif dtensor.has_parts(plain):
        return accelerator.get_state_dict(model) or {}
    dtensor.refuse_partitioned(plain)
    return offloaded_models.values(plain) if offloaded_models.is_offloaded(plain) else plain.state_dict()


def _files(values: Mapping[str, OffloadedValue], options: ModelOptions) -> list[FilePlan]:
    if options.safe_serialization:
        lazies = _once(values, options.dtype)
        split = split_state_dict_into_shards_factory(
            lazies,
            get_storage_size=lambda lazy: lazy.size_bytes,
            filename_pattern=utils.SAFE_WEIGHTS_PATTERN_NAME,
            max_shard_size=options.most_bytes(),
        )
        return _shards(lazies, split, safetensors.named_safetensors_plan, utils.SAFE_WEIGHTS_NAME)
    fetched = _fetched(values)
    split = split_torch_state_dict_into_shards(
        fetched, filename_pattern=utils.WEIGHTS_PATTERN_NAME, max_shard_size=options.most_bytes()
    )
    return _shards(fetched, split, functools.partial(torch_file, key="model"), utils.WEIGHTS_NAME)


def _shards(
    tensors: Mapping[str, Any], split: StateDictSplit, plan: Callable[[str, dict[str, Any]], FilePlan], single: str
) -> list[FilePlan]:
    shards = split.filename_to_tensors or {single: []}
    planned = [plan(file, {name: tensors[name] for name in names}) for file, names in shards.items()]
    if not split.is_sharded:
        return planned
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    body = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return [*planned, file_plan.bytes_plan(f"{single}.index.json", body.encode())]


def _once(values: Mapping[str, OffloadedValue], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """The tensors for safetensors: each under the first of its names, fetched and converted when it is written."""
    lazies: dict[str, LazyTensor] = {}
    seen: set[object] = set()
    for name, value in values.items():
        tensor, fetch = value.tensor, value.fetch
        final = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        hugging_face.refuse_unsaveable(name, tensor, final)  # first: a sparse one has no memory to be known by
        if seen & value.identity:
            continue
        seen |= value.identity
        if final != tensor.dtype:
            if value.held is not tensor:
                raise StateError(key=name, message="an offloaded model is saved in its own dtype: leave dtype out")
            fetch = functools.partial(tensor.detach().to, final)
        lazies[name] = LazyTensor(dtype=final, shape=tuple(tensor.shape), fetch=fetch)
    return lazies


def _fetched(values: Mapping[str, OffloadedValue]) -> dict[str, torch.Tensor]:
    """The tensors themselves, all offloaded ones in host memory at once: a torch archive keeps ties.

    Raises:
        StateError: one has no memory of its own, by which Accelerate divides the tensors into files.
    """
    by_home: dict[int, torch.Tensor] = {}
    fetched: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        tensor = value.fetch()
        if tensor.layout is not torch.strided:
            raise StateError(key=name, message=f"a {tensor.layout} tensor cannot be in weights: save tensor.to_dense()")
        home = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
        fetched[name] = tensor if value.held is value.tensor else by_home.setdefault(home, tensor)
    return fetched


def _values_of(state: Mapping[str, Any]) -> dict[str, OffloadedValue]:
    values = {}
    for name, value in state.items():
        if isinstance(value, str):
            logger.warning("%s is text and left out of the weights, as Accelerate leaves it out", name)
        elif isinstance(value, OffloadedValue | torch.Tensor):
            values[name] = value if isinstance(value, OffloadedValue) else OffloadedValue.of(value)
        else:
            raise StateError(key=name, message=f"expected a tensor, got {type(value).__name__}")
    return values


def _replace_each(saver: AcceleratorSaver, path: Path, planned: Planned) -> None:
    """Replace file by file: other directories in there, such as checkpoints, must not be moved.

    All new files are first committed together, as a folder in the hidden one.
    """
    engine = saver.engine
    home = engine.hold(path, hidden=path / HIDDEN / NAMES / _WEIGHTS, recorded=False)
    names = [file.path for file in planned.files]
    try:
        key = engine.agree("save_model", must_match={"path": path}, decide=lambda _: uuid.uuid4().hex)
        ready = home.hidden / _READY / key  # of its own: what an earlier index refers to stays
        engine.save(export.request_of(home, ready, planned.payload(streamed=True))).result()
        engine.coordinator.agree(
            "weights replaced",
            must_match={"path": path},
            timeout_s=engine.config.timeouts.lengthy_s,
            decide=lambda _: _put_in_place(home, ready, names),
        )
    finally:
        engine.wait_until_over()
        engine.release(home)


def _put_in_place(home: FileHome, ready: Path, names: Sequence[str]) -> None:
    """At every moment the directory has weights that are complete: those of before, or those in ``ready``."""
    path = home.path
    try:
        home.confirm()
        (path / MANIFEST_NAME).unlink(missing_ok=True)  # it describes the old files
        durable.sync_directory(str(path))
        for name in names:
            if name.endswith(".json"):  # until the files have their names it refers to them where they lie
                _publish(home, path / name, ready, functools.partial(_write_index, ready / name, path))
        for name in names:  # the index is the last of them
            _publish(home, path / name, ready, functools.partial(durable.link_or_copy, ready / name))
        stale = [name for name in os.listdir(path) if hugging_face.is_weight_file(name) and name not in names]
        stale.sort(key=lambda name: not name.endswith(".json"))
        home.confirm()
        for name in stale:
            if not (path / name).is_dir():
                (path / name).unlink(missing_ok=True)
        durable.sync_directory(str(path))  # loaders prefer one file to an index: an old one must not come back
    except OSError as error:
        raise DirectoryError.of(error, path=error.filename or path, rank=0, phase="replacing the weights") from error
    home.discard([ready.parent])


def _publish(home: FileHome, final: Path, ready: Path, make: Callable[[Path], None]) -> None:
    staged = ready / "staged"
    make(staged)
    durable.sync_directory(str(ready))  # as in ``publish_link``
    home.confirm()
    durable.publish_file(staged, final)


def _write_index(index: Path, path: Path, staged: Path) -> None:
    """An index for the folder ``path`` that refers to the files beside ``index``."""
    described = json.loads(index.read_bytes())
    folder = index.parent.relative_to(path).as_posix()
    described["weight_map"] = {name: f"{folder}/{file}" for name, file in described["weight_map"].items()}
    durable.write_durably(staged, json.dumps(described).encode())
