"""One directory of the mirror: how a checkpoint gets there, under which name, and what is deleted after that."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.core.formats.file_plan import LEAST_SHARED_BYTES
from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_archive
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.candidates import holds_weights_alone, newest_sequence
from safe_ckpt.core.home.home import Copies, Home, NewCheckpoint
from safe_ckpt.core.home.places import everything_in, home_at
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.durable import HalfCommittedError, WrittenFile
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.writer.existing import MOST_BYTES, Adoption
from safe_ckpt.core.writer.sink import WriteJob
from safe_ckpt.errors import CorruptCheckpointError, DirectoryInUseError, SafeCheckpointError
from safe_ckpt.extensions.mirror.fetching import mirrored, mirrored_name
from safe_ckpt.extensions.tries import Tries

_LAST_WORDS_S = 5.0
Send = Callable[[WriteJob], Sequence[WrittenFile]]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A checkpoint that is to be uploaded.

    Attributes:
        root: the directory of the mirror.
        home: the local directory.
        info: the checkpoint.
        saved: this job saved it, so nothing in the mirror is newer. Otherwise an earlier job did.
    """

    root: Place
    home: Home
    info: CheckpointInfo
    saved: bool


class Tier:
    """A directory of the mirror, owned by this job from its opening to ``close``.

    Args:
        place: where.
        config: settings.
        owner: what this belongs to and how that is ended, for messages.
        keeps_all: it holds checkpoints that the user names one by one: they go when they are replaced, or are deleted locally.
        verified: a checkpoint in it that this job has read and verified: the store may copy of it what did not change.

    Raises:
        DirectoryError: the store refuses, gives no answer, or does not keep conditions.
        DirectoryInUseError: a live job owns it.
        OSError: the store gave no answer.
    """

    def __init__(
        self,
        place: Place,
        config: CheckpointConfig,
        owner: str,
        *,
        keeps_all: bool,
        verified: tuple[Place, Manifest] | None,
    ) -> None:
        self._root = home_at(place, lease_s=config.lease_s, owner=owner, unfenced=config.storage.unfenced)
        self._root.open(config.timeouts.barrier_s + config.lease_s)
        try:
            candidates = everything_in(self._root.path)
        except BaseException:
            self._root.close()
            raise
        self._catalog = Catalog(candidates)
        self._timeouts = config.timeouts
        self._rules = None if keeps_all else _rules_of(config)
        manifests = {one.path: one.manifest for one in candidates if one.manifest is not None}
        self._unchanged = config.unchanged
        self._copies = Tries()
        self._copied: dict[str, int] = {}  # how often in a row the store has copied a file
        self._newest = verified
        self._there = {manifest.op_id for manifest in manifests.values()}
        self._names: dict[Place, str] = {path: manifest.name for path, manifest in manifests.items()}
        self._weights: set[Place] = {path for path, one in manifests.items() if holds_weights_alone(one.notes)}
        self._newest_before = newest_sequence(candidates)
        self._root.start_after(self._newest_before)

    def upload(self, one: Waiting, send: Send, check: Callable[[], None]) -> str | None:
        """Upload it, compared with what was written, and then delete what the rules do not keep.

        Args:
            one: what.
            send: uploads files.
            check: called while waiting for other hosts; raises to give up.

        Returns:
            Where it is, "" if it was there already, None if nothing is to be uploaded.

        Raises:
            CorruptCheckpointError: its bytes are not those that were written.
            DirectoryInUseError: another job has taken this over.
            OSError: a file could not be read, or the store gave no answer.
        """
        path = one.info.file_path
        if one.info.op_id in self._there:
            return ""
        if not path.exists() or (not one.saved and one.info.sequence <= self._newest_before):
            return None  # retention was faster, or what is there came later
        manifest = read_manifest(path)
        new = self._new(one, manifest, path)
        publication = self._root.begin(new, self._timeouts)
        try:
            publication.prepare()
            earlier = self._earlier(manifest)
            copies = Copies(
                path=path, manifest=manifest, folder=publication.folder, folders=publication.folders, check=check
            )
            elsewhere = one.home.send_elsewhere(copies)
            entries = _sent(copies, functools.partial(self._send, send), earlier, elsewhere)
            info = publication.commit(entries, {}, lambda: None)
        except BaseException as error:
            told = publication.explain(error, rank=0, phase="mirror")
            if not isinstance(error, HalfCommittedError):  # as in a save: what it replaced is not deleted
                publication.abort()
            if isinstance(told, DirectoryInUseError):
                raise told from error
            raise
        publication.clean_up()
        self._there.add(manifest.op_id)
        self._newest = info.path, replace(new.manifest, files=tuple(entries))
        self._copied = {name: self._copied.get(name, 0) + 1 for name in earlier}
        self._names[info.path] = new.path.name
        if holds_weights_alone(manifest.notes):
            self._weights.add(info.path)
        self._retain(info)
        return str(info.path)

    def _new(self, one: Waiting, manifest: Manifest, path: Path) -> NewCheckpoint:
        ordered = manifest
        if one.saved and manifest.sequence <= self._newest_before:
            # This host's clock is behind that of an earlier one: in the order it would come before what was there.
            ordered = replace(manifest, sequence=self._root.next_sequence())
        folders = {str(folder) for entry in manifest.files for folder in PurePosixPath(entry.path).parents}
        return NewCheckpoint(
            path=self._root.path / mirrored_name(path, one.home),
            manifest=mirrored(ordered, path, one.home, single=not path.is_dir()),
            op_id=uuid.uuid4().hex,
            needed_bytes=sum(entry.size_bytes for entry in manifest.files) or one.info.size_bytes,
            folders=sorted(folders - {"."}),  # one comes before those in it
        )

    def follow(self, deleted: Collection[str]) -> None:
        """Delete what was deleted locally, by its name here, but never the newest that is there."""
        committed = self._catalog.committed
        newest = max(committed, key=lambda info: info.sequence, default=None)
        gone = [info for info in committed if self._names.get(info.path) in deleted]
        if due := [info.path for info in gone if info is not newest]:
            self._catalog.forget(due)
            self._discard(due)

    def _discard(self, due: Sequence[Place]) -> None:
        gone: Sequence[Place] = ()
        try:
            gone = self._root.discard(due)
        finally:
            self._catalog.drop_deleted(gone)  # what the store refused is due once more

    def close(self, deleted: Collection[str] = ()) -> None:
        """Give the directory back. ``deleted``: as in ``follow``, with little patience."""
        if deleted:
            self._root.persist(_LAST_WORDS_S)
            with contextlib.suppress(OSError, SafeCheckpointError):
                self.follow(deleted)
        self._root.close()

    def _send(self, send: Send, job: WriteJob) -> Sequence[WrittenFile]:
        copied = {one.path for one in job.adoptions}
        try:
            written = send(job)
        except BaseException:
            if copied:
                self._copies.failed()
            raise
        if not all(result.shared_bytes for result in written if result.path in copied):
            self._copies.failed()
        elif copied:
            self._copies.worked()
        return written

    def _earlier(self, manifest: Manifest) -> dict[str, str]:
        """The places of files with this one's bytes that this job has uploaded or verified, by their names."""
        self._copies.begin()
        if self._root.is_mounted:
            return {}  # no store copies there
        if self._newest is None or not (self._unchanged.share and self._copies.allowed):
            return {}
        folder, newest = self._newest
        there = {(entry.path, entry.size_bytes, entry.xxh3_128) for entry in newest.files}
        most = self._unchanged.full_every
        return {
            entry.path: f"{folder}/{entry.path}"
            for entry in manifest.files
            if LEAST_SHARED_BYTES <= entry.size_bytes <= MOST_BYTES
            and (entry.path, entry.size_bytes, entry.xxh3_128) in there
            and (most is None or self._copied.get(entry.path, 0) + 1 < most)
        }

    def _retain(self, info: CheckpointInfo) -> None:
        due = None if self._rules is None else functools.partial(self._due, self._rules, info)
        decision = retention.decide_deletions(info, self._catalog, due)
        if decision is not None:
            self._discard(decision.to_delete)

    def _due(self, rules: Retention, new: CheckpointInfo, committed: Sequence[CheckpointInfo]) -> list[Place]:
        """Weights alone neither count nor go, and what was just committed stays."""
        counted = [one for one in committed if one.path not in self._weights]
        return [one.path for one in retention.to_delete(counted, rules) if one.path != new.path]


def _rules_of(config: CheckpointConfig) -> Retention | None:
    """The mirror's rules; what is the best of the directory stays the best there."""
    mirror, local = config.mirror, config.retention
    if mirror.keep_last is None and mirror.keep_every_steps is None:
        return None
    return replace(local, keep_last=mirror.keep_last, keep_every_steps=mirror.keep_every_steps)


def _sent(copies: Copies, send: Send, earlier: Mapping[str, str], elsewhere: Sequence[FileEntry]) -> list[FileEntry]:
    """Upload the files: the bytes that were written, and no others. Return their entries, as they are in the manifest.

    Args:
        copies: what goes where.
        send: uploads.
        earlier: objects with the bytes of some of the files, which the store copies.
        elsewhere: what other hosts have sent.
    """
    manifest, path, folder = copies.manifest, copies.path, copies.folder
    single = not path.is_dir()
    expected = {entry.path: entry for entry in manifest.files}
    there = {entry.path for entry in elsewhere}
    names, base = ([path.name], path.parent) if single else ([name for name in expected if name not in there], path)
    files = {
        name: FileCopy(source=str(base / name), path=f"{folder}/{name}", stamp=Stamp.of(os.stat(base / name)))
        for name in names
    }
    adoptions = [
        Adoption(
            sources=(source,),
            path=f"{folder}/{name}",
            size_bytes=expected[name].size_bytes,
            xxh3_128=expected[name].xxh3_128,
            instead=files[name],
        )
        for name, source in ({} if single else earlier).items()
        if name in files
    ]
    own = [copy for name, copy in files.items() if single or name not in earlier]
    written = send(
        WriteJob(
            name=folder.name,
            rank=0,
            folder=str(folder),
            copies=own,
            adoptions=adoptions,
            directories=copies.folders,
        )
    )
    entries = [
        FileEntry(path=one.path.removeprefix(f"{folder}/"), size_bytes=one.size_bytes, xxh3_128=one.xxh3_128, rank=0)
        for one in written
    ]
    entries += elsewhere
    if single:
        verify_archive(path, cached=True)  # it carries its own digest
        if Stamp.of(os.stat(path)) != files[path.name].stamp:
            raise OSError(errno.ESTALE, "it changed while it was being sent", str(path))
        return entries
    for entry in entries:
        known = expected[entry.path]
        if (known.size_bytes, known.xxh3_128) != (entry.size_bytes, entry.xxh3_128):
            message = "its bytes are not those that were written: it is not mirrored"
            raise CorruptCheckpointError(path=str(path), file=entry.path, message=message)
    return list(manifest.files)
