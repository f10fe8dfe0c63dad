"""Which file a Trainer resumes from, and finishing what a killed run had begun when it committed that file."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from safe_ckpt.adapters import CheckpointInfo, Patch
from safe_ckpt.adapters.extras import (
    HIDDEN,
    Additions,
    Candidate,
    FileHome,
    Link,
    NewCheckpoint,
    keeping_types,
    list_files,
    one_resume,
    read_manifest,
    really_inside,
)
from safe_ckpt.adapters.pickles import refusing
from safe_ckpt.adapters.saver import OpenHome, Saver
from safe_ckpt.config import Timeouts
from safe_ckpt.errors import (
    ConfigError,
    HostileCheckpointError,
    IncompleteCheckpointError,
    NoValidCheckpointError,
    SafeCheckpointError,
    UnsupportedFormatError,
)
from safe_ckpt.layouts.table import WEIGHTS_ONLY, is_lightning_directory
from safe_ckpt.layouts.top_level import look_inside, read_layout
from safe_ckpt.lightning import signals
from safe_ckpt.lightning.directories import BY_NAME, WEIGHTS_NOTE

logger = logging.getLogger(__name__)

REMOVES = "removes"
LINKS = "links"


class ResumingSaver(Protocol):
    """The parts of a saver that resume a Trainer; see ``TrainerSaver`` for the attributes."""

    auto_directory: Path | None
    reads_freely: bool
    searching: bool
    goes_on: bool
    undo: Patch

    def resume_from(self, directory: Path, suffix: str, rival: Path | None) -> Path | None:
        """The newest valid checkpoint in a held directory, verified on all ranks."""


def notes(home: FileHome, *, links: list[Link], to_delete: list[Path], weights_only: bool) -> dict[str, Any]:
    """Further entries of the manifest, with which the next run can finish what a killed one had begun."""
    below = home.path

    def is_below(path: Path) -> bool:  # what lies elsewhere is done by this run alone: the next one would refuse it
        return below in Path(os.path.normpath(path)).parents

    return {
        REMOVES: [path.relative_to(below).as_posix() for path in to_delete if is_below(path)],
        LINKS: {
            link.path.relative_to(below).as_posix(): link.target
            for link in links
            if is_below(link.path) and is_below(link.path.parent / (link.target or link.path.name))
        },
        WEIGHTS_NOTE: weights_only,
    }


def arrange(trainer: Any, saver: ResumingSaver, directory: Path, suffix: str) -> None:
    """Let the ``fit`` that is being set up resume from ``directory`` if it is given no path, and has nothing to go on with.

    A Trainer that has trained goes on with what is in memory. One that has not resumes, whatever its callbacks did before, and
    whatever became of an earlier ``fit``: a finder of learning rates, a hook that failed, or nothing to do, as the checkpoint
    is of this later one.

    Raises:
        ConfigError: another directory is to be resumed from already.
    """
    if saver.auto_directory == directory:
        return
    if saver.auto_directory is not None:
        message = (
            f"one directory at a time: {saver.auto_directory} is resumed from, not {directory}. Give all callbacks one"
        )
        raise ConfigError(key="resume", message=message)
    saver.auto_directory = directory

    # Lightning has no public seam here: when setup() runs, ckpt_path is a local variable of the Trainer already.
    def restore(original: Callable[..., None], checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        saver.reads_freely |= False in (*args, *kwargs.values())  # weights_only, since 2.6
        rival = signals.requeue_resume_path(trainer) if checkpoint_path is not None else None
        none_given = checkpoint_path is None or (rival is not None and rival == Path(os.path.abspath(checkpoint_path)))
        # What a finder of learning rates did, it has given back.
        trained = trainer.global_step or trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if none_given and (saver.goes_on or not trained):
            chosen = saver.resume_from(directory, suffix, rival)
            checkpoint_path = str(chosen) if chosen is not None else None
        if checkpoint_path is None:
            original(None, *args, **kwargs)
            return
        with one_resume.naming_older(Path(checkpoint_path), BY_NAME):
            original(checkpoint_path, *args, **kwargs)

    saver.undo.once(trainer._checkpoint_connector, "_restore_modules_and_callbacks", restore)


def keep_from_tuner(trainer: Any, saver: ResumingSaver) -> None:
    """Let a finder of learning rates or batch sizes, which restores a file of its own, leave what ``fit`` resumes from.

    Such a callback runs between the two parts of a resume. Lightning would forget the second: the weights would be those of
    the checkpoint, and the steps, the optimizers and the place in the data those of a new run.
    """
    connector = trainer._checkpoint_connector
    original = connector.restore

    def restore(*args: Any, **kwargs: Any) -> None:
        kept = connector._ckpt_path, connector._loaded_checkpoint
        saver.searching = True
        try:
            original(*args, **kwargs)
        finally:
            saver.searching = False
            connector._ckpt_path, connector._loaded_checkpoint = kept

    saver.undo.put_methods(connector, {"restore": restore})


def keep_types(strategy: Any, saver: ResumingSaver) -> None:
    """Let a resume not round what an optimizer keeps in float32 beside bfloat16 parameters."""
    original = strategy.load_optimizer_state_dict

    def load(checkpoint: Any) -> None:
        with keeping_types(strategy.optimizers):
            original(checkpoint)

    saver.undo.put_methods(strategy, {"load_optimizer_state_dict": load})


def choose(saver: Saver, home: OpenHome, suffix: str, rival: Path | None = None) -> Path | None:
    """The newest valid checkpoint in a held directory, verified on all ranks; None on a fresh run. Every rank calls this.

    Args:
        saver: holds the directory.
        home: the directory.
        suffix: of its files.
        rival: where there are some of ours, this one of another tool is left to ``choose_beside``.

    Raises:
        NoValidCheckpointError: there are checkpoints and none is usable.
    """
    engine, held = saver.engine, home.held

    def verify(path: Path) -> None:
        saver.verify_share(path)
        if engine.rank == 0:
            with contextlib.suppress(UnsupportedFormatError, IncompleteCheckpointError):  # of another tool
                _due(held, path)

    def judged() -> list[Candidate]:
        listed = [_judged(one) for one in list_files(held.path, suffix, is_lightning_directory)]
        are_ours = any(one.manifest is not None and not one.problem for one in listed)
        return [one for one in listed if not (are_ours and one.foreign and one.path == rival)]

    info = saver.newest(home, judged, verify)
    if info is None:
        return None
    engine.agree("finish", must_match={"path": info.path}, decide=lambda _: _finish(held, info, engine.config.timeouts))
    return info.file_path


def choose_beside(saver: Saver, home: OpenHome, suffix: str, rival: Path) -> Path | None:
    """As ``choose``; None also when ``rival``, from which Lightning would go on, is of a later step, or is all there is."""
    try:
        chosen = choose(saver, home, suffix, rival)
    except NoValidCheckpointError as error:
        logger.warning("resuming from %s, which Lightning saved: %s", rival, error)
        return None
    if chosen is None:
        return None
    ours = saver.engine.agree("rival", must_match={"path": rival}, decide=lambda _: _step(chosen) >= _step(rival))
    return chosen if ours else None


def _step(path: Path) -> int:
    return read_layout(path).step


def _judged(candidate: Candidate) -> Candidate:
    """Add what only a look inside tells: the step of a foreign file, and whether there is more in it than weights."""
    if candidate.problem:
        return candidate
    if candidate.manifest is not None:
        weights_only = bool(candidate.manifest.notes.get(WEIGHTS_NOTE))
        return dataclasses.replace(candidate, problem=WEIGHTS_ONLY) if weights_only else candidate
    return look_inside(candidate)


def _due(home: FileHome, path: Path) -> tuple[dict[Path, str | None], list[Path]]:
    """Return what was due when ``path`` was committed: the links with their targets, and the paths to delete.

    Raises:
        HostileCheckpointError: something of it lies outside of the directory.
        SafeCheckpointError: its manifest cannot be read.
    """
    below, notes = home.path, read_manifest(path).notes

    def inside(name: object) -> Path:
        found = really_inside(below, name)
        if HIDDEN in found.relative_to(below).parts:
            message = f"its notes name {name!r:.200}, which is no checkpoint"
            raise HostileCheckpointError(path=str(path), message=message)
        return found

    def target(name: str, text: str | None) -> str | None:
        if text is not None:  # relative to where the link lies, with what links make of ``..``; as ``relpath`` makes it
            lies = os.path.realpath(inside(name).parent)
            led = os.path.relpath(os.path.join(lies, text), os.path.realpath(below))
            inside(led if text == os.path.normpath(text) else None)
        return text

    try:
        with refusing(path, "its notes"):
            links = {inside(name): target(name, text) for name, text in notes.get(LINKS, {}).items()}
            if any(not links.keys().isdisjoint(path.parents) for path in links):
                raise HostileCheckpointError(path=str(path), message="its notes put one link behind another")
            return links, [inside(name) for name in notes.get(REMOVES, [])]
    except HostileCheckpointError as error:
        raise HostileCheckpointError(path=str(path), file="its notes", message=error.message) from error


def _finish(home: FileHome, info: CheckpointInfo, timeouts: Timeouts) -> None:
    # Killed between its commit and its links and removals: they are due now, since what replaces them is good.
    if not info.verified:
        return
    links, to_delete = _due(home, info.file_path)
    for path, target in links.items():
        _link_again(home, info, path, target, timeouts)
    for path in home.discard([path for path in to_delete if _is_ours_and_older(path, info)]):
        logger.info("removed %s, as was due when %s was saved", path, info.name)


def _link_again(home: FileHome, info: CheckpointInfo, path: Path, target: str | None, timeouts: Timeouts) -> None:
    if target is None:
        # A name of a newer file than this one is not taken from it.
        done = path.exists() and (path.samefile(info.file_path) or not _is_ours_and_older(path, info))
    else:
        done = (path.is_symlink() and os.readlink(path) == target) or not (path.parent / target).exists()
    if done:
        return
    new = NewCheckpoint(
        path=info.path,
        manifest=read_manifest(info.path),
        op_id=f"link-{uuid.uuid4().hex}",
        kind="file",
        additions=Additions(links=[Link(path=path, target=target)]),
    )
    publication = home.begin(new, timeouts)
    publication.prepare()
    publication.commit((), {}, lambda: None)  # without a file: a further name for what is there
    publication.clean_up()
    logger.info("made %s again, as was due when %s was saved", path, info.name)


def _is_ours_and_older(path: Path, than: CheckpointInfo) -> bool:
    try:
        return not path.is_symlink() and path.exists() and read_manifest(path).sequence < than.sequence
    except (OSError, SafeCheckpointError):
        return False
