"""What wrote a checkpoint that is not ours, going by the names of its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safe_ckpt.inspection.dcp_reader import METADATA
from safe_ckpt.inspection.files import Found

_DIRECTORIES: Sequence[tuple[str, Callable[[str], bool]]] = (
    ("DeepSpeed directory", lambda name: name.startswith(("zero_pp_rank_", "mp_rank_"))),
    ("DCP directory", lambda name: name == METADATA),
    ("Accelerate directory", lambda name: name.startswith("random_states_")),
    ("Transformers Trainer directory", lambda name: name == "trainer_state.json"),
    ("Hugging Face directory", lambda name: name.endswith(".safetensors")),
)
_FILES = {".ckpt": "Lightning or torch file", ".safetensors": "safetensors file"}


def kind_of(files: Sequence[Found]) -> str:
    """In words. A checkpoint of one file is told by its ending."""
    names = [Path(file.name).name for file in files]
    if len(files) == 1 and files[0].path.suffix in _FILES:
        return _FILES[files[0].path.suffix]
    return next(
        (kind for kind, is_sign in _DIRECTORIES if any(map(is_sign, names))), "files" if len(files) > 1 else "file"
    )
