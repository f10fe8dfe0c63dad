"""``load_checkpoint``: which tag, verified and agreed by all ranks, before DeepSpeed reads it."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine as upstream
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from safe_ckpt.adapters import Engine, Patch
from safe_ckpt.adapters.extras import HIDDEN, not_found, one_resume, presence, refuse_missing
from safe_ckpt.adapters.pickles import refuse_code
from safe_ckpt.adapters.planning import go_on
from safe_ckpt.deepspeed import arguments, directories, nvme, universal
from safe_ckpt.deepspeed.data_place import EngineDataPlace
from safe_ckpt.deepspeed.directories import TagSaver
from safe_ckpt.errors import CorruptCheckpointError, NoValidCheckpointError
from safe_ckpt.layouts.table import DEEPSPEED

logger = logging.getLogger(__name__)


def load(
    saver: TagSaver,
    load_dir: object,
    tag: object,
    restore: Callable[[str, str | None], Any],
    *,
    optimizer_states: bool,
) -> Any:
    """Load a tag, or the one that ``latest`` names. Every rank calls this. Returns what ``restore`` returned.

    Args:
        saver: of the installed engine.
        load_dir: the directory of tags, as the caller gave it.
        tag: which one, as the caller gave it; None for the latest.
        restore: DeepSpeed's own loading of a tag; with None it does what it does without ``latest``.
        optimizer_states: whether the optimizer's states are wanted.

    Raises:
        SafeCheckpointError: see ``Handle.load_checkpoint``.
    """

    def check() -> dict[str, object]:
        directory = arguments.checked_directory(load_dir, "load_dir")
        return {"directory": directory, "tag": None if tag is None else arguments.checked_tag(tag)}

    begun, core, engine = time.monotonic(), saver.engine, saver.owner
    agreed = arguments.agree(core, "load_checkpoint", check)
    folder, wanted = agreed["directory"], agreed["tag"]
    if engine.load_universal_checkpoint():
        # It has no checksums: only whether it is complete can be checked.
        name = core.agree("load_checkpoint", decide=lambda _: wanted or universal.latest(folder))
        one_resume.apply(core, lambda: universal.refuse_incomplete(engine, folder / name))
        one_resume.apply(core, lambda: refuse_code(folder / name, core.rank, core.coordinator.size))
        return _restored(core, engine, lambda: restore(str(folder), name))
    if core.config.mirror.url is not None:
        saver.fetch_tag(folder, wanted)
    plan = core.agree("load_checkpoint", decide=lambda _: _survey(folder, wanted))
    if plan["repair"]:
        saver.repair(folder / plan["repair"])
        plan = core.agree("load_checkpoint", decide=lambda _: _survey(folder, wanted))
    chosen, rejected = _first_good(saver, engine, folder, plan["order"], asked=wanted is not None)
    # With ZeRO-3 and no optimizer states DeepSpeed would read the whole weights of the tag that ``latest`` names.
    whole = functools.partial(upstream.get_fp32_state_dict_from_zero_checkpoint, tag=chosen)
    with Patch(upstream, {"get_fp32_state_dict_from_zero_checkpoint": whole}):
        result = _restored(core, engine, lambda: restore(str(folder), chosen), folder / chosen if chosen else None)
    if chosen is not None:
        path = folder / chosen
        nvme.restore_own_files(core, engine, path)
        nvme.resume_all(core, {path: engine}, optimizer_states=optimizer_states)
        place = saver.data_place
        if place is not None and optimizer_states:
            one_resume.apply(core, functools.partial(place.load, path))
        elif place is None and optimizer_states and engine.global_rank == 0:
            EngineDataPlace.warn_if_left(path)
        go_on(core, lambda: [engine.module])
        saver.resumed(path, begun, rejected)
    return result


def run_of(saver: TagSaver, load_dir: object) -> tuple[Path, str | None, bool]:
    """The directory of tags, the tag where ``load_dir`` is one, and whether there is none at all. Every rank calls this.

    Raises:
        CheckpointNotFoundError: ``load_dir`` names a tag that is not there.
        SafeCheckpointError: see ``Handle.resume``.
    """

    def look(folder: Path) -> dict[str, Any]:
        if presence.is_directory(folder) and DEEPSPEED.is_one(folder):
            return {"tag": folder.name, "fresh": False}
        refuse_missing(folder)
        return {"tag": None, "fresh": not directories.order(folder, None)}

    def check() -> dict[str, object]:
        return {"directory": arguments.checked_directory(load_dir, "load_dir")}

    folder: Path = arguments.agree(saver.engine, "resume", check)["directory"]
    found = saver.engine.agree("resume", must_match={"directory": folder}, decide=lambda _: look(folder))
    return (folder.parent if found["tag"] else folder), found["tag"], found["fresh"]


def _restored(core: Engine, engine: Any, restore: Callable[[], Any], path: Path | None = None) -> Any:
    """Return what ``restore`` returns on this rank, once it has succeeded on all ranks."""
    results: list[Any] = []
    with plain_reading(engine):
        one_resume.apply(core, lambda: results.append(restore()), path, "load_checkpoint(..., tag=...)")
    return results[0]


def plain_reading(engine: Any) -> contextlib.AbstractContextManager[object]:
    """Within this block DeepSpeed reads with its plain engine: that of ``checkpoint.writer`` (0.19.8) cannot read."""
    if not engine.checkpoint_writer_enabled():
        return contextlib.nullcontext()
    return Patch(engine, {"checkpoint_engine": TorchCheckpointEngine()})


def _survey(folder: Path, tag: str | None) -> dict[str, Any]:
    wanted = tag if tag is not None else directories.latest_tag(folder)
    lost = wanted is not None and not presence.is_directory(folder / wanted)
    # A job was killed while it replaced the tag, where the kernel cannot exchange directories: the tag is in ``trash``, or
    # complete in ``pending``.
    path = folder / wanted if wanted is not None else folder
    repair = lost and any((path.parent / HIDDEN / "trash").glob(f"*/{path.name}"))
    if tag is not None and lost and not repair:
        raise not_found(path, [one.relative_to(folder).as_posix() for one in directories.order(folder, None)])
    return {
        "repair": path.parent.relative_to(folder).as_posix() if repair else "",
        "order": [path.relative_to(folder).as_posix() for path in directories.order(folder, tag)],
    }


def _first_good(saver: TagSaver, engine: Any, folder: Path, order: list[str], *, asked: bool) -> tuple[str | None, int]:
    rejected: dict[str, str] = {}
    for name in order:
        path = folder / name
        nvme.refuse_unfit(saver.engine, {path: engine})
        try:
            saver.verify(path)
        except CorruptCheckpointError as error:
            if asked:
                raise
            rejected[name] = error.message
            logger.warning("%s cannot be used: %s", path, error.message)
            continue
        return name, len(rejected)
    if rejected:
        message = "there are checkpoints, but none is usable. Repair one, or move them all elsewhere to start afresh"
        raise NoValidCheckpointError(path=str(folder), message=message, rejected=rejected)
    return None, 0
