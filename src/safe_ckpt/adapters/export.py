"""A model's weights as other tools read them, also when every rank has only a part: gathered, written and committed."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from safe_ckpt.core.formats import hugging_face
from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor, view_of
from safe_ckpt.core.formats.names import plain_names
from safe_ckpt.core.formats.torch_reading import outside_inference_mode
from safe_ckpt.core.home.candidates import WEIGHTS
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.saving.names import NamedHomes, refuse
from safe_ckpt.core.saving.request import (
    Destination,
    Facts,
    OnCommit,
    Payload,
    PlanningFailed,
    SaveRequest,
    Snapshot,
    Streamed,
)
from safe_ckpt.core.sharding import dtensor, gather
from safe_ckpt.core.sharding.tensor_queue import TensorQueue
from safe_ckpt.core.storage.objects.options import refuse_url
from safe_ckpt.core.storage.objects.place import absolute
from safe_ckpt.errors import ConfigError, SaveError


class Adapter(Protocol):
    """How the part of a model is found that was trained on top of a base.

    Attributes:
        STEM: how the names of its files begin.
    """

    STEM: str

    def tensors_of(self, model: Any, /) -> Mapping[str, torch.Tensor]:
        """The part."""

    def files_beside(self, model: Any, /) -> list[FilePlan]:
        """Files that describe it. On rank 0."""


class Exporter:
    """Writes weights alone. One per pipeline; every method is called on every rank, on the thread that trains.

    Args:
        engine: where the ranks meet.
        homes: where directories are held.
    """

    def __init__(self, engine: Engine, homes: NamedHomes) -> None:
        self._engine = engine
        self._held_homes = homes

    @outside_inference_mode()
    def export(
        self,
        model: Mapping[str, Any] | torch.nn.Module,
        directory: str | os.PathLike[str],
        *,
        format: str,  # noqa: A002 - the name that users know from other exporters
        max_shard_size: int | str,
        dtype: torch.dtype | None,
        adapter: Adapter | None = None,
    ) -> OpenSave:
        """See ``Checkpointer.export``. With ``adapter`` only what that takes of the model."""
        refuse_url(directory, "export: directory")
        path = absolute(directory)
        tensors: dict[str, torch.Tensor] = {}
        most_bytes = 0

        def look() -> bool:
            nonlocal tensors, most_bytes
            if format != "safetensors":
                raise ConfigError(key="export: format", message=f'expected "safetensors", got {format!r}')
            most_bytes = hugging_face.parse_size(max_shard_size, "export: max_shard_size")
            tensors = _tensors_of(adapter.tensors_of(model) if adapter is not None else model, dtype)
            return dtype is not None or any(map(dtensor.is_sharded, tensors.values()))

        def decide(gathered: Mapping[int, bool]) -> dict[str, Any]:
            refuse(path, WEIGHTS)
            names = _once(tensors) if adapter is None else list(tensors)  # PEFT knows of no ties
            return {"names": names, "gathered": any(gathered.values())}

        values = {"path": path, "max_shard_size": max_shard_size, "dtype": dtype}
        kept = self._engine.agree("export", must_match=values, local=look, decide=decide, phase="planning the export")
        home = self._held_homes.hold(path)
        chosen = {name: tensors[name] for name in kept["names"]}
        stream = _Stream(self._engine, path.name, chosen, dtype)
        planned: list[FilePlan] = []
        payload: Payload
        try:
            if self._engine.rank == 0:
                lazy = stream.lazies() if kept["gathered"] else chosen
                planned = hugging_face.plans(lazy, most_bytes, hugging_face.STEM if adapter is None else adapter.STEM)
                planned += adapter.files_beside(model) if adapter is not None else []
            payload = Streamed(files=planned, feed=stream.feed) if kept["gathered"] else Snapshot(files=planned)
        except Exception as problem:  # the other ranks must learn of it
            payload = PlanningFailed(error=problem)
        return self._engine.save(request_of(home, path, payload))


def request_of(
    home: FileHome, path: Path, payload: Payload, *, kind: Literal["directory", "file"] = "directory"
) -> SaveRequest:
    """Return the request with which ``path`` becomes weights alone; other files in a directory are kept."""
    kept_files = (
        OnCommit(keep_foreign=lambda name: not hugging_face.is_weight_file(name)) if kind == "directory" else OnCommit()
    )
    return SaveRequest(
        destination=Destination(home=home, path=path, kind=kind),
        payload=payload,
        facts=Facts(step=0, notes={"adapter": WEIGHTS}, unexamined=("*",)),
        on_commit=kept_files,
        patient=True,
    )


class _Stream:
    """Gathers on the caller's thread what the background writes."""

    def __init__(
        self, engine: Engine, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
    ) -> None:
        self._engine = engine
        self._tensors = tensors
        self._dtype = dtype
        self._timeout_s = engine.config.timeouts.lengthy_s
        self._handover = TensorQueue(name, gather.STAGING_BYTES, self._timeout_s)

    def lazies(self) -> dict[str, LazyTensor]:
        """Return tensors that are fetched when their turns come to be written."""
        return {name: self._lazy(name, tensor) for name, tensor in self._tensors.items()}

    def _lazy(self, name: str, tensor: torch.Tensor) -> LazyTensor:
        dtype = _final(tensor, self._dtype)
        size = math.prod(tensor.shape) * dtype.itemsize  # a ShardedTensor does not say how many elements it has
        return LazyTensor(
            dtype=dtype,
            shape=tuple(tensor.shape),
            fetch=functools.partial(self._handover.take, name),
            release=functools.partial(self._handover.release, size),
        )

    def feed(self, handle: OpenSave) -> None:
        """Gather everything. The ``handle`` of the save reports what goes wrong, on every rank."""

        def check() -> None:
            if handle.done():
                raise handle.unreported or SaveError(name=handle.name, cause="it is over", phase="gather")

        stream = gather.iterate(self._tensors, self._timeout_s, self._engine.group, self._dtype, gather.STAGING_BYTES)
        try:
            for name, tensor in stream:
                if tensor is not None and tensor.numel():
                    try:
                        self._handover.give(name, tensor, check)
                    except Exception as error:
                        stream.throw(error)  # the others learn the cause
                del tensor
        except Exception as error:
            self._handover.fail(error)
        except BaseException:
            self._handover.fail(SaveError(name=handle.name, cause="interrupted", phase="gather"))
            raise
        finally:
            stream.close()  # also after an interrupt: the other ranks learn of it, and the timeouts are restored


def _tensors_of(model: Mapping[str, Any] | torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    module = hugging_face.unwrapped(model) if isinstance(model, torch.nn.Module) else None
    found = gather.named_tensors(model if module is None else module)
    tensors = {name: found[key] for key, name in plain_names(found, module).items()}
    for name, tensor in tensors.items():
        for part in dtensor.parts_of(tensor):
            hugging_face.refuse_unsaveable(name, part, _final(part, dtype))
    return tensors


def _final(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _once(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names; of tensors that share one memory only the first. Rank 0 decides, because its parts are not empty."""
    seen: set[object] = set()
    kept = []
    for name, tensor in tensors.items():
        local = dtensor.local_of(tensor)
        identity = (str(local.device), local.untyped_storage().data_ptr(), tuple(tensor.shape), view_of(local))
        if local.numel() and identity in seen:
            continue
        seen.add(identity)
        kept.append(name)
    return kept
