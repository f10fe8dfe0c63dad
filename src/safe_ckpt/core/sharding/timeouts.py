"""The lengthy-operation timeout: for as long as a block runs, collectives may take longer than they usually may.

A consolidation whose collectives have the default timeout of a minute ends a training run when storage is slow (Fast-LLM's
``StateDictCheckpointHandler.save`` is where this was met). A raised timeout that is never put back hides the next hang.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from safe_ckpt import events
from safe_ckpt.config import Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.errors import ConfigError
from safe_ckpt.hooks.emitter import Emitter
from safe_ckpt.hooks.logging_hook import LoggingHook

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "ProcessGroup | DeviceMesh | None"
_lock = threading.RLock()
_YEAR_S = 31_536_000


@contextlib.contextmanager
def lengthy_timeouts(
    groups: Group | Iterable[Group] = None, seconds: float = 3600.0, *, hooks: Iterable[events.Hook] = ()
) -> Iterator[None]:
    """Let collectives of ``groups`` take up to ``seconds`` within this block. Every rank of them enters it.

    Only collectives that are started within the block get the longer time, for the backends read the timeout when an
    operation is put in. Blocks may nest and overlap: the longest time counts, and when the last one ends the timeout is what
    it was, also after an exception and also on one rank alone. Leaving needs no other rank.

    Args:
        groups: process groups and device meshes. A mesh stands for all of its groups and WORLD; None is WORLD.
        seconds: the timeout within the block. One that is longer already stays.
        hooks: called with it as ``events.TimeoutsRaised`` and ``events.TimeoutsRestored``.

    Raises:
        ConfigError: ``seconds`` is not above 0, or a group is none.
        RendezvousTimeout: some ranks did not enter the block within 300 s; names them.
        DesyncError: the ranks gave different numbers of seconds.
        PeerLostError: a rank died or stopped.

    On NCCL the timeouts are set in the same way, but were never run for this project on CUDA. With torch before 2.9 gloo
    ignores them: its collectives end after the time that their group was made with.

    Example:
        ```python
        with lengthy_timeouts(seconds=1800):
            if rank == 0:
                prepare_the_data()  # the others wait in a collective meanwhile
        ```
    """

    def refuse_no_time() -> None:  # where all ranks learn of it
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _YEAR_S:
            message = f"expected a number above 0, and at most {_YEAR_S} (a year), got {seconds!r:.40}"
            raise ConfigError(key="lengthy_timeouts: seconds", message=message)

    members = process_groups.process_groups(groups)
    emit = Emitter([LoggingHook(), *hooks])
    for group in process_groups.meeting_groups(members):
        coordinator = open_coordinator(group, Timeouts(), observe=False)
        try:
            must_match, wait_s = {"seconds": seconds}, Timeouts().barrier_s
            coordinator.agree("lengthy_timeouts", must_match=must_match, local=refuse_no_time, timeout_s=wait_s)
        finally:
            coordinator.release(keep=True)
    try:
        with raised(members, seconds, emit):
            yield
    finally:
        emit.close()


@contextlib.contextmanager
def raised(groups: Iterable[ProcessGroup], seconds: float, emit: Emitter | None = None) -> Iterator[None]:
    """Raise timeouts as ``lengthy_timeouts`` does, for ranks that know already that all of them enter.

    Args:
        groups: as ``ranks.process_groups`` returns them.
        seconds: the timeout within the block.
        emit: called with it.
    """
    names: list[str] = []
    mine: list[_Held] = []
    try:
        with _lock:
            for group in groups:
                for backend, timeout_s in process_groups.backend_timeouts(group):
                    held = next((one for one in _held if process_groups.is_same(one.backend, backend)), None)
                    if held is None:
                        _held.append(held := _Held(backend, timeout_s))
                    names.append(f"{group.group_name}: {timeout_s:g} s")
                    held.asked.append(seconds)
                    mine.append(held)
                    held.apply()
        if emit is not None and names:
            emit(events.TimeoutsRaised(rank=process_groups.world_rank(), groups=tuple(names), seconds=seconds))
        yield
    finally:
        with _lock:
            for held in mine:
                held.asked.remove(seconds)
                held.apply()
                if not held.asked:
                    _held.remove(held)
        if emit is not None and names:
            emit(events.TimeoutsRestored(rank=process_groups.world_rank(), groups=tuple(names)))


@dataclass(eq=False)
class _Held:
    """A backend whose timeout is raised. Blocks need not end in the order in which they began.

    Attributes:
        backend: it.
        before_s: its own timeout.
        asked: what is asked for now.
    """

    backend: process_groups.Backend
    before_s: float
    asked: list[float] = field(default_factory=list)

    def apply(self) -> None:
        process_groups.set_backend_timeout(self.backend, max(self.before_s, *self.asked, 0.0))


_held: list[_Held] = []
