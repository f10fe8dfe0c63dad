"""``save_checkpoint``: from a DeepSpeed engine to a request of the core.

DeepSpeed's own code decides what each file holds. It runs with a checkpoint engine that plans files and writes none, and
without its barriers: no file is on disk yet. Its scripts and the NVMe swap files are saved separately.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine as upstream
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.utils import groups

from safe_ckpt.adapters import Attempt, Engine, FilePlan, OnCommit, OpenSave, Patch, Planned, torch_file
from safe_ckpt.adapters.extras import Pointer, checked_metrics, export, file_plan, presence
from safe_ckpt.adapters.planning import note_models
from safe_ckpt.deepspeed import arguments, directories, nvme
from safe_ckpt.deepspeed.directories import TagSaver
from safe_ckpt.errors import DirectoryError, StateError
from safe_ckpt.layouts.table import LATEST

logger = logging.getLogger(__name__)
_FOLDER = os.path.join(os.sep, "captured")  # nothing is made there
_EXECUTABLE = 0o755


def save(
    saver: TagSaver,
    save_dir: object,
    tag: object,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen_parameters: bool,
    metrics: Mapping[str, Any],
) -> OpenSave:
    """Take a snapshot and have it written as ``tag`` in ``save_dir``. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``Handle.save_checkpoint``.
    """
    core, engine = saver.engine, saver.owner

    def checked() -> tuple[Path, str]:
        return arguments.checked_directory(save_dir, "save_dir"), arguments.checked_tag(tag)

    def check() -> dict[str, object]:
        top, name = checked()
        saver.wait_above(top / name)
        checked_metrics(metrics)
        options = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen_parameters}
        return {"path": top / name, **options}

    arguments.agree(core, "save_checkpoint", check, lambda: directories.refuse_what_stands_there(*checked()))
    top, name = checked()
    home = saver.hold(top, name)
    planned, scripts = plan_tag(core, engine, name, client_state, exclude_frozen_parameters=exclude_frozen_parameters)
    if saver.data_place is not None:
        planned = Planned.joined([planned, Planned(files=[saver.data_place.file()])])
    pointers = [Pointer(path=top / script, data=data, mode=_EXECUTABLE) for script, data in scripts.items()]
    if save_latest:  # it comes last
        pointers.append(Pointer(path=top / LATEST, data=name.encode(), is_for_resume=True))
    note_models(core, lambda: [engine.module])
    return saver.save(
        home,
        top / name,
        planned.payload(),
        step=engine.global_steps,
        notes={"latest": save_latest, "tag": name, **planned.notes},
        metrics=checked_metrics(metrics),
        on_commit=OnCommit(
            keep_foreign=lambda name: not directories.is_state(name),
            pointers=pointers,
            retention=saver.retention,
        ),
    )


def save_weights(
    saver: TagSaver, save_dir: object, save_filename: object, *, exclude_frozen_parameters: bool
) -> OpenSave | None:
    """Write what ``save_16bit_model`` writes, as one file that is replaced as a whole. Every rank calls this.

    Returns:
        None when DeepSpeed's settings say that nothing is written.

    Raises:
        SafeCheckpointError: see ``Handle.save_16bit_model``.
    """

    def check() -> dict[str, object]:
        path = arguments.checked_file(save_dir, save_filename)
        return {"path": path, "exclude_frozen_parameters": exclude_frozen_parameters}

    def refuse_directory() -> None:
        path = arguments.checked_file(save_dir, save_filename)
        if presence.is_directory(path):
            message = "is a directory: give the name of a file"
            raise DirectoryError(path=str(path), message=message, rank=0, code=errno.EISDIR)

    core, engine = saver.engine, saver.owner
    path: Path = arguments.agree(core, "save_16bit_model", check, refuse_directory)["path"]
    # Of the class: the instance's own is the one that calls this.
    write = functools.partial(
        type(engine).save_16bit_model, engine, _FOLDER, path.name, exclude_frozen_parameters=exclude_frozen_parameters
    )
    captured = _captured(engine, _FOLDER, write, {})
    if captured.result is False:  # as its settings have it, so on every rank
        return None
    planned = Planned(files=[file_plan.single(file, path.name) for file in captured.files], error=captured.error)
    request = export.request_of(saver.names.hold(path), path, planned.payload(), kind="file")
    return core.save(dataclasses.replace(request, facts=dataclasses.replace(request.facts, step=engine.global_steps)))


def plan_tag(
    core: Engine,
    engine: Any,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    exclude_frozen_parameters: bool = False,
    below: str = "",
) -> tuple[Planned, dict[str, bytes]]:
    """Plan what ``save_checkpoint`` writes. Every rank calls this.

    Args:
        core: where the ranks meet.
        engine: a ``DeepSpeedEngine``.
        tag: the name of the checkpoint.
        client_state: as for DeepSpeed.
        exclude_frozen_parameters: the same.
        below: where the tag lies in the checkpoint, with a slash at its end; "" when it is the checkpoint.

    Returns:
        The files of this rank, and name -> content of the scripts beside the tags.

    Raises:
        SafeCheckpointError: the swap files cannot be copied; the same on every rank.
    """
    swapped = nvme.plan_swap_files(core, engine, below)

    def write() -> None:
        # Of the class: the instance's own is the one that calls this.
        type(engine).save_checkpoint(
            engine,
            _FOLDER,
            tag,
            client_state=dict(client_state),
            save_latest=False,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    captured = _captured(engine, os.path.join(_FOLDER, tag), write, client_state)
    files = [dataclasses.replace(file, path=f"{below}{file.path}") for file in captured.files]
    own = Planned(files=files, folders=[tag] if below else (), error=captured.error)
    return Planned.joined([swapped, own]), captured.scripts


@dataclass(kw_only=True)
class Captured:
    """The files of one rank.

    Attributes:
        files: with paths relative to the tag.
        scripts: name -> content of what DeepSpeed puts beside the tags; on rank 0.
        result: what it returned.
        error: what it raised.
    """

    files: list[FilePlan] = field(default_factory=list)
    scripts: dict[str, bytes] = field(default_factory=dict)
    result: object = None
    error: Exception | None = None


def _captured(engine: Any, folder: str, write: Callable[[], object], client_state: Mapping[str, Any]) -> Captured:
    """Run the engine's own code and collect what it would write to ``folder``. Every rank calls this.

    It never raises on one rank alone: an error is in the result, for all ranks to learn of.
    """
    captured = Captured()
    listener = Listener(captured, folder, engine.checkpoint_engine)
    attempt = Attempt()
    with attempt:
        with _listening(engine, listener, client_state):
            captured.result = write()
        if listener.wants_scripts:
            with tempfile.TemporaryDirectory() as scripts:
                engine._copy_recovery_script(scripts)
                captured.scripts = {file.name: file.read_bytes() for file in Path(scripts).iterdir()}
    if attempt.error is not None:
        captured.error = attempt.error
        # The other ranks do this too, and it may be a collective.
        if engine._optimizer_has_ckpt_event_epilogue():
            with contextlib.suppress(Exception):
                engine.optimizer.checkpoint_event_epilogue()
    return captured


class Listener(CheckpointEngine):  # type: ignore[misc]
    """A checkpoint engine that plans files. Loading is left to the engine's own one.

    Args:
        captured: gets the files.
        folder: what their paths begin with.
        before: the engine's own.
    """

    def __init__(self, captured: Captured, folder: str, before: Any) -> None:
        super().__init__()
        self.name = "safe_ckpt"
        self.wants_scripts = False
        self._captured = captured
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
            raise StateError(key=name, message="DeepSpeed writes it to a folder of its own, which is not supported")
        self._captured.files.append(torch_file(name, state_dict))

    def load(self, path: str, map_location: Any = None) -> Any:
        """As the engine's own."""
        return self._before.load(path, map_location=map_location)

    def commit(self, info: Any) -> bool:
        """Nothing to do."""
        del info
        return True


@contextlib.contextmanager
def _listening(engine: Any, listener: Listener, client_state: Mapping[str, Any]) -> Iterator[None]:
    def asked(_: str) -> None:
        listener.wants_scripts = True

    stubs = {
        "checkpoint_engine": listener,
        "_checkpoint_tag_validation": lambda _: None,
        "_copy_recovery_script": asked,
        "_common_checkpoint_state": functools.partial(_common_state, engine, client_state),
        "zero_nvme_offload_optimizer": lambda: False,
    }
    if not engine.has_moe_layers:  # with such layers DeepSpeed sets it during the save
        # This rank writes the model's states as with DeepSpeed's own plain engine in one shared directory. The engine's own
        # answer differs with its own writer, and with ``use_node_local_storage``, where one rank of every node writes a file
        # of the same name.
        first = engine.zero_optimization_partition_weights() and engine.is_first_weights_partition_group()
        stubs["save_non_zero_checkpoint"] = bool(first or groups._get_sequence_data_parallel_rank() == 0)
    with Patch(engine, stubs), Patch(upstream.dist, {"barrier": _no_barrier}):
        yield


def _common_state(engine: Any, client_state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    state = type(engine)._common_checkpoint_state(engine, *args, **kwargs)
    replaced = sorted(str(name) for name in client_state if state.get(name) is not None)
    if replaced and engine.global_rank == 0:
        logger.warning("client_state replaces what DeepSpeed itself saves as %s", ", ".join(replaced))
    return state


def _no_barrier(*_: Any, **__: Any) -> None:
    """Do nothing: the ranks meet before and after, under deadlines."""
