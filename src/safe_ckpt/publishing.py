"""Any saver becomes atomic: whatever the ranks write into a folder appears as one checkpoint, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination.agreed_config import agree_on_settings
from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME
from safe_ckpt.core.home import candidates, extra_files, retention
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.saving.names import open_folder, refuse
from safe_ckpt.core.saving.request import (
    Destination,
    Facts,
    OnCommit,
    Payload,
    SaveRequest,
    check_step,
    checked_metrics,
)
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.objects.options import refuse_url
from safe_ckpt.core.storage.objects.place import absolute
from safe_ckpt.core.storage.presence import Stamp, checked_name
from safe_ckpt.errors import ClosedError, SafeCheckpointError, SaveError, StateError
from safe_ckpt.extensions.assemble import assemble

if TYPE_CHECKING:
    from safe_ckpt.config import CheckpointConfig, ConfigLike
    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.formats.manifest import CheckpointInfo

ADAPTER = "published"
_OF_DCP = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_RESERVED = (MANIFEST_NAME, HIDDEN, HIDDEN_TOO)
_under_way: dict[Path, publishing] = {}
"""Blocks that were left and may not be committed yet, by directory: this process holds it until then."""
_looking = threading.RLock()


class publishing:  # noqa: N801 - it is used as a function
    """A folder that becomes a checkpoint when the block is left. Every rank enters and leaves it, on the thread that trains.

    Whatever the ranks write into the folder, from any of them and with whatever saver, is made durable, sized and hashed, each
    rank a share of the files. Then the ranks agree, the manifest is written, and the folder gets its name, ``step-<step>``, in
    one step; retention follows. If any rank raises, nothing appears, and all ranks raise that rank's error.

    ``safe_ckpt.newest`` finds the newest one again, and ``safe-ckpt list`` and ``verify`` know them.

    Files may lie in folders, and child processes may have written them. Links are kept; what they lead to is neither hashed
    nor copied. Nothing may change the folder once the block is left.

    Args:
        directory: where the checkpoints are, on a file system that all ranks share. It is held from entering the block until
            the commit, so that no other job saves there meanwhile.
        step: the training step; names the folder. Publishing a step again replaces it as a whole.
        config: settings, equal on all ranks: see ``Checkpointer``.
        group: the ranks; None means WORLD, or this process alone when there is no process group.
        metrics: numbers for ``Retention(keep_best=...)``.
        asynchronous: leave the block at once; the files are made durable and hashed in the background. ``result()`` waits, and
            so does the next ``publishing`` in this directory, which raises the error of this one if nobody has.

    Raises:
        ConfigError: the settings are not allowed, or ``directory`` is the address of an object store. On every rank.
        StateError: ``step`` or a metric is none; no rank has written a file, a name is taken, or DCP has not written its last
            one. On every rank.
        DirectoryError: the directory cannot be used, or holds something else under this name. On every rank.
        DirectoryInUseError: a live job holds it, or has taken it over. On every rank.
        DirectoryNotSharedError: a rank does not see the folder that rank 0 made. On every rank.
        NotEnoughSpaceError: the file system cannot take it. On every rank.
        UnsupportedFormatError: the directory holds a checkpoint of a newer format version. On every rank.
        SourceChangedError: something wrote into the folder after the block was left. On every rank.
        SaveError: it could not be made durable or committed; or, on the other ranks, the block was left by an exit such as
            Ctrl-C on one. Entering raises that of an earlier ``asynchronous`` one, too. On every rank.
        UnhealthyStateError: of an earlier ``asynchronous`` one. On every rank.
        CommitOutcomeUnknown: rank 0 was lost, or the storage failed, at the very commit. On the ranks that do not know.
        ClosedError: it was entered already, or ``result`` is called before the block was left. On this rank alone.
        DesyncError: the ranks are at different steps or directories, or have different settings or versions. On every rank that
            came.
        RendezvousTimeout: some ranks did not come within ``barrier_s``, or to the end of the block within ``lengthy_s``;
            names them. On every rank that came.
        PeerLostError: a rank died or stopped; names it. On every rank that is alive.
        TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
        UnexpectedError: the block raised on another rank what is no error of ours; names the rank. That rank raises its own.
        ForkedError: the block was left in a process that was forked within it. On this rank alone.

    Example:
        ```python
        with safe_ckpt.publishing("runs/published", step=100, metrics={"loss": 0.25}) as folder:
            torch.save(model.state_dict(), folder / "model-rank0.pt")  # any saver, from any rank
        print(sorted(os.listdir("runs/published/step-00000100")))
        ```

        ```text
        ['manifest.json', 'model-rank0.pt']
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int,
        config: ConfigLike | None = None,
        *,
        group: ProcessGroup | None = None,
        metrics: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._given = directory
        self._directory = absolute(directory)
        self._step = step
        self._group = group
        self._config = config
        self._metrics = metrics or {}
        self._asynchronous = asynchronous
        self._known: dict[str, str] = {}
        self._engine: Engine | None = None
        self._handle: OpenSave | None = None
        self._folder = Path()

    def __enter__(self) -> Path:
        """The folder, which is empty, or has what another rank has just written."""
        if self._engine is not None:
            raise ClosedError(message="publishing: it was entered already; make a new one for each step")
        settings, metrics = agree_on_settings(self._config, self._check, self._group)
        with _looking:
            earlier = _under_way.pop(self._directory, None)
        if earlier is not None:
            earlier.result()
        self._metrics = metrics
        owner = "safe_ckpt.publishing; leaving its block, or result(), frees it"
        self._engine = Engine(settings, group=self._group, owner=owner, extensions=assemble(settings))
        try:
            with self._engine.together("publishing"):
                self._open(self._engine)
        except BaseException:
            self._engine.close(quiet=True)
            raise
        return self._folder

    def hashed(self, digests: Mapping[str, str]) -> None:
        """Name files that need not be read again, as the program has hashed what it wrote. On any rank, within the block.

        Args:
            digests: paths in the folder -> XXH3-128 of their bytes, as ``xxhash.xxh3_128_hexdigest`` gives it.

        Raises:
            HostileCheckpointError: a path leads out of the folder.
            ValueError: a digest is none.
        """
        for path, digest in digests.items():
            if len(digest) != 32 or set(digest) - set("0123456789abcdef"):
                raise ValueError(f"{path}: expected an XXH3-128 digest of 32 hexadecimal digits, got {digest!r}")
            self._known[checked_name(path, self._folder)] = digest

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self._engine
        if engine is None:
            return
        try:
            with engine.together("publishing"):
                self._handle = self._publish(engine, error)
        except BaseException:
            self._abandon(engine)
            if error is None:
                raise
            return  # what the block raised goes on
        if self._asynchronous:
            with _looking:
                _under_way[self._directory] = self
        else:
            self.result()

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Wait for the commit and give the directory back. On any rank, after the block.

        Args:
            timeout_s: how long to wait; None for as long as a save may take.

        Raises:
            SafeCheckpointError: it failed; see ``SaveHandle.result``. On every rank.
            RendezvousTimeout: it is not over after ``timeout_s``.
            ClosedError: its block was not left yet. On this rank alone.
        """
        if self._handle is None or self._engine is None:
            raise ClosedError(message="publishing: there is no result before its block was left")
        self._handle.wait_until_over(timeout_s)
        with _looking:
            if _under_way.get(self._directory) is self:
                del _under_way[self._directory]
        try:
            return self._handle.result()
        finally:
            self._engine.close(quiet=True)

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._handle is not None and self._handle.done()

    def _check(self, config: CheckpointConfig) -> dict[str, float]:
        del config
        refuse_url(self._given, "publishing: directory")
        check_step(self._step)
        return checked_metrics(self._metrics)

    def _open(self, engine: Engine) -> None:
        """Hold the directory, and make the folder."""
        home = engine.hold(self._directory)
        self._home: FileHome = home
        self._path = self._directory / candidates.step_name(self._step)
        self._catalog = Catalog()

        def list_held() -> None:
            refuse(self._path, ADAPTER)
            found = list_patiently(
                functools.partial(candidates.list_directories, self._directory), engine.config.timeouts
            )
            own = [one for one in found if one.manifest is None or one.manifest.notes.get("adapter") == ADAPTER]
            self._catalog = Catalog(own)
            home.start_after(candidates.newest_sequence(found))

        engine.list_held(home, {"path": self._path}, list_held)
        self._key = engine.agree("publishing", must_match={"path": self._path}, decide=lambda _: uuid.uuid4().hex)
        self._folder = open_folder(engine.coordinator, home, self._key, engine.config.timeouts.barrier_s)

    def _publish(self, engine: Engine, error: BaseException | None) -> OpenSave:
        """Have the files written down, and the folder named: all ranks have left the block."""

        def left() -> dict[str, str]:
            if isinstance(error, Exception):
                raise error
            if error is not None:
                cause = f"the block was left by {type(error).__name__}"
                raise SaveError(name=self._path.name, cause=cause, rank=engine.rank, phase="publishing")
            return self._known

        files = engine.coordinator.agree(
            "leaving the block",
            timeout_s=engine.config.timeouts.lengthy_s,
            must_match={"path": self._path},
            local=left,
            decide=self._listed,
            phase="publishing",
        )
        stamps = {path: Stamp(**row["stamp"]) for path, row in files["files"].items()}
        mine = [path for number, path in enumerate(stamps) if number % engine.coordinator.size == engine.rank]
        in_place = [
            FileCopy(source="", path=path, stamp=stamps[path], known=files["files"][path]["known"]) for path in mine
        ]
        return engine.save(
            SaveRequest(
                destination=Destination(home=self._home, path=self._path, kind="directory"),
                payload=Payload(in_place=in_place, folders=files["folders"]),
                facts=Facts(step=self._step, metrics=self._metrics, notes={"adapter": ADAPTER}, unexamined=("*",)),
                on_commit=OnCommit(
                    prefilled=self._folder,
                    stamps=stamps,
                    catalog=self._catalog,
                    retention=retention.policy_of(engine.config.retention),
                ),
                patient=True,
            )
        )

    def _listed(self, answers: Mapping[int, Mapping[str, str]]) -> dict[str, Any]:
        """List on rank 0 what lies in the folder, the largest first, and which digests are known."""
        known: dict[str, str] = {}
        for rank in sorted(answers):
            known |= answers[rank]
        stamps = extra_files.stamps_in(self._folder)
        if reserved := sorted(path for path in stamps if path.partition("/")[0] in _RESERVED):
            raise StateError(key=reserved[0], message="safe_ckpt keeps this name for itself: give the file another one")
        _refuse_unfinished(stamps)
        if missing := sorted(known.keys() - stamps.keys()):
            raise StateError(key=missing[0], message="it was named as hashed, and is not in the folder")
        order = sorted(stamps, key=lambda path: (-stamps[path].size_bytes, path))
        return {
            "files": {p: {"stamp": dataclasses.asdict(stamps[p]), "known": known.get(p, "")} for p in order},
            "folders": extra_files.folders_in(self._folder),
        }

    def _abandon(self, engine: Engine) -> None:
        """Let nothing appear. Never raises."""
        with contextlib.suppress(SafeCheckpointError, OSError):
            if engine.rank == 0:
                self._home.drop_pending(self._key)
        engine.close(quiet=True)


def _refuse_unfinished(stamps: Mapping[str, Stamp]) -> None:
    """A saver that works in the background has not begun, or has not written what DCP writes last."""
    remedy = "wait in the block for what saves in the background, such as by async_save(...).result()"
    if not stamps:
        raise StateError(key="publishing", message=f"no rank has written a file into the folder: {remedy}")
    described = {path.rpartition("/")[0] for path in stamps if path.endswith(DCP_METADATA)}
    for path in sorted(stamps):
        folder, _, name = path.rpartition("/")
        if _OF_DCP.fullmatch(name) and folder not in described:
            message = f"torch.distributed.checkpoint has written no {DCP_METADATA} beside it: {remedy}"
            raise StateError(key=path, message=message)
