"""The frameworks' judges of the checkpoints in one directory, besides their order: which each takes, and which it needs.

For DeepSpeed's resume and for the commands: see ``safe_ckpt.core.home.standing``. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.home.standing import Judge, Note, linked_in, named_by
from safe_ckpt.core.storage import presence
from safe_ckpt.layouts.table import DEEPSPEED, LATEST, TRAINER_STATE, TRANSFORMERS

_NOT_NAMED = f"the file {LATEST} does not name it: it is loaded only by its name"
_MOST_BYTES = 64 << 20


def judges_of(folder: Path) -> list[Judge]:
    """Return the judges of all frameworks for the checkpoints in ``folder``."""
    return [functools.partial(judge, folder) for judge in (tags, copies, judge_best, kept)]


def tags(top: Path, usable: Sequence[Candidate]) -> Iterator[Note]:
    """DeepSpeed loads the tag that ``latest`` names, then those before it. Without ``latest`` there is an order all the same.

    Then those count that were saved with ``save_latest``, also in a folder below, such as ``"warmup/step10"``. All others are
    loaded by their names.
    """
    there = [candidate for candidate in usable if is_tag(candidate)]
    named = named_by(top / LATEST)
    wanted = named if named is not None and presence.is_directory(named) else None
    if wanted is not None and presence.is_there(wanted / MANIFEST_NAME):
        own = next((tag.manifest.sequence for tag in there if tag.path == wanted and tag.manifest is not None), None)
    else:
        own = None if wanted is None else -1  # one of another tool has no place in the order of commits
    beside = top if named is None else named.parent
    for tag in there:
        manifest = tag.manifest
        to_be_named = (
            manifest is not None
            and manifest.notes.get("latest")
            and _is_from(top, tag, manifest, beside, below=named is None)
        )
        if wanted is not None and tag.path == wanted:
            yield Note(path=wanted, says="first", why=f"the file {LATEST} names it")
            yield Note(path=wanted, says="keep", why=f"the file {LATEST} names it")
        elif manifest is None or not to_be_named or (own is not None and manifest.sequence >= own):
            yield Note(path=tag.path, says="by name", why=_NOT_NAMED)


def is_tag(candidate: Candidate) -> bool:
    """Whether DeepSpeed would load it."""
    if candidate.manifest is not None:
        return candidate.manifest.notes.get("adapter") == "deepspeed"
    return candidate.foreign and DEEPSPEED.number_of(candidate.path.name) is not None


def _is_from(top: Path, tag: Candidate, manifest: Manifest, beside: Path, *, below: bool) -> bool:
    """Whether it is one that a ``latest`` in ``top`` was to name. Commits are counted by folder."""
    parent = tag.file_path.parent
    if not below or parent == top:
        return parent == beside
    # A job that saves into that folder itself has its own there.
    return manifest.notes.get("tag") == f"{parent.name}/{tag.path.name}"


def copies(_: Path, usable: Sequence[Candidate]) -> Iterator[Note]:
    """A Trainer of Transformers takes only what it named itself."""
    for candidate in usable:
        of_trainer = candidate.manifest is not None and candidate.manifest.notes.get("adapter") == "transformers"
        if of_trainer and TRANSFORMERS.number_of(candidate.path.name) is None:
            yield Note(path=candidate.path, says="by name", why="a Trainer looks for checkpoint-<step> only")


def judge_best(folder: Path, usable: Sequence[Candidate]) -> Iterator[Note]:
    """A Trainer of Transformers loads in the end what its newest checkpoint calls the best."""
    newest = next((c for c in usable if TRANSFORMERS.number_of(c.path.name) is not None), None)
    name = _best_model(newest.file_path / TRAINER_STATE) if newest is not None else ""
    if name:
        yield Note(path=folder / name, says="keep", why=f"{TRAINER_STATE} of the newest calls it the best")


def _best_model(file: Path) -> str:
    try:
        if not presence.is_file(file) or file.stat().st_size > _MOST_BYTES:
            return ""
        said = json.loads(file.read_bytes())
    except (ValueError, RecursionError, FileNotFoundError):
        return ""
    path = said.get("best_model_checkpoint") if isinstance(said, dict) else None
    return PurePath(path).name if isinstance(path, str) else ""


def kept(folder: Path, usable: Sequence[Candidate]) -> Iterator[Note]:
    """Keep what a link in the directory leads to, and what a ``latest`` above it names, such as ``"warmup/step10"``."""
    there = {candidate.path for candidate in usable}
    for path, link in linked_in(folder).items():
        if path in there:
            yield Note(path=path, says="keep", why=f"the link {link} leads to it")
    for above in (folder, *folder.absolute().parents):
        with contextlib.suppress(PermissionError) if above != folder else contextlib.nullcontext():
            tag = named_by(above / LATEST)
            if tag is not None and tag.parent.absolute() == folder.absolute() and folder / tag.name in there:
                yield Note(path=folder / tag.name, says="keep", why=f"{above / LATEST} names it")
