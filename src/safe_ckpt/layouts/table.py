"""How each framework names its checkpoints and what it writes last: one table, for resuming and for listing.

Names, sizes and the ends of archives decide; nothing is unpickled. The step of a Lightning checkpoint, and whether it holds
more than weights, is in its content: ``facts_file`` is the file to read, ``Layout.with_content`` takes what was read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.storage import presence

WEIGHTS_ONLY = "holds weights only, no state of the training"
LATEST = "latest"
"""The file in which DeepSpeed names a tag."""
META = "meta.pt"
"""The file that Lightning writes last into a sharded checkpoint."""
TRAINER_STATE = "trainer_state.json"
"""The file that the Transformers Trainer writes last."""
LIGHTNING_TAG = "checkpoint"
"""The tag that Lightning's ``DeepSpeedStrategy`` gives."""
HF_INDEX = "model.safetensors.index.json"
"""The file that names the weights in files of Hugging Face's layout."""
_RANDOM_STATES = "random_states_0.pkl"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one framework lays its checkpoints out.

    Attributes:
        name: of the layout.
        named: matches the names that the framework gives; its group is the number in the name. None for no pattern.
        is_one: whether the files in a path show that it is one, whatever its name.
        problem: why a checkpoint of this layout is not complete; "" when it is.
    """

    name: str
    named: re.Pattern[str] | None
    is_one: Callable[[Path], bool]
    problem: Callable[[Path], str] = lambda _: ""

    def number_of(self, name: str) -> int | None:
        """The number in a name that the framework gives; None for another name."""
        match = self.named.search(name) if self.named is not None else None
        return int(match.group(1)) if match else None

    def describe(self, path: Path) -> Layout:
        """Describe what is at ``path``, which is of this kind."""
        number = self.number_of(path.name)
        return Layout(name=self.name, step=-1 if number is None else number, problem=self.problem(path))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One checkpoint, judged by its file names.

    Attributes:
        name: of the layout.
        step: the number in its name, or the training step where its content was read; -1 where neither is known.
        problem: why it is not complete, or cannot be resumed from; "" when nothing is wrong so far.
    """

    name: str
    step: int
    problem: str

    def with_content(self, content: object) -> Layout:
        """With the step in the content of ``facts_file``. Weights alone are a problem: no training resumes from them."""
        if not isinstance(content, dict):
            return replace(self, problem="is no checkpoint")
        step = content.get("global_step", -1)
        without_state = not has_training(content) and ("state_dict" in content or self.name != LIGHTNING_FILE.name)
        return replace(
            self, step=step if isinstance(step, int) else -1, problem=WEIGHTS_ONLY if without_state else self.problem
        )


def layout_of(path: Path) -> Layout | None:
    """The layout of the checkpoint at ``path``, whichever tool wrote it; None for one that is not in this table.

    Raises:
        OSError: it could not be looked at.
    """
    is_directory = presence.is_directory(path)
    if not is_directory and not presence.is_file(path):
        return None
    for kind in KINDS if is_directory else (LIGHTNING_FILE,):
        if kind.is_one(path) or (is_directory and kind.number_of(path.name) is not None):
            return kind.describe(path)
    return None


def facts_file(path: Path) -> Path:
    """The file of a Lightning checkpoint that has the training step: the checkpoint itself, or a file in the directory."""
    if not presence.is_directory(path):
        return path
    return path / META if presence.is_there(path / META) else _deepspeed_facts(path)


def lightning_layout_of(path: Path) -> Layout:
    """The layout of a Lightning checkpoint, file or directory, judged by its name."""
    return (LIGHTNING_SHARDED if presence.is_directory(path) else LIGHTNING_FILE).describe(path)


def has_training(content: Mapping[Any, Any]) -> bool:
    """Whether a checkpoint of Lightning has more than weights. It has the loops anyway; with weights alone no schedulers."""
    return "loops" in content and "lr_schedulers" in content


def is_lightning_directory(path: Path) -> bool:
    """Whether a directory is a complete checkpoint of a sharding strategy of Lightning."""
    return LIGHTNING_SHARDED.is_one(path) or LIGHTNING_DEEPSPEED.is_one(path)


def has_states(path: Path) -> bool:
    """Whether DeepSpeed may have written this tag."""
    return presence.is_directory(path) and any(name.endswith("_states.pt") for name in os.listdir(path))


def _deepspeed_facts(path: Path) -> Path:
    """DeepSpeed stores the Trainer's other state in the file of the model's states."""
    # glob takes every error for an empty folder
    names = os.listdir(path / LIGHTNING_TAG) if presence.is_directory(path / LIGHTNING_TAG) else []
    return path / LIGHTNING_TAG / min((name for name in names if name.endswith("model_states.pt")), default="")


def _problem_of_accelerate(path: Path) -> str:
    # Accelerate writes the random states last, before custom objects only: without them the save was interrupted.
    last = path / _RANDOM_STATES
    if not presence.is_there(last):
        return f"it has no manifest, and without {last.name} it is not complete either"
    return "" if presence.ends_as_archive(last) else f"it has no manifest, and {last.name} was not written to its end"


def _problem_of_transformers(path: Path) -> str:
    if not presence.is_there(path / TRAINER_STATE):
        return f"it has no manifest, and without {TRAINER_STATE} it is not complete either"
    files = [file for file in sorted([*path.iterdir(), *path.glob("global_step*/*")]) if ".pt" in file.name]
    cut_off = [file.name for file in files if presence.is_file(file) and not presence.ends_as_archive(file)]
    return f"it has no manifest, and {cut_off[0]} was not written to its end" if cut_off else ""


def _problem_of_torchtitan(path: Path) -> str:
    # DCP writes .metadata last, when all ranks have written.
    if presence.is_there(path / DCP_METADATA):
        return ""
    if presence.is_there(path / HF_INDEX):
        return WEIGHTS_ONLY
    return f"it has no manifest, and without {DCP_METADATA} it is not complete either"


LIGHTNING_FILE = Kind(
    name="Lightning file",
    named=re.compile(r"step=([0-9]{1,18})"),
    is_one=lambda path: path.suffix == ".ckpt" and presence.is_file(path),
)
LIGHTNING_SHARDED = Kind(name="Lightning directory", named=None, is_one=lambda path: presence.is_file(path / META))
LIGHTNING_DEEPSPEED = Kind(
    name="Lightning DeepSpeedStrategy directory",
    named=None,
    # ``latest`` comes last.
    is_one=lambda path: presence.is_file(path / LATEST) and presence.is_file(_deepspeed_facts(path)),
)
ACCELERATE = Kind(
    name="Accelerate checkpoint",
    named=re.compile(r"^checkpoint_([0-9]+)\Z"),
    is_one=lambda path: presence.is_there(path / _RANDOM_STATES),
    problem=_problem_of_accelerate,
)
TRANSFORMERS = Kind(
    name="Transformers checkpoint",
    named=re.compile(r"^checkpoint-([0-9]+)\Z"),
    is_one=lambda path: presence.is_there(path / TRAINER_STATE),
    problem=_problem_of_transformers,
)
DEEPSPEED = Kind(
    name="DeepSpeed tag",
    named=re.compile(r"^global_step([0-9]+)\Z"),
    is_one=has_states,
    problem=lambda path: "" if has_states(path) else "it holds no states of DeepSpeed",
)
DCP = Kind(
    name="torch.distributed.checkpoint directory", named=None, is_one=lambda path: presence.is_file(path / DCP_METADATA)
)
TORCHTITAN = Kind(
    name="torchtitan checkpoint",
    named=re.compile(r"^step-(0|[1-9][0-9]{0,17})\Z"),
    is_one=lambda path: presence.is_file(path / DCP_METADATA) or presence.is_file(path / HF_INDEX),
    problem=_problem_of_torchtitan,
)
KINDS: tuple[Kind, ...] = (LIGHTNING_SHARDED, LIGHTNING_DEEPSPEED, ACCELERATE, TRANSFORMERS, DEEPSPEED, DCP)
"""Those of directories, in the order in which they are recognised."""
