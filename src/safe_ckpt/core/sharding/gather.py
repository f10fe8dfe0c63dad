"""Full tensors of a sharded state, one at a time, on the rank that writes.

The collectives run on the calling thread, under the lengthy-operation timeout, and only when every rank is there and the
writing rank has room: storage is waited for in the store (``flow``), never in a collective. Each round is one uneven
all-to-all towards rank 0 of at most ``staging_bytes``, awaited by polling, so that a rank that dies or stops within it is
named by the others instead of waited for.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from safe_ckpt.config import Timeouts
from safe_ckpt.core.coordination import process_groups, timeouts
from safe_ckpt.core.coordination.coordinator import Coordinator, Scatter, open_coordinator, raise_first
from safe_ckpt.core.sharding import dtensor, gather_plan, gather_transport
from safe_ckpt.core.sharding.gather_plan import Chunk, GatherPlan
from safe_ckpt.core.sharding.gather_rounds import RoundBarrier
from safe_ckpt.errors import ConfigError, CoordinationError, DesyncError, SafeCheckpointError, StateError, to_wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STAGING_BYTES = 32 << 20
_TIMEOUTS = Timeouts(peer_stall_s=20)
_LATE_S = 10.0


def iter_full_tensors(
    state_dict: Mapping[str, Any] | torch.nn.Module,
    *,
    timeout_s: float = 3600.0,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Gather the full tensors of a sharded state one by one.

    Every rank iterates, in step, on the thread that trains::

        for name, tensor in iter_full_tensors(model, timeout_s=3600):
            if tensor is not None:  # on rank 0
                write(name, tensor)

    Rank 0 may be slow between two tensors, for ``timeout_s`` at most; the others wait for it without a collective, and must
    not be late themselves. While it runs the timeouts of the group and of all meshes in the state are ``timeout_s``; they
    are put back when it ends, is closed or raises. On rank 0 it takes memory for one full tensor and ``staging_bytes``,
    elsewhere for ``staging_bytes``. Tensors without parts elsewhere are taken from rank 0.

    Args:
        state_dict: names to tensors, mappings of them (joined by dots), or a module. DTensors of any mesh and placement.
            Equal names, shapes and types on all ranks.
        timeout_s: how long rank 0 may take between two tensors, and one round of the gather.
        group: the ranks, in which all meshes lie; None means WORLD.
        dtype: floating-point tensors are converted to it before they travel.
        staging_bytes: what travels at a time. A single row of a chunk travels as a whole.

    Yields:
        Each name, in the order of ``state_dict``, with the full tensor on the CPU on rank 0 and None on the others. It is
        the caller's; nothing here holds it.

    Raises:
        ConfigError: a time or size is out of range.
        StateError: a value is no tensor, or the ranks together do not have all of one; on every rank.
        DesyncError: the ranks' states differ in names, shapes or types.
        PeerLostError: a rank died, stopped, or left its loop; on every rank that is alive, named.
        RendezvousTimeout: some ranks did not come for the next round.

    Gloo on the CPU is what this was run on. With NCCL the parts travel over the GPUs; that was never run for this project.
    """
    for key, value in {"timeout_s": timeout_s, "staging_bytes": staging_bytes}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(key=f"iter_full_tensors: {key}", message=f"expected a number above 0, got {value!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(key="iter_full_tensors: dtype", message=f"expected a floating-point type, got {dtype}")
    return iterate(state_dict, timeout_s, group, dtype, int(staging_bytes))


def iterate(
    state: Mapping[str, Any] | torch.nn.Module,
    timeout_s: float,
    group: ProcessGroup | None,
    dtype: torch.dtype | None,
    staging_bytes: int = STAGING_BYTES,
) -> Generator[tuple[str, torch.Tensor | None], None, None]:
    """As ``iter_full_tensors``, for arguments that are known to be good."""
    coordinator = open_coordinator(group, _TIMEOUTS, observe=False)
    try:
        gather = _Gather(coordinator, group, state, dtype, staging_bytes)
        meshes = dtensor.meshes_of(gather.tensors.values())
        with timeouts.raised(process_groups.process_groups([group, *meshes]), timeout_s):
            yield from gather.run(timeout_s)
    finally:
        coordinator.release(keep=True)


class _Gather:
    """One gather on one rank. Made and run on every rank."""

    def __init__(
        self,
        coordinator: Coordinator,
        group: ProcessGroup | None,
        state: Mapping[str, Any] | torch.nn.Module,
        dtype: torch.dtype | None,
        staging_bytes: int,
    ) -> None:
        self._coordinator = coordinator
        self._group = group
        self._dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self._rounds = GatherPlan(rounds=[], ends=[])  # of all ranks, on rank 0 alone
        self._agree(state, staging_bytes)
        self._names = list(self.tensors)
        self._device = gather_transport.wire_device(list(self.tensors.values()), group)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._arrived: list[tuple[Chunk, torch.Tensor]] = []
        self._local: tuple[int, torch.Tensor] = -1, self._buffer

    def run(self, timeout_s: float) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Gather. What is yielded is not held here."""
        late_s = max(_LATE_S, self._coordinator.stall_s + 5)
        flow = RoundBarrier(self._coordinator, self._op_id, timeout_s=timeout_s, late_s=late_s)
        where, done = "its beginning", 0
        reductions = sum(map(dtensor.is_partial, self.tensors.values()))
        try:
            for index, where in enumerate(self._names):
                partial = self._reduce(index, flow, timeout_s)
                reductions -= partial
                full = self._begin(index) if self._coordinator.rank == 0 else None
                if full is not None:
                    self._take_own(index, full)
                    self._take(index, full)
                while done < self._ends[index]:
                    flow.enter(f"gather of {where}")
                    self._exchange(done, flow, timeout_s)
                    flow.passed()
                    done += 1
                    if full is not None:
                        self._take(index, full)
                handed, full = full, None
                yield where, handed
                del handed
        except BaseException as error:
            if (done < len(self._sends) or reductions) and not flow.alone:
                flow.leave(error, where)
            raise
        finally:
            flow.close()

    def _agree(self, state: Mapping[str, Any] | torch.nn.Module, staging_bytes: int) -> None:
        problem: Exception | None = None
        spans: list[dtensor.Span | None] = []
        try:
            gather_transport.refuse_if_given_up(self._group)
            self.tensors = named_tensors(state)
            spans = [dtensor.chunk_of(tensor) for tensor in self.tensors.values()]
        except Exception as error:  # the others wait for this rank's answer
            problem = error
        described = _describe(self.tensors)

        def decide(answers: Mapping[int, Any]) -> Scatter:
            raise_first({rank: answer["error"] for rank, answer in answers.items()})
            _refuse_other_tensors(described, answers)
            self._rounds = self._plan({rank: answer["spans"] for rank, answer in answers.items()}, staging_bytes)
            common = {"op": uuid.uuid4().hex, "ends": list(self._rounds.ends)}
            return Scatter({rank: {**common, "sends": self._rounds.share(rank)} for rank in answers})

        answer = {
            "error": to_wire(problem, rank=self._coordinator.rank, phase="gather") if problem else None,
            "spans": spans,
            "count": len(described),
            "digest": hashlib.sha256("\n".join([*described, str(self._dtype)]).encode()).hexdigest()[:16],
        }
        try:
            share = self._coordinator.agree("gather", {}, timeout_s=_TIMEOUTS.barrier_s, answer=answer, decide=decide)
        except SafeCheckpointError as error:
            if problem is not None and not isinstance(error, CoordinationError):
                raise problem from None
            raise
        self._op_id: str = share["op"]
        self._ends: list[int] = share["ends"]
        self._sends: list[list[Any]] = share["sends"]

    def _plan(self, chunks: Mapping[int, Sequence[dtensor.Span | None]], staging_bytes: int) -> GatherPlan:
        tensors = list(self.tensors.values())
        return gather_plan.plan(
            list(self.tensors),
            [tuple(tensor.shape) for tensor in tensors],
            [self._wire_dtype(tensor).itemsize for tensor in tensors],
            chunks,
            staging_bytes,
            late=[dtensor.is_partial(tensor) for tensor in tensors],
        )

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _begin(self, index: int) -> torch.Tensor:
        tensor = self.tensors[self._names[index]]
        return torch.empty(tuple(tensor.shape), dtype=self._wire_dtype(tensor))

    def _reduce(self, index: int, flow: RoundBarrier, timeout_s: float) -> bool:
        tensor = self.tensors[self._names[index]]
        if not dtensor.is_partial(tensor):
            return False
        flow.enter(f"gather of {self._names[index]}")
        groups = process_groups.process_groups(dtensor.meshes_of([tensor]))
        whole = gather_transport.watched(lambda: dtensor.reduced(tensor), groups, look=flow.look, timeout_s=timeout_s)
        flow.passed()
        self._local = index, whole
        return True

    def _local_of(self, index: int) -> torch.Tensor:
        if self._local[0] != index:
            self._local = index, dtensor.local_of(self.tensors[self._names[index]]).contiguous()
        return self._local[1]

    def _take_own(self, index: int, full: torch.Tensor) -> None:
        own = self._rounds.own[index]
        if own is not None:
            dtensor.cut(full, *own).copy_(self._local_of(index))

    def _take(self, index: int, full: torch.Tensor) -> None:
        """On rank 0: what has come goes where it belongs."""
        while self._arrived and self._arrived[0][0].tensor == index:
            box, piece = self._arrived.pop(0)
            dtensor.cut(full, box.at, box.sizes).copy_(piece.view(full.dtype).view(box.sizes))

    def _exchange(self, number: int, flow: RoundBarrier, timeout_s: float) -> None:
        """One round: every rank sends its boxes to rank 0."""
        size = self._coordinator.size
        coming = self._rounds.rounds[number] if self._coordinator.rank == 0 else []
        splits = [sum(gather_plan.padded(box.size_bytes) for box in coming if box.rank == rank) for rank in range(size)]
        if self._buffer.numel() < sum(splits):
            self._buffer = torch.empty(sum(splits), dtype=torch.uint8, device=self._device)
        incoming = self._buffer[: sum(splits)]
        outgoing = self._outgoing(number)
        gather_transport.to_rank_0(incoming, outgoing, splits, self._group, look=flow.look, timeout_s=timeout_s)
        at = [sum(splits[:rank]) for rank in range(size)]  # what comes from one rank is in the order of the round
        for box in coming:
            self._arrived.append((box, incoming[at[box.rank] : at[box.rank] + box.size_bytes]))
            at[box.rank] += gather_plan.padded(box.size_bytes)

    def _outgoing(self, number: int) -> torch.Tensor:
        parts = []
        for index, begin, sizes in self._sends[number]:
            local = self._local_of(index)
            piece = dtensor.cut(local, begin, sizes).to(self._wire_dtype(local)).contiguous().view(-1).view(torch.uint8)
            parts.append(piece.to(self._device))
            if extra := gather_plan.padded(piece.numel()) - piece.numel():
                parts.append(torch.zeros(extra, dtype=torch.uint8, device=self._device))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self._device)


def named_tensors(state: Mapping[str, Any] | torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a module's state dict, or of nested mappings with their names joined by dots.

    Raises:
        StateError: a value is neither; names it.
    """
    found: dict[str, torch.Tensor] = {}
    if isinstance(state, torch.nn.Module):
        dtensor.refuse_partitioned(state)
    for name, value in (state.state_dict() if isinstance(state, torch.nn.Module) else state).items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found.update(named_tensors(value, f"{key}."))
        elif isinstance(value, torch.Tensor) and not value.is_meta:
            found[key] = value
        else:
            what = "a tensor without values (meta)" if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateError(key=key, message=f"expected a tensor, got {what}")
    return found


def _describe(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]


def _refuse_other_tensors(mine: Sequence[str], answers: Mapping[int, Any]) -> None:
    digests = {rank: answer["digest"] for rank, answer in answers.items()}
    if len(set(digests.values())) > 1:
        values = {str(rank): f"{answers[rank]['count']} tensors, digest {digest}" for rank, digest in digests.items()}
        raise DesyncError(what=f"the tensors to gather (rank 0 begins with {', '.join(mine[:3])})", values=values)
