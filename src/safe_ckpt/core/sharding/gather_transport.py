"""The collectives of a gather, awaited by polling: an uneven all-to-all towards rank 0, and torch's own reductions."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from safe_ckpt import devices
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.errors import PeerLostError, RendezvousTimeout

logger = logging.getLogger(__name__)
_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.005
_given_up: list[weakref.ref[Any]] = []


def to_rank_0(
    incoming: torch.Tensor,
    outgoing: torch.Tensor,
    splits: Sequence[int],
    group: ProcessGroup | None,
    *,
    look: Callable[[], None],
    timeout_s: float,
) -> None:
    """Send ``outgoing`` of every rank to ``incoming`` on rank 0. Every rank of the group calls this, on the calling thread.

    Args:
        incoming: bytes; on rank 0 room for everything, one rank after the other, elsewhere empty.
        outgoing: this rank's bytes; empty on rank 0.
        splits: on rank 0 how much comes from each rank, elsewhere zeros.
        group: the ranks.
        look: called again and again; raises when a rank is lost, for then the operation never ends.
        timeout_s: how long it may take.

    Raises:
        RendezvousTimeout: it took longer. As after an error from ``look``, the group cannot be used any more then.
    """
    sent = [outgoing.numel(), *[0] * (len(splits) - 1)]
    work: Any = dist.all_to_all_single(incoming, outgoing, list(splits), sent, group=group, async_op=True)
    _poll(work.is_completed, "gather: a round", [group], look, timeout_s)
    work.wait()


def watched(
    action: Callable[[], torch.Tensor],
    groups: Sequence[ProcessGroup],
    *,
    devices_of: Sequence[torch.Tensor] = (),
    look: Callable[[], None],
    timeout_s: float,
) -> torch.Tensor:
    """Run a collective of torch's own, which cannot be polled, on a thread while this one looks around. It issues no other.

    Args:
        action: the collective.
        groups: those that it uses; given up when it does not end.
        devices_of: plain tensors that it reads, as the caller's stream of each one's device has them.
        look: as for ``to_rank_0``.
        timeout_s: how long it may take.

    Raises:
        RendezvousTimeout: it took longer.
    """
    result: Future[torch.Tensor] = Future()
    here = devices.where_the_caller_works([tensor.device for tensor in devices_of])

    def run() -> None:
        try:
            with contextlib.ExitStack() as standing:
                for place in here:
                    standing.enter_context(place)
                reduced = action()
                # On a device it has only been queued: who reads it then waits for the other ranks, and cannot look around.
                devices.wait_for(reduced.device)
                result.set_result(reduced)
        except BaseException as error:  # it belongs to the caller that waits
            result.set_exception(error)

    threading.Thread(target=run, name="safe_ckpt-collective", daemon=True).start()
    _poll(result.done, "gather: a reduction", groups, look, timeout_s)
    return result.result()


def _poll(
    done: Callable[[], bool],
    phase: str,
    groups: Sequence[ProcessGroup | None],
    look: Callable[[], None],
    timeout_s: float,
) -> None:
    """Wait for a collective of ``groups``. They are given up when it does not end."""
    deadline, nap_s = time.monotonic() + timeout_s, _FIRST_NAP_S
    try:
        while not done():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            look()
            if time.monotonic() > deadline:
                raise RendezvousTimeout(phase=phase, seconds=timeout_s)
    except BaseException:
        for group in groups:
            _abort(group)
        raise


def refuse_if_given_up(group: ProcessGroup | None) -> None:
    """Raise at once where a collective was given up before: another one would never end.

    Raises:
        PeerLostError: it was.
    """
    asked = process_groups.itself(group)
    if asked is not None and any(known() is asked for known in _given_up):
        reason = "an earlier gather was given up in a collective, and its process group with it: start the job again"
        raise PeerLostError(phase="gather", ranks=(), reason=reason)


def _abort(group: ProcessGroup | None) -> None:
    if (asked := process_groups.itself(group)) is not None:
        _given_up.append(weakref.ref(asked))
    # An operation that is left behind would keep destroy_process_group and the interpreter's exit waiting for the lost rank.
    logger.warning("a collective was given up: its process group cannot be used any more")
    for backend, _ in process_groups.backend_timeouts(group):
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):  # gloo cannot before torch 2.9
            backend.abort()


def wire_device(tensors: Sequence[torch.Tensor], group: ProcessGroup | None) -> torch.device:
    """The device over which parts travel: that of the tensors where the group has a backend for it."""
    offered = process_groups.device_types(group)
    theirs = (tensor.device.type for tensor in tensors if not tensor.is_cpu)
    chosen = next((name for name in theirs if name in offered), "cpu" if "cpu" in offered else offered[0])
    return torch.device("cpu") if chosen == "cpu" else devices.current_device(chosen)
