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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xxhash

from safe_ckpt.config import Health, Unchanged
from safe_ckpt.core.formats.file_plan import LEAST_SHARED_BYTES
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, read_manifest
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.recent import Recent
from safe_ckpt.core.saving.extension import Extension, Outcome, Run
from safe_ckpt.core.saving.save import SaveJob, SaveRequest
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.held import can_be_held, hold, stamp_at
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import is_directory
from safe_ckpt.core.writer.existing import MOST_BYTES, UNCHANGED, Before, Existing, Tries
from safe_ckpt.errors import CommitOutcomeUnknown, SafeCheckpointError
from safe_ckpt.extensions.health.examine import NAME as HEALTH
from safe_ckpt.extensions.health.verdict import digest_of_patterns, is_sick

if TYPE_CHECKING:
    from safe_ckpt.core.formats.file_plan import FilePlan

logger = logging.getLogger(__name__)
_MOST_SOURCES = 4
_PATIENCE, _AGAIN = 3, 16
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
        """None for one that is not worth it, or has other bytes than the tensors': an archive has check sums."""
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


class UnchangedExtension(Extension):
    """See the module."""

    name: ClassVar[str] = UNCHANGED

    def __init__(self) -> None:
        self._sharing: dict[str, Sharing] = {}  # of saves that are not over, by ``op_id``

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._known = UnchangedFiles(run.config.unchanged, run.config.health, run.rank)

    def planning(self, request: SaveRequest) -> int:
        """See ``Extension``."""
        content, facts = request.content, request.facts
        return self._known.spared_bytes(content.files, request.destination.workspace.path, facts.unexamined)

    def begun(self, job: SaveJob) -> Mapping[str, Existing]:
        """See ``Extension``."""
        facts = job.request.facts
        sharing = self._known.find(job.request.content.files, job.workspace.path, facts.unexamined)
        self._sharing[job.op_id] = sharing
        return {one.path: one for one in sharing.shared}

    def writing(self, job: SaveJob, path: str, plan: FilePlan) -> Any:
        """See ``Extension``."""
        sharing = self._sharing.get(job.op_id)
        return None if sharing is None else sharing.told(path)

    def recognised(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Mapping[str, Existing]:
        """See ``Extension``."""
        sharing = self._sharing.get(job.op_id)
        found = [path for path, one in results.items() if "left_out" in one.observed.get(self.name, {})]
        return {path: sharing.found[path] for path in found} if sharing is not None else {}

    def written(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Any:
        """See ``Extension``."""
        if (sharing := self._sharing.get(job.op_id)) is not None:
            sharing.tell(results)

    def entry(self, result: WrittenFile) -> Mapping[str, Any]:
        """See ``Extension``."""
        return {"age": result.observed.get(self.name, {}).get("age", 0)}

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        sharing = self._sharing.pop(job.op_id, None)
        if sharing is not None:
            try:
                sharing.end(outcome)
            finally:
                sharing.close()
        return None

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """See ``Extension``."""
        if info.verified and is_directory(info.path):
            self._known.recall(home.path, info.path, verified)


class UnchangedFiles:
    """What one rank knows of the files that it wrote last.

    Args:
        settings: whether files are shared.
        health: how numbers are looked at.
        rank: this rank.
    """

    def __init__(self, settings: Unchanged, health: Health, rank: int) -> None:
        self._settings = settings
        self._health = health
        self._rank = rank
        self._directories: Recent[Place, _Directory] = Recent(lambda one: bool(one.under_way))

    def recall(self, root: Place, checkpoint: Place, verified: Manifest | None = None) -> None:
        """Training goes on from this checkpoint of the directory ``root``.

        Args:
            root: the directory.
            checkpoint: one in it.
            verified: its manifest, with the files that were verified a moment ago; None where all of them were.
        """
        self.forget(root)
        if not self._settings.share:
            return
        try:
            manifest = verified or read_manifest(checkpoint)
        except (OSError, SafeCheckpointError) as error:
            logger.info("%s: its manifest cannot be read again, so all is written anew: %s", checkpoint, error)
            return
        health, known = manifest.health.get("files", {}), self._directory(root).known
        for entry in manifest.files:
            # Files of other ranks are not this rank's to share, and many ranks must not look at all files.
            if entry.rank == self._rank and entry.size_bytes >= LEAST_SHARED_BYTES:
                known[entry.path] = Before(
                    sources=(checkpoint / entry.path,),
                    stamp=stamp_at(checkpoint / entry.path),
                    size_bytes=entry.size_bytes,
                    xxh3_128=entry.xxh3_128,
                    observed={HEALTH: health[entry.path]} if entry.path in health else {},
                    age=entry.age,
                )

    def spared_bytes(self, plans: Iterable[FilePlan], root: Place, unexamined: Sequence[str] = ()) -> int:
        """How much of these probably need not be written. See ``find``."""
        wanted = (Wanted.of(plan, unexamined) for plan in plans)
        return sum(one.length for one in wanted if one is not None and self.candidate(one, root) is not None)

    def find(self, plans: Sequence[FilePlan], root: Place, unexamined: Sequence[str] = ()) -> Sharing:
        """Tell what is to be written from what is there already. On the thread that trains, before it may change the tensors.

        Args:
            plans: of the files of one save.
            root: the directory of its checkpoint.
            unexamined: patterns of names of tensors of which the numbers are not looked at, besides those of the settings.

        Returns:
            What is to be written, and what is not.
        """
        directory = self._directory(root)
        number = directory.tries.begin()
        later = bool(directory.under_way) and not can_be_held(root)
        directory.under_way.add(number)
        sharing = Sharing(self, root, number, directory.tries)
        try:
            for plan in plans:
                wanted = Wanted.of(plan, unexamined) if self._settings.share else None
                if wanted is None or not self._shared_now(plan, wanted, sharing, later=later):
                    sharing.left.append(plan)
        except BaseException:  # a Ctrl-C among them
            sharing.close()
            raise
        return sharing

    def _shared_now(self, plan: FilePlan, wanted: Wanted, sharing: Sharing, *, later: bool) -> bool:
        before = self.candidate(wanted, sharing.root)
        if later or before is None or not _is_in_order(plan):
            if before is not None or (later and plan.frozen):
                sharing.perhaps[plan.path] = wanted
            return False
        one = self.held(plan.path, before, sharing.root)
        if one is not None and digest_of(plan) == before.xxh3_128:
            sharing.shared.append(one)
            return True
        if one is not None:
            one.close()
        return False

    def over(self, root: Place, number: int) -> None:
        """See ``Sharing.close``."""
        if (directory := self._directories.get(root)) is not None:
            directory.under_way.discard(number)

    def earlier(self, root: Place, path: str) -> tuple[Any, ...] | None:
        """See ``existing.UNCHANGED``. Where nothing was shared for a while it is tried now and then only: it costs a hash."""
        directory = self._directory(root)
        known, number = directory.known.get(path), directory.tries.count
        fruitless = known is not None and known.fruitless >= _PATIENCE and number % _AGAIN > 1
        if not self._settings.share or fruitless:
            return None
        if known is None or known.stamp is None or self._is_old(known):
            return ()
        return str(known.sources[0]), known.stamp.ctime_ns

    def learn(self, root: Place, checkpoint: Place, written: Mapping[str, WrittenFile]) -> None:
        """These were committed at ``checkpoint``, in ``root``: this rank's files, by their paths in it."""
        found, directory = {}, self._directory(root)
        for path, file in written.items():
            if file.size_bytes < LEAST_SHARED_BYTES:
                continue
            place, before = checkpoint / path, directory.known.get(path)
            same = before is not None and (before.size_bytes, before.xxh3_128) == (file.size_bytes, file.xxh3_128)
            sources = (place, *(before.sources if same and before is not None else ()))
            found[path] = Before(
                sources=tuple(dict.fromkeys(sources))[:_MOST_SOURCES],
                stamp=stamp_at(place),
                size_bytes=file.size_bytes,
                xxh3_128=file.xxh3_128,
                observed={name: found for name, found in file.observed.items() if name != UNCHANGED},
                age=file.observed.get(UNCHANGED, {}).get("age")
                or (before.age + 1 if before is not None and file.shared_bytes else 0),
                # With another size it is another file under an old name.
                repeated=same if before is not None and before.size_bytes == file.size_bytes else None,
                fruitless=before.fruitless + 1 if before is not None and not file.shared_bytes else 0,
            )
        directory.known = found

    def forget(self, root: Place) -> None:
        """What the newest checkpoint of ``root`` is, is not known any more."""
        if (directory := self._directories.get(root)) is not None:
            directory.known = {}

    def candidate(self, wanted: Wanted, root: Place) -> Before | None:
        """What a file probably is."""
        directory = self._directories.get(root)
        before = directory.known.get(wanted.path) if directory is not None else None
        if directory is None or before is None or before.size_bytes != wanted.length or not self._settings.share:
            return None
        if not directory.tries.allowed:
            return None
        if before.size_bytes > MOST_BYTES and not can_be_held(root):
            return None
        probably = wanted.frozen if before.repeated is None else before.repeated
        fits = probably and not self._is_old(before) and self._is_known_well(before, wanted.unexamined)
        return before if fits else None

    def _directory(self, root: Place) -> _Directory:
        return self._directories.use(root, _Directory)

    def _is_old(self, before: Before) -> bool:
        return self._settings.full_every is not None and before.age + 1 >= self._settings.full_every

    def _is_known_well(self, before: Before, unexamined: Sequence[str]) -> bool:
        """Whether what was found of its numbers is what would be found now. An alarm is not said again without a look."""
        if self._health.action == "off":
            return True
        known = before.observed.get(HEALTH)
        if known is None or is_sick(known):
            return False
        return bool(known.get("ignored", "") == digest_of_patterns((*self._health.ignore, *unexamined)))

    def held(self, path: str, before: Before, root: Place, *, again: bool = True) -> Existing | None:
        """The file before, to be relied upon; None if it was touched or is gone. ``again``: say what its numbers were."""
        examined = again and self._health.action != "off"
        fd = hold(before.sources, before.stamp, before.size_bytes)
        return Existing(path, before, fd, examined=examined) if fd is not None or not can_be_held(root) else None


class Sharing:
    """What one save shares with the checkpoints before. Made by ``UnchangedFiles.find``.

    Args:
        known: what this rank knows.
        root: the directory of the checkpoint.
        number: of the save.
        tries: tells whether the next saves may share.

    Attributes:
        root: as given.
        left: the files that are written.
        shared: those that are not.
        perhaps: those of ``left``, by path, that are not if the writer finds the same bytes.
        found: what these are then.
    """

    def __init__(self, known: UnchangedFiles, root: Place, number: int, tries: Tries) -> None:
        self._known = known
        self._number = number
        self._tries = tries
        self.root = root
        self.left: list[FilePlan] = []
        self.shared: list[Existing] = []
        self.perhaps: dict[str, Wanted] = {}
        self.found: dict[str, Existing] = {}
        self._written: Mapping[str, WrittenFile] = {}

    def told(self, path: str) -> dict[str, Any]:
        """What the writer is told of a file: see ``UNCHANGED``. On the background thread, after all saves before it."""
        return {"earlier": self._known.earlier(self.root, path), "same_as": self._same_as(path)}

    def _same_as(self, path: str) -> str:
        wanted = self.perhaps.get(path)
        before = self._known.candidate(wanted, self.root) if wanted is not None else None
        one = self._known.held(path, before, self.root, again=False) if before is not None else None
        if one is None:
            return ""
        self.found[path] = one
        return one.before.xxh3_128

    def tell(self, written: Mapping[str, WrittenFile]) -> None:
        """This rank has written these, by their paths in the checkpoint. On the background thread."""
        self._written = written

    def end(self, outcome: Outcome) -> None:
        """The save is over: take over what was committed. On the background thread."""
        how = {one.how for one in (*self.shared, *self.found.values())}
        if "never" in how:  # the file system has no further names for files: for some saves everything is written
            self._tries.refused()
        if "sent" in how:  # the next save does not ask a store for a copy, and later ones less often
            self._tries.failed()
        if outcome.info is not None:
            if "sent" not in how and any(file.shared_bytes for file in self._written.values()):
                self._tries.worked()
            self._known.learn(self.root, outcome.info.path, self._written)
            return
        if isinstance(outcome.error, CommitOutcomeUnknown):
            self._known.forget(self.root)  # it may be committed, and what was the newest before may be deleted
        if not all(one.is_held for one in (*self.shared, *self.found.values())):
            self._tries.failed()  # it relied on an object: the next one does not, and later ones less often

    def close(self) -> None:
        """The save is over, and what came of it was learnt: give back what it holds."""
        for one in (*self.shared, *self.found.values()):
            one.close()
        self._known.over(self.root, self._number)


def _is_in_order(plan: FilePlan) -> bool:
    """Whether its bytes lie in host memory as they would in the file."""
    return all(map(_is_plain, (tensor for _, tensor in plan.tensors)))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def digest_of(plan: FilePlan) -> str:
    """The xxh3-128 of the file that would be written, as hex. Its tensors are in host memory and contiguous."""
    whole, at = xxhash.xxh3_128(), 0
    parts: list[tuple[int, Any]] = [*plan.pieces, *plan.tensors]
    for begin, part in sorted(parts, key=lambda one: one[0]):
        _zeros(whole, begin - at)
        data = part if isinstance(part, bytes) else _memory(part)
        whole.update(data)
        at = begin + len(data)
    _zeros(whole, plan.length - at)
    return whole.hexdigest()


def _memory(tensor: torch.Tensor) -> Any:
    numbers: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _zeros(whole: Any, count: int) -> None:
    for begin in range(0, count, len(_ZEROS)):
        whole.update(_ZEROS[: min(len(_ZEROS), count - begin)])
