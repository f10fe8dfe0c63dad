"""Files that have the bytes of a committed checkpoint: they are neither copied nor written, but get a further name.

No counter and no flag is trusted. At every save the bytes of such a file are hashed where they lie, in the order in which they
would stand in the file, and compared with the hash in the manifest of the checkpoint before. What says that a tensor does not
change (it needs no gradient, or its file had the same bytes twice) only chooses which files are worth that look, which takes
less than half of the time of a copy. Where the bytes are not in host memory in their order, on a GPU or in a transposed tensor,
they are copied, and the writer takes that look before it writes.

The old file is opened before it is relied upon. As long as it is open its bytes cannot vanish, whoever deletes its name. An
object cannot be held. It is relied upon only if it is one of the newest checkpoint when the save is written, which retention
does not delete. So while another save is under way, these bytes are copied, too, and the look is taken when that one is over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xxhash

from safe_ckpt.core.formats.file_plan import LEAST_SHARED_BYTES, lies_as_written
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, read_manifest
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.saving.extension import Extension, Outcome, Run
from safe_ckpt.core.saving.recent import Recent
from safe_ckpt.core.saving.request import SaveRequest
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import can_be_held, hold, stamp_at
from safe_ckpt.core.storage.source import has_folder
from safe_ckpt.core.writer.existing import MOST_BYTES, UNCHANGED, Before, Existing
from safe_ckpt.errors import CommitOutcomeUnknown, SafeCheckpointError
from safe_ckpt.extensions.health.examine import NAME as HEALTH
from safe_ckpt.extensions.health.verdict import digest_of_patterns, is_sick
from safe_ckpt.extensions.tries import Tries

if TYPE_CHECKING:
    from safe_ckpt.core.formats.file_plan import FilePlan

logger = logging.getLogger(__name__)
_MOST_SOURCES = 4
_ZEROS = bytes(64 << 10)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file of a save that perhaps is that of the checkpoint before.

    Attributes:
        path: relative to the checkpoint.
        length: its bytes.
        frozen: whether none of its tensors is trained.
        unexamined: patterns of names of tensors of which the numbers are not looked at, besides those of the settings.
    """

    path: str
    length: int
    frozen: bool
    unexamined: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: FilePlan, unexamined: Sequence[str]) -> Wanted | None:
        """The file of a plan; None if it is not worth it, or has other bytes than the tensors': an archive has check sums."""
        if plan.length < LEAST_SHARED_BYTES or plan.records is not None or plan.lazies:
            return None
        return cls(path=plan.path, length=plan.length, frozen=plan.frozen, unexamined=tuple(unexamined))


@dataclass(kw_only=True)
class _Directory:
    """One directory of checkpoints.

    Attributes:
        tries: whether sharing is tried.
        known: the files of its newest checkpoint, by path.
        under_way: the saves that have looked and are not over.
    """

    tries: Tries = field(default_factory=Tries)
    known: dict[str, Before] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class _Sharing:
    """The files that one save shares with the checkpoints before.

    Attributes:
        root: the directory of its checkpoint.
        directory: what is known of it.
        number: of the save.
        shared: the files that are not written.
        perhaps: those, by path, that are not if the writer finds the same bytes.
        found: what these are then.
        written: what this rank has written, by path.
    """

    root: Place
    directory: _Directory
    number: int
    shared: list[Existing] = field(default_factory=list)
    perhaps: dict[str, Wanted] = field(default_factory=dict)
    found: dict[str, Existing] = field(default_factory=dict)
    written: Mapping[str, WrittenFile] = field(default_factory=dict)

    def close(self) -> None:
        """The save is over, and what came of it was learnt: give back what it holds."""
        for one in (*self.shared, *self.found.values()):
            one.close()
        self.directory.under_way.discard(self.number)


class UnchangedExtension(Extension):
    """The knowledge of one rank about the files that it wrote last. See the module."""

    name: ClassVar[str] = UNCHANGED

    def __init__(self) -> None:
        self._sharing: dict[str, _Sharing] = {}  # of saves that are not over, by ``op_id``
        self._directories: Recent[Place, _Directory] = Recent(lambda one: bool(one.under_way))

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._settings, self._health, self._rank = run.config.unchanged, run.config.health, run.rank

    def planning(self, request: SaveRequest) -> int:
        """See ``Extension``."""
        root, unexamined = request.destination.home.path, request.facts.unexamined
        wanted = (Wanted.of(plan, unexamined) for plan in request.payload.files)
        return sum(one.length for one in wanted if one is not None and self._candidate(one, root) is not None)

    def laying_out(self, job: SaveJob) -> Mapping[str, Existing]:
        """See ``Extension``. Before training may change the tensors."""
        root, unexamined = job.home.path, job.request.facts.unexamined
        directory = self._directory(root)
        sharing = _Sharing(root=root, directory=directory, number=directory.tries.begin())
        later = bool(directory.under_way) and not can_be_held(root)
        directory.under_way.add(sharing.number)
        try:
            for plan in job.request.payload.files if self._settings.share else ():
                if (wanted := Wanted.of(plan, unexamined)) is not None:
                    self._find_unchanged(plan, wanted, sharing, later=later)
        except BaseException:  # a Ctrl-C among them
            sharing.close()
            raise
        self._sharing[job.op_id] = sharing
        return {one.path: one for one in sharing.shared}

    def _find_unchanged(self, plan: FilePlan, wanted: Wanted, sharing: _Sharing, *, later: bool) -> None:
        """Look whether a file is there already; ``later``: the writer is to look, once the save before is over."""
        before = self._candidate(wanted, sharing.root)
        # Hashed here only where its bytes lie in host memory as they would in the file.
        if later or before is None or not all(one.is_cpu and lies_as_written(one) for _, one in plan.tensors):
            if before is not None or (later and plan.frozen):
                sharing.perhaps[plan.path] = wanted
            return
        one = self._held(plan.path, before, sharing.root)
        if one is not None and digest_of_plan(plan) == before.xxh3_128:
            sharing.shared.append(one)
        elif one is not None:
            one.close()

    def writing(self, job: SaveJob, path: str, plan: FilePlan) -> Any:
        """See ``Extension``, and ``UNCHANGED``. After all saves before it."""
        sharing = self._sharing.get(job.op_id)
        if sharing is None:
            return None
        return {"same_as": self._same_as(sharing, path)}

    def _same_as(self, sharing: _Sharing, path: str) -> str:
        wanted = sharing.perhaps.get(path)
        before = self._candidate(wanted, sharing.root) if wanted is not None else None
        one = self._held(path, before, sharing.root, again=False) if before is not None else None
        if one is None:
            return ""
        sharing.found[path] = one
        return one.before.xxh3_128

    def recognised(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Mapping[str, Existing]:
        """See ``Extension``."""
        sharing = self._sharing.get(job.op_id)
        found = [path for path, one in results.items() if "left_out" in one.observed.get(self.name, {})]
        return {path: sharing.found[path] for path in found} if sharing is not None else {}

    def written(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Any:
        """See ``Extension``."""
        if (sharing := self._sharing.get(job.op_id)) is not None:
            sharing.written = results

    def entry(self, result: WrittenFile) -> Mapping[str, Any]:
        """See ``Extension``."""
        return {"age": result.observed.get(self.name, {}).get("age", 0)}

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        if (sharing := self._sharing.pop(job.op_id, None)) is not None:
            try:
                self._learn_from(sharing, outcome)
            finally:
                sharing.close()
        return None

    def _learn_from(self, sharing: _Sharing, outcome: Outcome) -> None:
        """Take over what was committed."""
        adopted, tries = (*sharing.shared, *sharing.found.values()), sharing.directory.tries
        how = {one.how for one in adopted}
        if "never" in how:  # the file system has no further names for files: for some saves everything is written
            tries.refused()
        if "sent" in how:  # the next save does not ask a store for a copy, and later ones less often
            tries.failed()
        if outcome.info is not None:
            if "sent" not in how and any(file.shared_bytes for file in sharing.written.values()):
                tries.worked()
            self._learn(sharing, outcome.info.path)
            return
        if isinstance(outcome.error, CommitOutcomeUnknown):
            sharing.directory.known = {}  # it may be committed, and what was the newest before may be deleted
        if not all(one.is_held for one in adopted):
            tries.failed()  # it relied on an object: the next one does not, and later ones less often

    def _learn(self, sharing: _Sharing, checkpoint: Place) -> None:
        """Note the files that this rank has written: they were committed at ``checkpoint``."""
        found = {}
        for path, file in sharing.written.items():
            if file.size_bytes < LEAST_SHARED_BYTES:
                continue
            place, before = checkpoint / path, sharing.directory.known.get(path)
            same = before is not None and (before.size_bytes, before.xxh3_128) == (file.size_bytes, file.xxh3_128)
            sources = (place, *(before.sources if same and before is not None else ()))
            found[path] = Before(
                sources=tuple(dict.fromkeys(sources))[:_MOST_SOURCES],
                stamp=stamp_at(place),
                size_bytes=file.size_bytes,
                xxh3_128=file.xxh3_128,
                observed={name: found for name, found in file.observed.items() if name != UNCHANGED},
                age=file.observed.get(UNCHANGED, {}).get("age", 0),
                # With another size it is another file under an old name.
                repeated=same if before is not None and before.size_bytes == file.size_bytes else None,
            )
        sharing.directory.known = found

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """See ``Extension``."""
        if not (info.verified and has_folder(info.path)):
            return
        if (directory := self._directories.get(home.path)) is not None:
            directory.known = {}
        if not self._settings.share:
            return
        try:
            manifest = verified or read_manifest(info.path)
        except (OSError, SafeCheckpointError) as error:
            logger.info("%s: its manifest cannot be read again, so all is written anew: %s", info.path, error)
            return
        health, known = manifest.health.get("files", {}), self._directory(home.path).known
        for entry in manifest.files:
            # Files of other ranks are not this rank's to share, and many ranks must not look at all files.
            if entry.rank == self._rank and entry.size_bytes >= LEAST_SHARED_BYTES:
                known[entry.path] = Before(
                    sources=(info.path / entry.path,),
                    stamp=stamp_at(info.path / entry.path),
                    size_bytes=entry.size_bytes,
                    xxh3_128=entry.xxh3_128,
                    observed={HEALTH: health[entry.path]} if entry.path in health else {},
                    age=entry.age,
                )

    def _candidate(self, wanted: Wanted, root: Place) -> Before | None:
        """The file before that a file probably equals; None if none is worth a look."""
        directory = self._directories.get(root)
        before = directory.known.get(wanted.path) if directory is not None else None
        if directory is None or before is None or before.size_bytes != wanted.length or not self._settings.share:
            return None
        if not directory.tries.allowed or (before.size_bytes > MOST_BYTES and not can_be_held(root)):
            return None
        probably = wanted.frozen if before.repeated is None else before.repeated
        oldest = self._settings.full_every
        is_old = oldest is not None and before.age + 1 >= oldest
        fits = probably and not is_old and self._is_known_well(before, wanted.unexamined)
        return before if fits else None

    def _directory(self, root: Place) -> _Directory:
        return self._directories.use(root, _Directory)

    def _is_known_well(self, before: Before, unexamined: Sequence[str]) -> bool:
        """Whether what was found of its numbers is what would be found now. An alarm is not said again without a look."""
        if self._health.action == "off":
            return True
        known = before.observed.get(HEALTH)
        if known is None or is_sick(known):
            return False
        return bool(known.get("ignored", "") == digest_of_patterns((*self._health.ignore, *unexamined)))

    def _held(self, path: str, before: Before, root: Place, *, again: bool = True) -> Existing | None:
        """The file before, to be relied upon; None if it was touched or is gone. ``again``: say what its numbers were."""
        examined = again and self._health.action != "off"
        fd = hold(before.sources, before.stamp, before.size_bytes)
        return Existing(path, before, fd, examined=examined) if fd is not None or not can_be_held(root) else None


def digest_of_plan(plan: FilePlan) -> str:
    """The xxh3-128 of the file that would be written, as hex. Its tensors are in host memory and contiguous."""
    whole, at = xxhash.xxh3_128(), 0
    parts: list[tuple[int, Any]] = [*plan.pieces, *plan.tensors]
    for begin, part in sorted(parts, key=lambda one: one[0]):
        _zeros(whole, begin - at)
        data = part if isinstance(part, bytes) else memoryview(part.detach().reshape(-1).view(torch.uint8).numpy())
        whole.update(data)
        at = begin + len(data)
    _zeros(whole, plan.length - at)
    return whole.hexdigest()


def _zeros(whole: Any, count: int) -> None:
    for begin in range(0, count, len(_ZEROS)):
        whole.update(_ZEROS[: min(len(_ZEROS), count - begin)])
