"""Writing what was read, in another format: committed like a save, with a manifest, in bounded memory."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from safe_ckpt.adapters import export
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.formats import hugging_face
from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor, single
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.formats.torch_archive import torch_plan
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.names import NamedHomes, open_folder
from safe_ckpt.core.saving.request import Streamed
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import ConfigError, DirectoryError, naming
from safe_ckpt.extensions.assemble import assemble
from safe_ckpt.tools.inspection.tensors import Entry
from safe_ckpt.tools.inspection.values import Mapped

_CONFIG = CheckpointConfig(max_host_bytes=64 << 20, record_events=False)


def write_safetensors(
    path: Path, entries: Mapping[str, Entry], maps: Mapped, *, max_shard_size: str, dtype: torch.dtype | None
) -> CheckpointInfo:
    """Weights in Hugging Face's layout, one tensor at a time in memory. Each name gets its values, tied ones too.

    Raises:
        ConfigError: ``max_shard_size`` is no size.
        StateError: a tensor does not fit safetensors.
        SafeCheckpointError: it could not be written; nothing is there then.
    """
    most_bytes = hugging_face.parse_size(max_shard_size, "--max-shard-size")
    tensors = {name: _lazy(name, entry, maps, dtype) for name, entry in entries.items()}
    return _saved(path, hugging_face.plans(tensors, most_bytes), kind="directory")


def write_archive(path: Path, state: Any) -> CheckpointInfo:
    """One file that ``torch.load`` reads, also with ``weights_only=True``.

    Raises:
        StateError: something in it cannot be saved; names it.
        SafeCheckpointError: it could not be written; nothing is there then.
    """
    plan = torch_plan(path.name, state, strict=True, key="convert")
    return _saved(path, [single(plan, path.name)], kind="file")


def write_dcp(path: Path, state: Mapping[str, Any]) -> CheckpointInfo:
    """A directory that ``torch.distributed.checkpoint.load`` reads, written by torch's own code, with a manifest of ours.

    Raises:
        SafeCheckpointError: it could not be written; nothing is there then.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: TID251 - writes DCP in this process alone
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: TID251 - likewise
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: TID251 - likewise

    def fill(folder: Path) -> None:
        try:
            with naming(rank=0, phase=f"writing {path.name}", path=path), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group, which is meant
                save(dict(state), storage_writer=FileSystemWriter(folder, sync_files=False), no_dist=True)
        except CheckpointException as error:  # a BaseException of torch: what went wrong is in it
            cause = next((one for one, _ in error.failures.values()), error)
            first = (str(cause).splitlines() or [repr(cause)])[0]
            raise DirectoryError(path=str(path), message=f"could not be written: {first}") from cause

    return _saved(path, [], kind="directory", fill=fill)


def _lazy(name: str, entry: Entry, maps: Mapped, dtype: torch.dtype | None) -> LazyTensor:
    kind = getattr(torch, entry.dtype)
    final = dtype if dtype is not None and kind.is_floating_point else kind
    hugging_face.refuse_unsaveable(name, torch.empty(0, dtype=kind, device="cpu"), final)
    fetch: Callable[[], torch.Tensor] = lambda: maps.tensor(entry).to(final).contiguous()  # noqa: E731
    return LazyTensor(dtype=final, shape=entry.shape, fetch=fetch)


def _saved(
    path: Path,
    plans: list[FilePlan],
    *,
    kind: Literal["directory", "file"],
    fill: Callable[[Path], None] | None = None,
) -> CheckpointInfo:
    """Save in one step. ``fill`` writes further files into a folder that it is given."""
    engine = Engine(_CONFIG, extensions=assemble(_CONFIG))
    try:
        home = NamedHomes(engine).hold(path)
        request = export.request_of(home, path, Streamed(files=plans), kind=kind)
        if fill is not None:
            folder = open_folder(engine.coordinator, home, uuid.uuid4().hex, _CONFIG.timeouts.barrier_s)
            try:
                fill(folder)
            except BaseException:
                home.abandon(folder)
                raise
            request = replace(request, on_commit=replace(request.on_commit, prefilled=folder))
        return engine.save(request).result()
    finally:
        engine.close()


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A folder for tensors that must be put together first: on the disk that has room for the result."""
    durable.make_directory(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as folder:
        yield Path(folder)


def refuse_existing(path: Path) -> None:
    """Refuse a destination that exists: converting replaces nothing.

    Raises:
        ConfigError: something is there.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise ConfigError(key=str(path), message="is there already, and converting replaces nothing: give another name")


def dtype_named(name: str) -> torch.dtype | None:
    """A floating-point type by its name; None for "".

    Raises:
        ConfigError: there is no such type.
    """
    if not name:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(key="--dtype", message=f"expected a floating-point type such as bfloat16, got {name!r}")
    return dtype


def as_items(state: Any) -> dict[str, Any]:
    """A state as names to parts; tensors without such a name are the model."""
    named = isinstance(state, Mapping) and all(isinstance(key, str) for key in state)
    return dict(state) if named and not any(isinstance(p, torch.Tensor) for p in state.values()) else {"model": state}
