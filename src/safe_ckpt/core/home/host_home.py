"""A directory on each host: the ranks of a host write to its own disk, and what is committed is committed on all of them.

Rank 0 leads; on each other host one rank, its leader, answers (``HostCalls``). Every host has its own lock, its own pending
folder and its own checkpoints, each with the whole manifest and with the files that this host's ranks have written.

    moment    on rank 0's host                      on each other host                     a crash behind it leaves there
    prepare   pending folder                        pending folder                         what the next start sweeps
    seal      manifest durable in the folder        its files checked, manifest durable    the same: rank 0 has not committed
    commit    the folder gets its name              nothing                                a folder that the next start takes on
    finish    nothing                               the folder gets its name               the checkpoint

The commit is the rename on rank 0's host: all parts are durable by then. A host that dies before its own rename has a sealed
folder. At the next start each host tells what it has committed, and a sealed folder of what any host has committed gets its
name before anything is swept: a host renames behind rank 0 alone.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_entry
from safe_ckpt.core.home import extra_files
from safe_ckpt.core.home.candidates import list_directories
from safe_ckpt.core.home.file_home import FileHome, FilePublication
from safe_ckpt.core.home.home import Additions, Copies, NewCheckpoint, Publication
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import entries_in, really_inside
from safe_ckpt.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SafeCheckpointError,
    UnsupportedFormatError,
)

logger = logging.getLogger(__name__)
_PART_BYTES = 2 << 20  # of a file that goes from host to host; as text it is below what the store would compress
_FILLING = "filling-"
Needs = Callable[[Manifest, Sequence[int]], Collection[str]]
"""Which files of a checkpoint these ranks read."""
Action = Callable[[Mapping[str, Any]], Any]


class Calls(Protocol):
    """Rank 0's calls of the leaders of the other hosts; ``HostCalls``."""

    def call(
        self,
        action: str,
        args: Mapping[str, Any] | None = None,
        *,
        limit_s: float,
        only: Sequence[int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Any]:
        """Have ``action`` done on each other host, and wait for it. Returns the answers, by leader."""

    def close(self, *, limit_s: float) -> None:
        """Let the others end. Never raises."""


class Answering(Protocol):
    """A leader's answers; ``HostAgent``."""

    def wait(self, limit_s: float) -> None:
        """Wait until rank 0 has let it end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """How rank 0 and the leaders of the other hosts reach each other.

    Attributes:
        rank: this one.
        hosts: the ranks of each host, by its first one, which leads it.
        calls: on rank 0 makes the calls under a name.
        answer: on a leader answers those under a name, by these actions, and calls the last one at the end.
    """

    rank: int
    hosts: Mapping[int, Sequence[int]]
    calls: Callable[[str], Calls]
    answer: Callable[[str, Mapping[str, Action], Callable[[], None]], Answering]


class HostHome(FileHome):
    """See ``FileHome``. The same on every rank; only rank 0 and the leaders of the other hosts do anything.

    Args:
        path: the directory, on each host.
        lease_s: see ``CheckpointConfig``.
        owner: what holds it within this process and how to free it, for messages.
        meeting: how the hosts reach each other.
        name: unique to this directory in this session.
        timeouts: how long to wait.
        hidden: the hidden folder, if it is not to lie in ``path``.

    Attributes:
        hosts: the ranks of each host, by its first one.
        needs: which files of a checkpoint ranks read, for what is fetched; None for all of them.
    """

    is_on_each_host: ClassVar[bool] = True
    unsupported = frozenset({"file", "stamps", "links", "pointers"})

    def __init__(
        self,
        path: Path,
        *,
        lease_s: float,
        owner: str,
        meeting: Meeting,
        name: str,
        timeouts: Timeouts,
        hidden: Path | None = None,
    ) -> None:
        super().__init__(path, lease_s=lease_s, hidden=hidden, owner=owner)
        self.hosts = {leader: tuple(ranks) for leader, ranks in meeting.hosts.items()}
        self._timeouts = timeouts
        self._rank = meeting.rank
        self._committed: Collection[str] = ()
        self._under_way: dict[str, FilePublication] = {}
        self._additions: dict[str, Additions] = {}  # of this rank's own saves, by the attempt
        self._served = self._actions()
        # What is copied to or from a far place may take long, and no save waits for it.
        names = (name, f"{name}-copies")
        self._calls: tuple[Calls, ...] = ()
        self._agents: tuple[Answering, ...] = ()
        self.needs: Needs | None = None
        if self._rank == 0:
            self._calls = tuple(meeting.calls(one) for one in names)
        elif self._rank in self.hosts:
            ends = (super().close, lambda: None)
            self._agents = tuple(meeting.answer(one, self._served, end) for one, end in zip(names, ends, strict=True))

    @property
    def own_ranks(self) -> Sequence[int]:
        """The ranks of this host."""
        return next(ranks for ranks in self.hosts.values() if self._rank in ranks)

    def _actions(self) -> dict[str, Action]:
        return {
            "list": lambda _: list(self._op_ids()),
            "open": self._open_here,
            "prepare": self._prepare_here,
            "prefill": lambda args: FileHome.make_prefilled(self, args["attempt"]),
            "adopt": self._adopt_here,
            "seal": self._seal_here,
            "finish": self._finish_here,
            "abort": self._abort_here,
            "clean up": self._clean_up_here,
            "discard": lambda args: len(FileHome.discard(self, self._there(args["names"]))),
            "quarantine": self._quarantine_here,
            "confirm": lambda _: FileHome.confirm(self),
            "have": self._have_here,
            "verify": lambda args: self.verified_here(args["name"], args["op_id"]),
            "read": lambda args: self._read_here(args["name"], args["file"], args["start"], args["length"]),
            "room": lambda args: self._room_here(args["needed"].get(str(self._rank), 0)),
            "make": self._make_here,
            "fill": lambda args: self._fill_here(**args),
        }

    def call(
        self,
        action: str,
        args: Mapping[str, Any] | None = None,
        *,
        limit_s: float = 0.0,
        only: Sequence[int] | None = None,
    ) -> dict[int, Any]:
        """Rank 0: see ``HostCalls.call``. ``limit_s``: 0 for ``barrier_s``."""
        return self._calls[0].call(action, args, limit_s=limit_s or self._timeouts.barrier_s, only=only)

    def serve(self, action: str, answer: Action) -> None:
        """See ``Home``. Where it is about something under way, it learns in which folder that is."""

        def located(args: Mapping[str, Any]) -> Any:
            under_way = self._under_way.get(args.get("attempt", ""))
            inside = {"path": str(self.path / args["name"])} if under_way is None else {"folder": str(under_way.folder)}
            return answer({**args, **inside})

        self._served[action] = located

    # ---- held

    def open(self, patience_s: float | None = None) -> None:
        """See ``Home``. On rank 0, which opens the others behind its own."""
        limit_s = self._timeouts.barrier_s + (patience_s or 0.0)
        told = self.call("list")
        self._committed = {op_id for op_ids in told.values() for op_id in op_ids}
        super().open(patience_s)
        try:
            committed = sorted({*self._committed, *self._op_ids()})
            self.call("open", {"patience_s": patience_s, "committed": committed}, limit_s=limit_s)
        except BaseException:
            self.close()
            raise

    def _open_here(self, args: Mapping[str, Any]) -> None:
        self._committed = set(args["committed"])
        super().open(args["patience_s"])

    def _op_ids(self) -> list[str]:
        """The checkpoints that this host has committed."""
        with contextlib.suppress(FileNotFoundError):
            found = list_directories(self.path, on_error=lambda path, error: logger.warning("%s: %s", path, error))
            return [one.manifest.op_id for one in found if one.manifest is not None]
        return []

    def _repair(self) -> None:
        """Take on first what is committed elsewhere: a replaced one in the trash must not come back in its place."""
        for attempt in entries_in(self.pending):
            for sealed in entries_in(attempt) if attempt.is_dir() and not attempt.is_symlink() else ():
                manifest = _manifest_of(sealed)
                if manifest is None or manifest.op_id not in self._committed:
                    continue
                there = _manifest_of(self.path / manifest.name)
                if there is not None and there.sequence >= manifest.sequence:
                    continue
                self.confirm()
                final = self.path / manifest.name
                logger.warning("%s: every host has its part: it gets its name here, too", final)
                durable.publish_directory(sealed, final, self.aside(attempt.name, final))
        super()._repair()

    def close(self) -> None:
        """See ``Home``. On every rank; a leader stays until rank 0 has closed."""
        for calls in reversed(self._calls):
            calls.close(limit_s=self._timeouts.shutdown_s)
        for agent in reversed(self._agents):
            agent.wait(self._timeouts.shutdown_s)
        super().close()

    # ---- saved

    def begin(self, new: NewCheckpoint, timeouts: Timeouts) -> FilePublication:
        """See ``Home``."""
        path = self.path / self.name_of(new.path)
        if self._rank:
            if self._rank in self.hosts:
                self._additions[new.attempt] = new.additions
            return FilePublication(new, self, path, timeouts)
        if new.needed_by_rank:
            new = dataclasses.replace(new, needed_bytes=sum(new.needed_by_rank[rank] for rank in self.own_ranks))
        return HostPublication(new, self, path, timeouts)

    def make_prefilled(self, key: str) -> None:
        """See ``FileHome``. On each host."""
        super().make_prefilled(key)
        self.call("prefill", {"attempt": key})

    def abandon(self, prefilled: Path | None) -> None:
        """See ``Home``. On each host."""
        super().abandon(prefilled)
        if prefilled is not None and self._rank == 0:
            with contextlib.suppress(SafeCheckpointError):
                self.call("abort", {"attempt": prefilled.parent.name})

    def _prepare_here(self, args: Mapping[str, Any]) -> None:
        path = self.path / args["name"]
        new = NewCheckpoint(
            path=path,
            manifest=Manifest.from_json(args["manifest"], str(path)),
            op_id=args["attempt"],
            needed_bytes=sum(args["needed"].get(str(rank), 0) for rank in self.own_ranks),
            folders=args["folders"],
            additions=Additions(
                prefilled=extra_files.prefilled(self.pending / key) if (key := args["prefilled"]) else None
            ),
        )
        self._under_way[args["attempt"]] = publication = FilePublication(new, self, path, self._timeouts)
        publication.prepare()
        if (before := _manifest_of(path)) is not None and before.op_id == new.manifest.op_id:
            _adopt(path, publication.folder, before.files)

    def _adopt_here(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The files of hooks that ran on this host."""
        folder = self._under_way[args["attempt"]].folder
        return [dataclasses.asdict(one) for one in extra_files.adopt(folder, set(args["written"]), rank=self._rank)]

    def _seal_here(self, args: Mapping[str, Any]) -> None:
        publication = self._under_way[args["attempt"]]
        manifest = Manifest.from_json(args["manifest"], str(self.path))
        own = set(args["files"].get(str(self._rank), ()))
        publication.check_written([one for one in manifest.files if one.path in own])
        # Of a save this rank has begun its own half; of a copy there is none.
        publication.seal_as(manifest, self._additions.get(args["attempt"], Additions()).keep_foreign)

    def _finish_here(self, args: Mapping[str, Any]) -> None:
        self._under_way[args["attempt"]].give_name()

    def _abort_here(self, args: Mapping[str, Any]) -> None:
        self._under_way.pop(args["attempt"], None)
        self._additions.pop(args["attempt"], None)
        self.drop_pending(args["attempt"])

    def _clean_up_here(self, args: Mapping[str, Any]) -> None:
        """Delete what rank 0's host does not have and is older than what was just committed: a part of it is lost."""
        self._abort_here(args)
        kept = set(args["names"])
        left = [one for one in self.look(lambda *_: None) if one.manifest is not None and one.path.name not in kept]
        FileHome.discard(self, [one.path for one in left if one.manifest and one.manifest.sequence < args["sequence"]])

    # ---- copied to a far place, and from there

    def send_elsewhere(self, asked: Copies) -> list[FileEntry]:
        """See ``Home``."""
        wanted = [one for one in asked.manifest.files if not os.path.lexists(asked.path / one.path)]
        if not wanted:
            return []
        name, limit_s = self.name_of(asked.path), self._timeouts.lengthy_s
        have = {"name": name, "op_id": asked.manifest.op_id}
        told = self._calls[1].call("have", have, limit_s=limit_s, check=asked.check)
        by_leader: dict[str, list[str]] = {}
        for entry in wanted:
            leader = next((rank for rank in told if entry.path in told[rank]), None)
            if leader is None:
                raise IncompleteCheckpointError(path=str(asked.path), file=entry.path, message="is on no host")
            by_leader.setdefault(str(leader), []).append(entry.path)
        send = {"name": name, "files": by_leader, "folder": str(asked.folder), "folders": list(asked.folders)}
        sent = self._calls[1].call("send", send, limit_s=limit_s, check=asked.check)
        return [FileEntry(**row) for rows in sent.values() for row in rows]

    def _have_here(self, args: Mapping[str, Any]) -> list[str]:
        path = really_inside(self.path, args["name"])
        manifest = _manifest_of(path)
        if manifest is None or manifest.op_id != args["op_id"]:
            return []
        return [entry.path for entry in manifest.files if os.path.lexists(path / entry.path)]

    def fetch_elsewhere(self, publication: Publication, manifest: Manifest, source: Place) -> list[FileEntry]:
        """See ``Home``."""
        needed = {leader: self.needs(manifest, ranks) for leader, ranks in self.hosts.items()} if self.needs else {}
        entries = {entry.path: entry for entry in manifest.files}
        files = {leader: sorted(needed.get(leader, entries)) for leader in self.hosts}
        fetched = cast("HostPublication", publication).fetched(files)
        asked = {
            "attempt": fetched,
            "source": str(source),
            "files": {
                str(leader): [dataclasses.asdict(entries[one]) for one in files[leader]] for leader in files if leader
            },
        }
        self.call("fetch", asked, limit_s=self._timeouts.lengthy_s)
        return [entries[file] for file in files[0]]

    # ---- deleted

    def discard(self, places: Iterable[Place]) -> list[Path]:
        """See ``Home``. Here first: what is left elsewhere then is no checkpoint."""
        gone = super().discard(places)
        if gone:
            self.call("discard", {"names": [self.name_of(path) for path in gone]})
        return gone

    def quarantine(self, place: Place) -> Path:
        """See ``Home``. On all hosts that have it."""
        self.call("quarantine", {"name": self.name_of(place)})
        return super().quarantine(place)

    def _there(self, names: Sequence[str]) -> list[Path]:
        return [path for name in names if os.path.lexists(path := really_inside(self.path, name))]

    def _quarantine_here(self, args: Mapping[str, Any]) -> None:
        for path in self._there([args["name"]]):
            FileHome.quarantine(self, path)

    # ---- read

    def complete(self, path: Path, needs: Needs, *, limit_s: float) -> dict[str, Any] | None:
        """Rank 0: have every host get the files that its ranks read, from those that have them. Each byte is verified.

        Returns:
            Why this checkpoint cannot be used, and which of ``KINDS`` that is; None when every host has what it needs.
        """
        try:
            manifest = read_manifest(path)
        except IncompleteCheckpointError as error:
            return {"why": f"rank 0: {error}", "kind": "missing"}
        except CorruptCheckpointError as error:
            return {"why": f"rank 0: {error}", "kind": "bad"}
        name, deadline = self.name_of(path), time.monotonic() + limit_s
        told = self.call("verify", {"name": name, "op_id": manifest.op_id}, limit_s=limit_s)
        found = {0: self.verified_here(name, manifest.op_id), **told}
        lacking: dict[str, list[int]] = {}
        for leader, ranks in self.hosts.items():
            for file in sorted(set(needs(manifest, ranks)) - set(found[leader]["good"])):
                lacking.setdefault(file, []).append(leader)
        for file in lacking:
            if not any(file in found[leader]["good"] for leader in self.hosts):
                return _lost(path, manifest, file, found)
        entries = {entry.path: entry for entry in manifest.files}
        needed = {
            leader: sum(entries[one].size_bytes for one in lacking if leader in lacking[one]) for leader in self.hosts
        }
        self._room_here(needed[0])
        self.call("room", {"needed": {str(leader): size for leader, size in needed.items()}})
        new = {leader for leaders in lacking.values() for leader in leaders if not found[leader]["there"]}
        if new:
            self.call("make", {"name": name, "manifest": manifest.to_json()}, only=sorted(new))
        for file, leaders in lacking.items():
            source = next(leader for leader in self.hosts if file in found[leader]["good"])
            self._spread(name, manifest, entries[file], source, leaders, deadline)
        return None

    def _spread(
        self, name: str, manifest: Manifest, entry: FileEntry, source: int, leaders: Sequence[int], deadline: float
    ) -> None:
        """Send a file from one host to others, in parts."""
        for start in range(0, max(1, entry.size_bytes), _PART_BYTES):
            left_s = max(0.001, deadline - time.monotonic())
            asked: dict[str, Any] = {
                "name": name,
                "file": entry.path,
                "start": start,
                "length": min(_PART_BYTES, entry.size_bytes - start),
            }
            there = self.call("read", asked, limit_s=left_s, only=[source])[source] if source else None
            data = self._read_here(**asked) if there is None else there
            last = start + _PART_BYTES >= entry.size_bytes
            part: dict[str, Any] = {
                "name": name,
                "op_id": manifest.op_id,
                "file": entry.path,
                "start": start,
                "data": data,
                "last": last,
            }
            others = [leader for leader in leaders if leader]
            if others:
                self.call("fill", part, limit_s=left_s, only=others)
            if 0 in leaders:
                self._fill_here(**part)

    def verified_here(self, name: str, op_id: str) -> dict[str, Any]:
        """Which files of a checkpoint this host has, as they were written, and what is wrong with others."""
        path = really_inside(self.path, name)
        manifest = _manifest_of(path)
        if manifest is None or manifest.op_id != op_id:
            return {"there": False, "good": [], "bad": {}}
        good: list[str] = []
        bad: dict[str, str] = {}
        for entry in manifest.files:
            try:
                verify_entry(path, entry, cached=True)
                good.append(entry.path)
            except IncompleteCheckpointError:
                continue
            except CorruptCheckpointError as error:
                bad[entry.path] = str(error)
        return {"there": True, "good": good, "bad": bad}

    def _room_here(self, needed_bytes: int) -> None:
        """Refuse files of other hosts that do not fit here, before any of them comes."""
        why = "What the ranks of this host read comes from other hosts, and stays here as long as the checkpoint does."
        durable.require_space(self.path, needed_bytes, why)

    def _read_here(self, name: str, file: str, start: int, length: int) -> str:
        with open(really_inside(really_inside(self.path, name), file), "rb") as stream:
            stream.seek(start)
            return base64.b64encode(stream.read(length)).decode()

    def _fill_here(self, name: str, op_id: str, file: str, start: int, data: str, *, last: bool) -> None:
        """Take a part of a file of a checkpoint that is committed. It gets its name when it is whole and as it was written."""
        final = really_inside(self.path, name)
        folder = self.make_pending(f"{_FILLING}{op_id}")
        staged = folder / file.replace("%", "%25").replace("/", "%2F")
        with open(staged, "r+b" if start else "wb") as stream:
            stream.seek(start)
            stream.write(base64.b64decode(data))
            stream.flush()
            os.fsync(stream.fileno())
        if not last:
            return
        entry = next(one for one in read_manifest(final).files if one.path == file)
        verify_entry(folder, dataclasses.replace(entry, path=staged.name), cached=True)
        target = really_inside(final, file)
        durable.make_directory(target.parent)
        self.confirm()
        durable.publish_file(staged, target)
        self.drop_pending(folder.name)

    def _make_here(self, args: Mapping[str, Any]) -> None:
        """A host that is new has nothing of a checkpoint that is committed: it gets the folder, and then files."""
        final = really_inside(self.path, args["name"])
        manifest = Manifest.from_json(args["manifest"], str(final))
        attempt = f"{_FILLING}{manifest.op_id}-folder"
        folder = self.make_pending(attempt) / final.name
        folder.mkdir(exist_ok=True)
        durable.write_durably(folder / MANIFEST_NAME, manifest.to_bytes())
        aside = self.aside(attempt, final)
        self.confirm()
        durable.publish(folder, final, lambda: aside)
        self.drop_pending(attempt)


class HostPublication(FilePublication):
    """See ``FilePublication``: rank 0's, of what all hosts write."""

    _home: HostHome
    _fetched: Mapping[int, Sequence[str]] | None = None

    def fetched(self, files: Mapping[int, Sequence[str]]) -> str:
        """It is a copy of a far one: these are the files that each host gets. Returns the name of the attempt."""
        self._fetched = files
        return self._new.attempt

    def _written(self, entries: Sequence[FileEntry]) -> dict[int, list[str]]:
        """Which files each host has written, by its leader."""
        leader_of = {rank: leader for leader, ranks in self._home.hosts.items() for rank in ranks}
        files: dict[int, list[str]] = {leader: [] for leader in self._home.hosts}
        for entry in entries:
            files[leader_of[entry.rank]].append(entry.path)
        return files

    def _adopted(self, written: Collection[str]) -> list[FileEntry]:
        """Take on files that hooks have written on the other hosts. Of one name the first host's counts."""
        told = self._home.call("adopt", {"attempt": self._new.attempt, "written": sorted(written)})
        found: dict[str, FileEntry] = {}
        for leader in sorted(told):
            for row in told[leader]:
                found.setdefault(row["path"], FileEntry(**row))
        return [entry for path, entry in found.items() if not os.path.lexists(self.folder / path)]

    def prepare(self) -> None:
        """See ``Publication``."""
        new = self._new
        super().prepare()
        asked = {
            "name": new.path.name,
            "attempt": new.attempt,
            "manifest": new.manifest.to_json(),
            "needed": {str(rank): size for rank, size in enumerate(new.needed_by_rank)},
            "folders": list(new.folders),
            "prefilled": new.additions.prefilled.parent.name if new.additions.prefilled is not None else "",
        }
        self._home.call("prepare", asked)

    def commit(
        self, entries: Sequence[FileEntry], sections: Mapping[str, Any], check_still_wanted: Callable[[], None]
    ) -> CheckpointInfo:
        """See ``Publication``."""
        here = set((self._fetched or self._written(entries))[0])
        self._check_written([entry for entry in entries if entry.path in here], check_still_wanted)
        if self._new.additions.prefilled is not None:
            entries = (*entries, *self._adopted({entry.path for entry in entries}))
        manifest, entries = self._seal(entries, sections)
        files = self._fetched or self._written(entries)
        by_leader = {str(leader): list(names) for leader, names in files.items()}
        asked = {"attempt": self._new.attempt, "manifest": manifest.to_json(), "files": by_leader}
        self._home.call("seal", asked)
        info = self._publish(manifest, entries)
        try:
            self._home.call("finish", {"attempt": self._new.attempt})
        except SafeCheckpointError as error:
            # It is committed: every host has its part, and gives it its name at the next start.
            logger.warning("%s is committed, and has not its name on every host: %s", info.path, error)
        return info

    def abort(self) -> None:
        """See ``Publication``."""
        super().abort()
        with contextlib.suppress(SafeCheckpointError):
            self._home.call("abort", {"attempt": self._new.attempt})

    def clean_up(self) -> None:
        """See ``Publication``."""
        super().clean_up()
        # It is committed: what the disk refuses now does not make it a failure.
        with contextlib.suppress(SafeCheckpointError, OSError):
            names = [path.name for path in entries_in(self._home.path)]
            sequence = self._new.manifest.sequence
            self._home.call("clean up", {"attempt": self._new.attempt, "names": names, "sequence": sequence})


def _lost(path: Path, manifest: Manifest, file: str, found: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Why a checkpoint cannot be used of which no host has this file as it was written."""
    for leader in found:
        if file in found[leader]["bad"]:
            return {"why": f"rank {leader}: {found[leader]['bad'][file]}", "kind": "bad"}
    writer = next(entry.rank for entry in manifest.files if entry.path == file)
    return {"why": f"{path}: {file}, which rank {writer} wrote, is on no host of this job", "kind": "missing"}


def _manifest_of(path: Path) -> Manifest | None:
    try:
        return read_manifest(path) if path.is_dir() and not path.is_symlink() else None
    except (OSError, SafeCheckpointError, UnsupportedFormatError):
        return None


def _adopt(there: Path, folder: Path, entries: Iterable[FileEntry]) -> None:
    """A copy of a checkpoint replaces what is left of it here: what is in order of that stays."""
    for entry in entries:
        new = folder / entry.path
        if os.path.lexists(new):
            continue
        with contextlib.suppress(CorruptCheckpointError, FileNotFoundError):
            verify_entry(there, entry, cached=True)
            new.parent.mkdir(parents=True, exist_ok=True)
            durable.link_or_copy(there / entry.path, new)
