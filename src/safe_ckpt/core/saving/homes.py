"""Directories that a job holds: those given once for all saves, and those given with each call, such as for weights."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import overload

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.host_calls import HostAgent, HostCalls
from safe_ckpt.core.home.candidates import holds_weights_alone
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.home import EVENTS, Home, around, is_anything_at
from safe_ckpt.core.home.host_home import HostHome, Meeting
from safe_ckpt.core.home.places import candidate_at, home_at, is_one
from safe_ckpt.core.saving import set_up as shared
from safe_ckpt.core.saving.recent import Recent
from safe_ckpt.core.saving.set_up import hosts_that_see
from safe_ckpt.core.storage.objects.place import Place, place_of
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.core.writer.inline import saves_inline
from safe_ckpt.errors import ConfigError, DirectoryError, naming
from safe_ckpt.hooks.emitter import Emitter
from safe_ckpt.hooks.event_log import JsonlHook

logger = logging.getLogger(__name__)

_BLIP_S = 30.0
_BLIPS = (errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)


class HeldHomes:
    """The directories that one job holds, and where its events are recorded.

    Args:
        coordinator: where the ranks meet.
        config: settings.
        emit: gets a hook for each directory whose events are recorded.
        owner: what holds them within this process and how to free it, for messages.
        held: called on every rank with each directory that was taken.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: CheckpointConfig,
        emit: Emitter,
        owner: str,
        held: Callable[[Home], object] = lambda _: None,
    ) -> None:
        self._told_held = held
        self._coordinator = coordinator
        self._config = config
        self._emit = emit
        self._owner = owner
        self._held: list[Home] = []
        self._recorders: dict[Home, JsonlHook] = {}
        self._unrecorded: list[events.Event] = []
        self._records: Recent[Path, JsonlHook] = Recent(lambda hook: hook in self._recorders.values())

    @overload
    def hold(
        self, place: Path, *, hidden: Path | None = None, recorded: bool | Path = True, per_host: bool = False
    ) -> FileHome: ...
    @overload
    def hold(
        self, place: Place, *, hidden: Path | None = None, recorded: bool | Path = True, per_host: bool = False
    ) -> Home: ...
    def hold(
        self, place: Place, *, hidden: Path | None = None, recorded: bool | Path = True, per_host: bool = False
    ) -> Home:
        """Take a directory: create it, lock it, clean up after an earlier job. Every rank calls this.

        Args:
            place: the directory.
            hidden: in a file system where the hidden folder lies; None for in it.
            recorded: whether events go to a file there, as ``record_events`` has it; or the folder in which.
            per_host: whether it may lie on each host's own disk, where ``mirror.near`` says so.

        Raises:
            ConfigError: it lies in its mirror, or that in it; or it would lie on each host's own disk, and may not.
            DirectoryError: on every rank, naming path and rank.
            DirectoryInUseError: a live job holds it.
            DirectoryNotSharedError: some ranks do not see it.
        """
        config, timeouts = self._config, self._config.timeouts
        _refuse_its_mirror(place, config)
        home = self._home_of(place, hidden, per_host=per_host)
        is_shared = home.is_mounted and self._coordinator.size > 1 and not home.is_on_each_host
        # Held by then: what a killed job left of this is swept.
        seen_from = in_files(home.hidden) if home.is_mounted else Path()

        def take(_: object) -> str:
            _open_through_blips(home, config)
            try:
                return shared.leave_token(seen_from) if is_shared else ""
            except OSError:
                home.close()
                raise

        # A holder that cannot be checked has its lease to show a sign of life.
        patience_s = timeouts.barrier_s + 2 * config.lease_s
        with self._coordinator.together():
            token = self._coordinator.agree("hold", must_match={"directory": place}, timeout_s=patience_s, decide=take)
            home.persist(timeouts.lengthy_s)
            self._held.append(home)
            try:
                if token:  # there are others, who must see it
                    shared.await_shared(self._coordinator, seen_from, token, timeouts.barrier_s)
            except BaseException:
                self.release(home)
                raise
        self._told_held(home)
        if home.is_mounted and self._coordinator.rank == 0 and config.record_events and recorded:
            self._record(home, seen_from if recorded is True else recorded)
        return home

    def _home_of(self, place: Place, hidden: Path | None, *, per_host: bool) -> Home:
        config = self._config
        home = home_at(
            place,
            lease_s=config.lease_s,
            owner=self._owner,
            hidden=hidden,
            unfenced=config.storage.unfenced,
            answer_s=config.timeouts.barrier_s / 2,
        )
        if config.mirror.near != "per-host":
            return home
        if not (per_host and home.is_mounted):
            message = (
                '"per-host" is for the directories of a Checkpointer, of an Accelerator that names its checkpoints itself, and '
                f'of a Transformers Trainer, on disks, and not for {place}: give "shared", and a directory that all ranks see'
            )
            raise ConfigError(key="mirror.near", message=message)
        coordinator = self._coordinator
        path, shown = map(in_files, (home.path, home.hidden))
        hosts = hosts_that_see(coordinator, shown, config.timeouts.barrier_s)
        if len(hosts) == 1:
            return home
        meeting = Meeting(
            rank=coordinator.rank,
            hosts=hosts,
            calls=lambda name: HostCalls(coordinator, name, [leader for leader in hosts if leader]),
            answer=lambda name, actions, ended: HostAgent(coordinator, name, actions, ended),
        )
        return HostHome(
            path,
            lease_s=config.lease_s,
            owner=self._owner,
            meeting=meeting,
            name=str(coordinator.call),
            timeouts=config.timeouts,
            hidden=hidden,
        )

    def tell(self, event: events.Event) -> None:
        """Tell hooks, and the record of a directory that is held now, or else, if it is the last, of the one held next."""
        if not self._recorders:
            self._unrecorded = [event]
        self._emit(event)

    def _record(self, home: Home, folder: Path) -> None:
        def record() -> JsonlHook:
            return JsonlHook(
                folder / EVENTS,
                record_bytes=self._config.telemetry.record_bytes,
                record_files=self._config.telemetry.record_files,
                world_size=self._coordinator.size,
            )

        hook = self._records.use(folder, record)
        while self._unrecorded:
            hook(self._unrecorded.pop(0))
        if hook not in self._recorders.values():
            self._emit.add(hook)
        self._recorders[home] = hook
        hook.begin()

    def list_held(
        self,
        home: Home,
        view: Mapping[str, object],
        look: Callable[[], None],
        *,
        kind: str = "list",
        timeout_s: float | None = None,
    ) -> None:
        """Have rank 0 list a directory that was just taken. Every rank calls this.

        Args:
            home: the directory. It is given back if this fails: without the listing its order of commits would restart.
            view: what must be equal on all ranks.
            look: what rank 0 does.
            kind: the name of the step.
            timeout_s: how long it may take; None for ``barrier_s``.

        Raises:
            SafeCheckpointError: what ``look`` raised, or the ranks did not meet; on every rank.
        """
        limit_s = self._config.timeouts.barrier_s if timeout_s is None else timeout_s
        try:
            self._coordinator.agree(kind, must_match=view, timeout_s=limit_s, decide=lambda _: look())
        except BaseException:
            self.release(home)
            raise

    def release(self, home: Home) -> None:
        """Give a directory back before the end. Nothing that is in flight may belong to it; on any rank."""
        if home in self._held:
            self._held.remove(home)
            hook = self._recorders.pop(home, None)
            if hook is not None and hook not in self._recorders.values():
                self._emit.remove(hook)
                hook.leave_nothing()
            if self._coordinator.rank == 0 or home.is_on_each_host:
                home.close()

    def close(self, *, failed: bool = False) -> None:
        """Give all of them back. What one refuses is logged.

        Args:
            failed: the job ends by an exception.
        """
        for hook in {id(hook): hook for hook in self._recorders.values()}.values():
            hook.end(failed=failed)
        for home in self._held:
            if self._coordinator.rank and not home.is_on_each_host:
                continue
            try:
                home.close()
            except Exception:  # the others are given back all the same
                logger.exception("%s could not be given back", home.path)


def _open_through_blips(home: Home, config: CheckpointConfig) -> None:
    """Retry for a moment: a network file system may be unavailable after mounting, or while its server changes."""
    deadline = time.monotonic() + min(_BLIP_S, config.timeouts.barrier_s / 2)
    while True:
        try:
            with naming(rank=0, phase="looking at the directory", path=home.path):
                _refuse_checkpoint(home)
            home.open(0.0 if saves_inline() else config.timeouts.barrier_s + config.lease_s)
            return
        except DirectoryError as error:
            if error.errno not in _BLIPS or time.monotonic() >= deadline:
                raise
            logger.info("%s: waiting for it", error)
        time.sleep(0.5)


def _refuse_its_mirror(place: Place, config: CheckpointConfig) -> None:
    """Refuse a directory in the other: it would be listed, locked and swept with it."""
    if config.mirror.url is None:
        return
    far = place_of(config.mirror.url, config.storage, config.timeouts.lengthy_s)
    if place in around(far) or far in around(place):
        message = f"{far} and the directory that it mirrors, {place}, lie in each other: give one that lies apart"
        raise ConfigError(key="mirror.url", message=message)


def _refuse_checkpoint(home: Home) -> None:
    """A run within a checkpoint is deleted with it. Weights may lie above a run, or in a checkpoint by their own name."""
    if home.is_single_name:
        return
    place = home.path
    for one in around(place):
        found = candidate_at(one) if is_anything_at(one) and is_one(one) else None
        if found is not None and found.manifest is not None and not holds_weights_alone(found.manifest.notes):
            what = "it is a checkpoint" if one == place else f"it lies in the checkpoint {one}"
            message = f"{what}, and no directory of checkpoints: give the one that it lies in, {one.parent}, or another"
            raise DirectoryError(path=str(place), message=message)
