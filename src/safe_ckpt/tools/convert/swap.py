"""A model's weights as a folder that servers load, put in place of the one before by one rename."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import by_storage
from safe_ckpt.errors import ConfigError, CorruptCheckpointError
from safe_ckpt.tools.convert import target
from safe_ckpt.tools.convert.source import weights_of
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.content import read_structure
from safe_ckpt.tools.inspection.fetch import fetch
from safe_ckpt.tools.inspection.listing import one_of
from safe_ckpt.tools.inspection.values import Mapped

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_BESIDE = ("config.json", "generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt")
_STARTS = ("tokenizer", "special_tokens", "added_tokens", "preprocessor", "spiece")
_MOST_BYTES = 64 << 20


def export(checkpoint: Place, out: Path, *, item: str = "", dtype: str = "") -> Path:
    """Verify a checkpoint, and put its weights at ``out`` in Hugging Face's layout.

    What lies in ``out`` and is no weights stays; what the checkpoint has of a model's configuration replaces it. A server that
    reads the folder before keeps its files open, and whoever opens it next gets the new one as a whole.

    Args:
        checkpoint: of any tool; of ours in an object store.
        out: a folder that was exported before, or has no weights of another origin; or nothing.
        item: see ``weights_of``.
        dtype: of floating-point tensors; "" for their own.

    Raises:
        ConfigError: ``out`` is a file, or there is no such type.
        CorruptCheckpointError: the bytes are not those that were written; ``out`` stays as it is.
        SafeCheckpointError: it could not be written; likewise.
        OSError: likewise.
    """
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir()):
        raise ConfigError(key=str(out), message="is no folder: give the name of one, or a new one")
    number = uuid.uuid4().hex[:8]
    with target.scratch_beside(out) as scratch:
        source = by_storage(checkpoint, lambda path: path, lambda store: fetch(one_of(store), scratch))
        for bad in verify_tasks([plan_tasks(source)])[0].damaged:
            raise CorruptCheckpointError(path=str(checkpoint), file=bad.file, message=bad.reason)
        staged = scratch / f"{out.name}.{number}"
        entries = weights_of(read_structure(source), item, source)
        target.write_safetensors(staged, entries, Mapped(), max_shard_size="5GB", dtype=target.dtype_named(dtype))
        _carry_over(source, staged, out)
        aside = scratch / f"{out.name}.before"
        durable.publish_directory(staged, out, aside)
    return out


def _carry_over(source: Path, staged: Path, out: Path) -> None:
    """Copy small files that are no weights: those of the checkpoint, then those that lie in ``out``."""
    for folder, all_files in ((source, False), (out, True)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_weights = path.name.endswith(_WEIGHTS) or path.name == MANIFEST_NAME
            is_meant = all_files or path.name in _BESIDE or path.name.startswith(_STARTS)
            if is_weights or not is_meant or not path.is_file() or (staged / path.name).exists():
                continue
            if path.stat().st_size <= _MOST_BYTES:
                durable.write_durably(staged / path.name, path.read_bytes())
