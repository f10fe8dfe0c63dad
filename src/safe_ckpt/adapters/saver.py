"""``Saver``, which an adapter holds: an engine, the directories that it saves to, and the saves that it follows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from safe_ckpt import events
from safe_ckpt.adapters.pickles import refuse_code
from safe_ckpt.adapters.tracking import Tracking
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_if_ours, verify_share
from safe_ckpt.core.home.candidates import list_directories, newest_sequence
from safe_ckpt.core.home.host_home import HostHome
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.resuming import one_resume
from safe_ckpt.core.resuming.candidate import FileReader, Reader
from safe_ckpt.core.resuming.host_cache import Host
from safe_ckpt.core.resuming.host_reader import HostReader, everything
from safe_ckpt.core.resuming.one_resume import Offered
from safe_ckpt.core.resuming.visit import Visit, Visitors
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.names import NamedHomes, open_folder
from safe_ckpt.core.saving.request import Destination, Facts, OnCommit, Payload, SaveRequest
from safe_ckpt.core.state.items import expected_bytes
from safe_ckpt.core.storage import presence
from safe_ckpt.errors import CorruptCheckpointError, SafeCheckpointError
from safe_ckpt.extensions.assemble import assemble
from safe_ckpt.extensions.mirror.fetching import is_copy_of

if TYPE_CHECKING:
    from safe_ckpt.adapters.tracking import Sinks
    from safe_ckpt.config import CheckpointConfig
    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.home.file_home import FileHome
    from safe_ckpt.core.home.home import Candidate
    from safe_ckpt.core.saving.handle import OpenSave
    from safe_ckpt.events import Hook
    from safe_ckpt.layouts.table import Kind

logger = logging.getLogger(__name__)
_FOREIGN = "%s was not written by safe_ckpt: it is loaded without verification"


@dataclass(kw_only=True, eq=False)
class OpenHome:
    """A directory of checkpoints that is held.

    Attributes:
        held: its lock, its pending saves and its order of commits.
        catalog: what is committed in it; known on rank 0 only.
    """

    held: FileHome
    catalog: Catalog = field(default_factory=Catalog)


class Saver:
    """The saver that an adapter holds until ``close``. Every method is called on every rank, on the thread that trains.

    Args:
        config: settings.
        adapter: its name under ``"adapter"`` in the notes of its manifests; "" where it gives no name.
        find: lists what may be resumed from in a directory, in no order; called on rank 0. None for all that ``adapter`` wrote.
        owner: what holds the directories in this process and how they are freed, for messages.
        by_name: how a user names the checkpoint to resume from, for messages.
        hooks: called with what happens.
        sinks: the framework's loggers; None for none.
        group: the ranks; None means WORLD.

    Attributes:
        config: as given.
        engine: where the ranks meet.
        tracking: the saves that are reported to the loggers.
        homes: the directories of checkpoints that are held, the one used last at the end.
        names: what is held by itself, as other jobs may hold what lies beside it.
        closed: whether ``close`` was called.
        may_be_per_host: whether its directories may lie on each host's own disk, where ``mirror.near`` says so.

    Raises:
        SafeCheckpointError: see ``Engine``.

    Example:
        ```python
        folder = Path("runs/toy").absolute()
        saver = Saver(CheckpointConfig(), "toy")
        planned = Planned(files=[torch_file("state.pt", {"model": model.state_dict()})])
        handle = saver.save(saver.home(folder), folder / "step-10", planned.payload(), step=10)
        saver.close()
        print(handle.result().name)
        ```

        ```text
        step-10
        ```
    """

    may_be_per_host: ClassVar[bool] = False
    _living: ClassVar[weakref.WeakSet[Saver]] = weakref.WeakSet()

    def __init__(
        self,
        config: CheckpointConfig,
        adapter: str = "",
        *,
        find: Callable[[Path], list[Candidate]] | None = None,
        owner: str = "",
        by_name: str = one_resume.BY_NAME,
        hooks: Iterable[Hook] = (),
        sinks: Sinks | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.engine = Engine(config, group=group, hooks=hooks, owner=owner, extensions=assemble(config))
        self.tracking = Tracking(self.engine, sinks)
        self.homes: dict[Path, OpenHome] = {}
        self.names = NamedHomes(self.engine)
        self.closed = False
        self._adapter = adapter
        self._find = find
        self._by_name = by_name
        self._living.add(self)

    @classmethod
    def living(cls) -> list[Self]:
        """Those of this kind that are open in this process."""
        return [one for one in list(cls._living) if isinstance(one, cls)]

    def home(self, folder: Path, *, hidden: Path | None = None) -> OpenHome:
        """Take a directory at its first use: lock it, list it, and go on with its order of commits.

        Args:
            folder: the directory; created when missing.
            hidden: where the lock and unfinished saves lie; None for in it.

        Raises:
            DirectoryError: it cannot be used; on every rank.
            DirectoryInUseError: a live job holds it.
        """
        if folder in self.homes:
            self.homes[folder] = self.homes.pop(folder)
        else:
            home = OpenHome(held=self.engine.hold(folder, hidden=hidden, per_host=self.may_be_per_host))
            self.engine.list_held(home.held, {"directory": folder}, lambda: self.list_held(home))
            self.homes[folder] = home
        return self.homes[folder]

    def list_held(self, home: OpenHome) -> None:
        """List a directory, and number what comes behind what is in it. On rank 0."""
        found = list_patiently(lambda: self.candidates(home.held.path), self.config.timeouts)
        home.catalog = Catalog(found)
        home.held.start_after(newest_sequence(found))

    def release(self, folder: Path) -> None:
        """Give a directory back once no save of it is in flight; nothing happens where it is not held. On any rank."""
        if folder in self.homes:
            home = self.homes.pop(folder).held
            self.engine.wait_until_over(home)
            self.engine.release(home)

    def candidates(self, folder: Path) -> list[Candidate]:
        """List what may be resumed from in a directory, in no order. On rank 0."""
        return self._find(folder) if self._find is not None else candidates_in(folder, self._adapter)

    def newest(
        self,
        home: OpenHome,
        find: Callable[[], Sequence[Candidate]] | None = None,
        verify: Callable[[Path], None] | None = None,
    ) -> CheckpointInfo | None:
        """The newest checkpoint that every rank has verified a share of.

        A corrupt one is passed over, and moved into quarantine once an older one was found good.

        Args:
            home: the directory.
            find: lists the candidates on rank 0; None for ``candidates``.
            verify: verifies this rank's share of one; None for ``verify_share``.

        Returns:
            None when there never was one.

        Raises:
            NoValidCheckpointError: there are checkpoints and none is usable.
            SafeCheckpointError: one could not be read; on every rank.
        """
        reader = self._reader(home.held, verify)
        find = find or self._candidates_of(home)
        request = one_resume.ResumeRequest(home=home.held, list_candidates=find, reader=reader, by_name=self._by_name)
        chosen = one_resume.choose(self.engine, request)
        if chosen is not None and self.engine.rank == 0 and not chosen.info.verified:
            logger.warning(_FOREIGN, chosen.info.file_path)
        return chosen.info if chosen is not None else None

    def newest_beside(self, place: Path, look: Callable[[], tuple[Sequence[Candidate], bool]]) -> CheckpointInfo | None:
        """The newest checkpoint that every rank has verified a share of, in a directory that is not held and only read.

        Args:
            place: the directory, or one checkpoint.
            look: lists what there is on rank 0, and says whether that is one checkpoint.

        Returns:
            None when there never was one.

        Raises:
            NoValidCheckpointError: there are checkpoints and none is usable.
            SafeCheckpointError: one could not be read; on every rank.
        """
        visit = Visit(ranks=Visitors(config=self.config, coordinator=self.engine.coordinator), place=place, look=look)
        reader = FileReader(self.engine, self.verify_share, held=False)
        try:
            info = visit.first_if_any(lambda info: reader.try_one(info.path, ours=info.verified)[1])
        finally:
            reader.close()
        if info is not None and self.engine.rank == 0 and not info.verified:
            logger.warning(_FOREIGN, info.file_path)
        return info

    def fetch(self, home: OpenHome, name: str | None) -> None:
        """With a mirror, bring what is newer there into a directory, or one by its name.

        Args:
            home: the directory.
            name: which one, relative to the directory; None for the newest.

        Raises:
            SafeCheckpointError: it is needed, and the mirror gives no answer; on every rank.
        """
        held, find = home.held, self._candidates_of(home)
        if name is None:
            Offered(self.engine, held, find, None).fetch_newer()
            return
        path = held.path / name

        def is_it(one: Candidate) -> bool:
            return one.manifest is not None and is_copy_of(one.manifest, path, held)

        Offered(self.engine, held, find, is_it).fetch_named()

    def is_directory(self, path: Path, call: str) -> bool:
        """Whether there is a directory, as rank 0 sees it: what follows is done on all ranks or on none."""
        return bool(self.engine.agree(call, must_match={"path": path}, decide=lambda _: presence.is_directory(path)))

    def verify(self, path: Path) -> None:
        """Verify one checkpoint, each rank a share. One of another tool has no digests to compare; that is logged.

        Raises:
            CorruptCheckpointError: it is damaged; on every rank.
            HostileCheckpointError: it would run code; on every rank.
            SafeCheckpointError: it could not be read; on every rank.
        """
        home = self.homes.get(path.parent)
        one_resume.check(self.engine, path, self._reader(home.held if home is not None else None))
        if self.engine.rank == 0 and not presence.is_there(path / MANIFEST_NAME):
            logger.warning(_FOREIGN, path)

    def resumed(self, path: Path, begun: float, rejected: int = 0) -> None:
        """Tell hooks and the record that a checkpoint was restored. ``newest`` does so itself.

        Args:
            path: of the checkpoint.
            begun: when, on the monotonic clock.
            rejected: how many were passed over.
        """
        step, rank, seconds = -1, self.engine.rank, time.monotonic() - begun
        # It is restored: that it cannot be read again now is no error, least of all of this rank alone.
        with contextlib.suppress(OSError, SafeCheckpointError):
            if (manifest := manifest_of(path)) is not None:
                step = manifest.step
        self.engine.tell(events.Resumed(rank=rank, path=str(path), step=step, seconds=seconds, rejected=rejected))

    def _reader(self, home: FileHome | None, verify: Callable[[Path], None] | None = None) -> Reader:
        """Reads candidates of a directory. Where each host has its own, each gets all files of one first."""
        if not isinstance(home, HostHome):
            return FileReader(self.engine, verify or self.verify_share)

        def verify_on(path: Path, host: Host) -> None:
            verify_share(path, host.place, len(host.ranks))
            refuse_code(path, host.place, len(host.ranks))

        return HostReader(self.engine, home, everything, verify_on)

    def verify_share(self, path: Path) -> None:
        """Verify this rank's share of one checkpoint, and refuse what would run code when a framework reads it.

        Raises:
            CorruptCheckpointError: it is damaged.
            HostileCheckpointError: it would run code.
            OSError: it could not be read.
        """
        rank, size = self.engine.rank, self.engine.coordinator.size
        if presence.is_directory(path):
            verify_share(path, rank, size)
        elif rank == 0:  # a file: all ranks read all of it right afterwards
            _verify_file(path)
        else:
            return
        refuse_code(path, rank, size)

    @contextlib.contextmanager
    def folder_for_others(self, home: OpenHome, path: Path) -> Iterator[Path]:
        """A folder for files of a checkpoint that the framework or its hooks write.

        Give the folder to ``OnCommit`` as ``prefilled``, and start the save within.

        Args:
            home: the directory.
            path: the final name of the checkpoint.

        Raises:
            DirectoryError: it could not be made, on every rank.
        """
        engine = self.engine
        key = engine.agree("save", must_match={"path": path}, decide=lambda _: uuid.uuid4().hex)
        folder = open_folder(engine.coordinator, home.held, key, self.config.timeouts.barrier_s)
        try:
            yield folder
        except BaseException:
            if engine.rank == 0:
                home.held.abandon(folder)
            raise

    def save(
        self,
        home: OpenHome,
        path: Path,
        content: Payload,
        *,
        step: int,
        notes: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        must_match: Mapping[str, str] | None = None,
        on_commit: OnCommit | None = None,
    ) -> OpenSave:
        """Save a checkpoint that is a directory. Returns when the copy is taken.

        Args:
            home: where.
            path: the final name.
            content: what this rank writes.
            step: the training step.
            notes: further entries of the manifest.
            metrics: numbers that retention may look at.
            must_match: what must be equal on all ranks besides step and path.
            on_commit: what is done at the commit; the catalog is added here.

        Raises:
            SafeCheckpointError: see ``Engine.save``.
        """
        return self.engine.save(
            SaveRequest(
                destination=Destination(home=home.held, path=path, kind="directory"),
                payload=content,
                facts=Facts(step=step, metrics=metrics or {}, notes={"adapter": self._adapter, **(notes or {})}),
                must_match=must_match or {},
                on_commit=dataclasses.replace(on_commit or OnCommit(), catalog=home.catalog),
            )
        )

    def prepare(self, parts: Sequence[Any]) -> None:
        """Allocate host memory for snapshots of these modules and optimizers, in the background."""
        state = {str(number): part for number, part in enumerate(parts)}
        self.engine.prepare(expected_bytes(state, rank=self.engine.rank))

    def land(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight, whatever came of it, and report it. Failures stay to be raised.

        Raises:
            RendezvousTimeout: it takes longer than ``timeout_s``.
        """
        self.tracking.land(timeout_s)
        if timeout_s is None:
            self.engine.wait_until_over()

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until everything in flight is committed, and report it; see ``Engine.wait``.

        Raises:
            SafeCheckpointError: a save failed, and its error was not raised yet; the same on every rank.
        """
        self.land()
        self.engine.wait(mirrored=mirrored)

    def close(self, *, quiet: bool = False, within_s: float | None = None) -> None:
        """Finish what is in flight and give the directories back.

        Args:
            quiet: another exception is on its way: errors are logged, and a wait ends after ``shutdown_s``.
            within_s: wait this long at most; None for as long as it takes.

        Raises:
            SafeCheckpointError: a save failed, and its error was not raised yet.
        """
        self.closed = True
        self._living.discard(self)
        self.engine.close(
            quiet=quiet, within_s=self.config.timeouts.shutdown_s if quiet and within_s is None else within_s
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiet=error is not None)

    def _candidates_of(self, home: OpenHome) -> Callable[[], list[Candidate]]:
        return lambda: self.candidates(home.held.path)


def candidates_in(folder: Path, adapter: str, kind: Kind | None = None) -> list[Candidate]:
    """The checkpoints in ``folder`` that ``adapter`` may resume from, unordered. On rank 0.

    Args:
        folder: the directory.
        adapter: its name under ``"adapter"`` in the manifest's notes.
        kind: the layout of the framework, whose own checkpoints count as well; None for ours alone.

    Raises:
        OSError: it could not be listed.
    """
    number_of, problem = (kind.number_of, kind.problem) if kind is not None else (lambda _: None, None)
    found = list_directories(folder, number_of, problem)
    return [c for c in found if c.manifest is None or c.manifest.notes.get("adapter") == adapter]


def _verify_file(path: Path) -> None:
    if verify_if_ours(path) or not presence.ends_as_archive(path):  # torch's format before 1.6 has nothing to check
        return
    # Of another tool: its CRC-32s are all there is to check, and torch.load never looks at them.
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CorruptCheckpointError(path=str(path), file=damaged, message="its CRC-32 does not match")


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of a checkpoint that is a directory; None where another tool wrote it.

    Raises:
        SafeCheckpointError: it cannot be read, or is damaged.
    """
    return read_manifest(path) if presence.is_there(path / MANIFEST_NAME) else None
