"""What ``engine.save_checkpoint`` would write, collected instead of written: DeepSpeed's own code says what goes where.

It runs with a checkpoint engine that only listens, without its barriers (nothing is on disk yet that anyone could wait for),
without its copy of the NVMe swap files and without its scripts, which are written otherwise.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine as upstream
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from safe_ckpt.core import layout
from safe_ckpt.core.layout import Image
from safe_ckpt.core.stand_ins import StandIns
from safe_ckpt.errors import StateError

_RESERVED = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "num_experts",
        "ds_config",
        "ds_version",
    ]
)


@dataclass(kw_only=True)
class Captured:
    """The files of one rank.

    Attributes:
        images: planned, with paths relative to the tag.
        scripts: name -> content of what DeepSpeed puts beside the tags; on rank 0.
        error: what it raised.
    """

    images: list[Image] = field(default_factory=list)
    scripts: dict[str, bytes] = field(default_factory=dict)
    error: Exception | None = None


def capture(engine: Any, tag: str, client_state: Mapping[str, Any], *, exclude_frozen_parameters: bool) -> Captured:
    """Run the engine's own ``save_checkpoint`` and collect what it would write. Every rank calls this.

    It never raises on one rank alone: what goes wrong is in the result, for all ranks to learn of.

    Args:
        engine: a ``DeepSpeedEngine``.
        tag: the name of the checkpoint.
        client_state: as for DeepSpeed.
        exclude_frozen_parameters: the same.
    """
    found = Captured()
    folder = os.path.join(os.sep, "captured")  # nothing is made there
    listener = Listener(found, os.path.join(folder, tag), engine.checkpoint_engine)
    try:
        if taken := sorted(_RESERVED & set(client_state)):
            raise StateError(key=f"client_state[{taken[0]!r}]", message="is a name that DeepSpeed uses itself")
        with _listening(engine, listener):
            # Of the class: the instance's own is the one that calls this.
            type(engine).save_checkpoint(
                engine,
                folder,
                tag,
                client_state=dict(client_state),
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        if listener.wants_scripts:
            found.scripts = _scripts(engine)
    except Exception as error:  # as the docstring says
        found.error = error
        _tidy(engine)
    return found


class Listener(CheckpointEngine):  # type: ignore[misc]
    """A checkpoint engine that plans files. Everything but saving it leaves to the engine's own one.

    Args:
        found: gets the files.
        folder: what their paths begin with.
        before: the engine's own.
    """

    def __init__(self, found: Captured, folder: str, before: Any) -> None:
        super().__init__()
        self.name = "safe_ckpt"
        self.wants_scripts = False
        self._found = found
        self._folder = folder
        self._before = before

    def create(self, info: Any) -> None:
        """Nothing to do."""
        del info

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do: the directories are made with the checkpoint."""

    def save(self, state_dict: Any, path: str) -> None:
        """Plan one file."""
        name = os.path.relpath(path, self._folder)
        if os.path.dirname(name):
            raise StateError(key=name, message="DeepSpeed writes it to a folder of its own, which is not covered")
        self._found.images.append(layout.torch_image(name, state_dict, strict=False, key=name))

    def load(self, path: str, map_location: Any = None) -> Any:
        """As the engine's own."""
        return self._before.load(path, map_location=map_location)

    def commit(self, info: Any) -> bool:
        """Nothing to do."""
        del info
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As the engine's own."""
        return bool(self._before.is_data_parallel_writer(dp_rank))


@contextlib.contextmanager
def _listening(engine: Any, listener: Listener) -> Iterator[None]:
    def asked(_: str) -> None:
        listener.wants_scripts = True

    stubs = {
        "checkpoint_engine": listener,
        "_checkpoint_tag_validation": lambda _: None,
        "_copy_recovery_script": asked,
        "zero_nvme_offload_optimizer": lambda: False,
    }
    with StandIns(engine, stubs), StandIns(upstream.dist, {"barrier": _no_barrier}):
        yield


def _no_barrier(*_: Any, **__: Any) -> None:
    """The ranks meet before and after, under deadlines."""


def _scripts(engine: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        engine._copy_recovery_script(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _tidy(engine: Any) -> None:
    # The other ranks do it too, and it may be a collective of all.
    if engine._optimizer_has_ckpt_event_epilogue():
        with contextlib.suppress(Exception):
            engine.optimizer.checkpoint_event_epilogue()
