"""Catches the files that a Trainer writes into one folder, so that they are written in the background.

Whatever reaches ``torch.save`` or safetensors for a file in that folder is planned, also from methods that the user overrides;
small files that are written in other ways (JSON, tokenizers) land in the folder itself. What FSDP2 gives to
``torch.distributed.checkpoint`` is kept, for all processes plan it together.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import modeling_utils

from safe_ckpt.adapters import FilePlan, Patch, torch_file
from safe_ckpt.adapters.extras import refuse_short
from safe_ckpt.adapters.extras import safetensors as safetensors_format


class Catch:
    """The files and shards that were caught; a later file replaces an earlier one.

    Attributes:
        files: by their path within the folder, in the order in which they were written first.
        shards: the state dicts for ``torch.distributed.checkpoint``, by the name of the folder that they go into.
    """

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, FilePlan] = {}
        self.shards: dict[str, Mapping[str, Any]] = {}
        self._folder = folder
        self._thread = threading.get_ident()

    def name_of(self, target: Any) -> str | None:
        """The path within the folder; None for a target elsewhere, or from another thread."""
        if not isinstance(target, str | os.PathLike) or threading.get_ident() != self._thread:
            return None
        path = Path(os.path.abspath(target))
        return path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else None


@contextlib.contextmanager
def catching(folder: Path, *, shards: bool = False, besides: Collection[str] = ()) -> Iterator[Catch]:
    """While this is entered, files that this thread saves into ``folder`` are caught instead of written.

    Args:
        folder: where they would go.
        shards: whether what goes to ``torch.distributed.checkpoint`` is caught, too.
        besides: names that ``torch.save`` must not write at all.
    """
    catch = Catch(folder)
    save, save_file = torch.save, safetensors.torch.save_file

    def caught_save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        name = catch.name_of(f)
        if name in besides:
            return
        # Transformers deletes its empty placeholder files itself, so they must be on disk.
        if name is None or (isinstance(obj, dict) and not obj):
            save(obj, f, *args, **kwargs)
        else:
            catch.files[name] = torch_file(name, obj)

    def caught_save_file(
        tensors: dict[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        name = catch.name_of(filename)
        for key, tensor in tensors.items():
            refuse_short(f"{name or filename}: {key}", tensor)
        # Data that does not fit goes to safetensors itself, whose error says why.
        if name is None or kwargs or not tensors or not safetensors_format.fits_safetensors(dict(tensors)):
            save_file(tensors, filename, metadata=dict(metadata) if metadata else None, **kwargs)
        else:
            catch.files[name] = safetensors_format.safetensors_plan(name, dict(tensors), metadata)

    with Patch(torch, {"save": caught_save}) as patch:
        patch.put(safetensors.torch, {"save_file": caught_save_file})
        patch.put(modeling_utils, {"safe_save_file": caught_save_file})
        if shards:
            _catch_shards(catch, patch)
        yield catch


def _catch_shards(catch: Catch, patch: Patch) -> None:
    import torch.distributed.checkpoint as dcp  # it takes a while

    home: Any = dcp
    save = home.save

    def caught_shards(state_dict: Mapping[str, Any], *, checkpoint_id: Any = None, **kwargs: Any) -> Any:
        where = getattr(kwargs.get("storage_writer"), "path", None) if checkpoint_id is None else checkpoint_id
        name = catch.name_of(where)
        if name is None:
            return save(dict(state_dict), checkpoint_id=checkpoint_id, **kwargs)
        catch.shards[name] = state_dict
        return None

    patch.put(home, {"save": caught_shards})
