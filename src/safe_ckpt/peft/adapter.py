"""The adapter of a PEFT model, and the base below it.

Tensors of the base have the names that they have without PEFT, so a base is the same before and after it was wrapped.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.save_and_load import get_peft_model_state_dict

from safe_ckpt.adapters import FilePlan
from safe_ckpt.adapters.extras import dtensor, file_plan, hugging_face, refuse_short, wrapped
from safe_ckpt.errors import RestoreError, StateError

logger = logging.getLogger(__name__)
STEM = "adapter_model"
BASE = "base.json"
_CONFIG = "adapter_config.json"
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_WRAPPED = ("base_layer", "original_module", "token_adapter")


def base_hash(model: torch.nn.Module, without: Collection[str] = ()) -> str:
    """A hash of the names, types, shapes and bytes of a base, with or without adapters on it. As hex; order does not matter.

    Args:
        model: the base, or a PEFT model on it.
        without: names of tensors that do not count.

    Raises:
        StateError: some tensors are sharded, so no rank has all bytes, or lost their memory; or adapters are merged.

    Example:
        ```python
        assert base_hash(base) == base_hash(tuned)  # the adapters on it do not count
        ```
    """
    whole = xxhash.xxh3_128()
    for name, tensor in sorted(_base_of(model).items()):
        if name in without:
            continue
        if dtensor.is_sharded(tensor):
            raise StateError(key=name, message="is sharded: the base of an adapter is hashed where it is whole")
        refuse_short(name, tensor)
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            numbers: Any = file_plan.values_of(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            whole.update(memoryview(numbers))
    return whole.hexdigest()


def check_base(model: torch.nn.Module, directory: str | os.PathLike[str]) -> None:
    """Refuse to put an exported adapter on another base than it was trained on.

    Args:
        model: the base, or a PEFT model on it.
        directory: where the adapter was exported to. One without a record of its base, such as PEFT's own, is not checked.

    Raises:
        RestoreError: the bases differ.

    Example:
        ```python
        with Checkpointer("runs/lora") as ckpt:
            ckpt.export(tuned, "adapter", adapters_only=True).result()
        check_base(base, "adapter")  # then load it with a loader of your own
        ```
    """
    path = Path(directory) / BASE
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        known, without = described["xxh3_128"], frozenset(described["without"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise RestoreError(
            path=str(directory), key=BASE, message=f"does not say which base it is of: {error}"
        ) from error
    if (now := base_hash(model, without)) != known:
        message = f"the adapter was trained on a base with the hash {known}, and this one has {now}: give it that base"
        raise RestoreError(path=str(directory), key="base", message=message)


def load_adapter(model: torch.nn.Module, directory: str | os.PathLike[str], **options: Any) -> PeftModel:
    """Put an exported adapter on its base.

    Args:
        model: the base.
        directory: where the adapter was exported to.
        options: of ``PeftModel.from_pretrained``.

    Raises:
        RestoreError: it was trained on another base.

    Example:
        ```python
        with Checkpointer("runs/lora") as ckpt:
            ckpt.export(tuned, "adapter", adapters_only=True).result()
        again = load_adapter(base, "adapter", is_trainable=True)  # RestoreError on any other base
        ```
    """
    check_base(model, directory)
    return PeftModel.from_pretrained(model, os.fspath(directory), **options)


def tensors_of(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors that PEFT saves of the active adapter.

    Raises:
        StateError: it is no PEFT model with one active adapter.
    """
    inner = hugging_face.unwrapped(model)
    if not isinstance(inner, PeftModel) or not isinstance(inner.active_adapter, str):
        message = "adapters_only needs a PeftModel with one active adapter"
        raise StateError(key="export: model", message=message)
    with _bare(inner):  # PEFT finds nothing in a layer with activation checkpointing around it
        tensors: Mapping[str, torch.Tensor] = get_peft_model_state_dict(inner, adapter_name=inner.active_adapter)
    return tensors


@contextlib.contextmanager
def _bare(model: torch.nn.Module) -> Iterator[None]:
    """While this is entered, the modules of a model are there without their wrappers."""
    changed = []
    for parent in list(model.modules()):
        for name, part in parent._modules.items():
            at = part
            while at is not None and wrapped(at):
                at = at._modules[wrapped(at)]
            if at is not part:
                changed.append((parent, name, part, at))
    try:
        for parent, name, _, at in changed:
            parent._modules[name] = at
        yield
    finally:
        for parent, name, part, _ in changed:
            parent._modules[name] = part


def files_beside(model: torch.nn.Module) -> list[FilePlan]:
    """PEFT's own description of the active adapter, and the hash of the base, unless PEFT has changed that."""
    inner: Any = hugging_face.unwrapped(model)
    config = copy.copy(inner.peft_config[inner.active_adapter])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        described = Path(folder, _CONFIG).read_bytes()
    files = [file_plan.bytes_plan(_CONFIG, described)]
    if str(getattr(config, "init_lora_weights", "")).startswith(_CHANGES_BASE):
        message = "the base of the adapter is not recorded: PEFT changes it for init_lora_weights=%r"
        logger.warning(message, config.init_lora_weights)
        return files
    # Biases that are trained are in the adapter's file.
    trains_biases = getattr(config, "bias", "none") != "none"
    without = sorted(name for name in _base_of(inner) if name.endswith("bias")) if trains_biases else []
    base = {"xxh3_128": base_hash(inner, without), "without": without}
    return [*files, file_plan.bytes_plan(BASE, json.dumps(base).encode() + b"\n")]


def _base_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the base by the names that they have without PEFT."""
    inner = hugging_face.unwrapped(model)
    base: torch.nn.Module = inner.get_base_model() if isinstance(inner, PeftModel) else inner
    if any(isinstance(part, BaseTunerLayer) and part.merged for part in base.modules()):
        raise StateError(
            key="export: model", message="an adapter is merged into the base: call unmerge_adapter() first"
        )
    found = {}
    for name, value in base.state_dict().items():
        plain = _plain(base, name)
        if plain and isinstance(value, torch.Tensor):
            found[plain] = value
    return found


def _plain(base: torch.nn.Module, name: str) -> str:
    """A name without what adapters and wrappers put into it; "" for what is an adapter's."""
    parts = []
    at: torch.nn.Module | None = base
    for part in name.split("."):
        while at is not None and (inner := wrapped(at)) and inner != part:  # a state dict may leave it out
            at = at._modules[inner]
        if at is not None and wrapped(at):
            at = at._modules[part]
            continue
        if isinstance(at, BaseTunerLayer | AuxiliaryTrainingWrapper):
            if part not in _WRAPPED:
                return ""
        else:
            parts.append(part)
        at = at._modules.get(part) if at is not None else None
    return ".".join(parts)
