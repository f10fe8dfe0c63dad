"""Full tensors of a sharded state, one at a time, on the rank that writes.

The collectives run on the calling thread, under the lengthy-operation timeout, and only when every rank is there and the
writing rank has room: storage is waited for in the store (``RoundBarrier``), never in a collective. Each round is one uneven
all-to-all towards rank 0 of at most ``staging_bytes``, awaited by polling, so that a rank that dies or stops within it is
named by the others instead of waited for.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from safe_ckpt.config import Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import Coordinator, open_coordinator
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.coordination.rounds import Round, Scatter, from_wire, refuse_differences, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.core.formats.file_plan import values_of
from safe_ckpt.core.formats.refusals import refuse_short
from safe_ckpt.core.sharding import dtensor, gather_plan, gather_transport, timeouts
from safe_ckpt.core.sharding.gather_plan import Chunk, GatherPlan
from safe_ckpt.errors import ConfigError, PeerLostError, RendezvousTimeout, StateError

STAGING_BYTES = 32 << 20
_TIMEOUTS = Timeouts(peer_stall_s=20)
_LATE_S = 10.0
_LOOK_S = 0.25


def iter_full_tensors(
    state_dict: Mapping[str, Any] | torch.nn.Module,
    *,
    timeout_s: float = 3600.0,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Gather the full tensors of a sharded state one by one.

    Every rank iterates, in step, on the thread that trains.

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
        staging_bytes: what travels at a time. A single row of a part travels as a whole.

    Yields:
        Each name, in the order of ``state_dict``, with the full tensor on the CPU on rank 0 and None on the others. It is
        the caller's; nothing here holds it.

    Raises:
        ConfigError: a time or size is out of range.
        StateError: a value is no tensor, or the ranks together do not have all of one; on every rank.
        DesyncError: the ranks' states differ in names, shapes or types.
        PeerLostError: a rank died, stopped, or left its loop; on every rank that is alive, named.
        RendezvousTimeout: some ranks did not come for the next round.

    Gloo on the CPU is what this was run on, and an accelerator made for the tests. With NCCL the parts travel over the GPUs;
    that was never run for this project.

    Example:
        ```python
        for name, tensor in iter_full_tensors(model, timeout_s=3600):
            if tensor is not None:  # on rank 0
                print(name, tuple(tensor.shape))
        ```

        ```text
        weight (3, 4)
        bias (3,)
        ```
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
    """Iterate as ``iter_full_tensors`` does, for arguments that are known to be good."""
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
        self._device = gather_transport.wire_device([dtensor.local_of(one) for one in self.tensors.values()], group)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._arrived: list[tuple[Chunk, torch.Tensor]] = []
        self._local: tuple[int, torch.Tensor] = -1, self._buffer

    def run(self, timeout_s: float) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Gather. What is yielded is not held here."""
        late_s = max(_LATE_S, self._coordinator.stall_s + 5)
        barrier = RoundBarrier(self._coordinator, self._op_id, timeout_s=timeout_s, late_s=late_s)
        where, done = "its beginning", 0
        reductions = sum(map(dtensor.is_partial, self.tensors.values()))
        try:
            for index, where in enumerate(self._names):
                partial = self._reduce(index, barrier, timeout_s)
                reductions -= partial
                full = self._begin(index) if self._coordinator.rank == 0 else None
                if full is not None:
                    self._take(index, full)
                while done < self._ends[index]:
                    barrier.enter(f"gather of {where}")
                    self._exchange(done, barrier, timeout_s)
                    barrier.passed()
                    done += 1
                    if full is not None:
                        self._take(index, full)
                handed, full = full, None
                yield where, handed
                del handed
        except BaseException as error:
            if (done < len(self._sends) or reductions) and not barrier.alone:
                barrier.leave(error, where)
            raise
        finally:
            barrier.close()

    def _agree(self, state: Mapping[str, Any] | torch.nn.Module, staging_bytes: int) -> None:
        def describe() -> dict[str, Any]:
            gather_transport.refuse_if_given_up(self._group)
            self.tensors = named_tensors(state)
            pieces = [[one.to_json() for one in dtensor.pieces_of(tensor)] for tensor in self.tensors.values()]
            lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in self.tensors.items()]
            digest = hashlib.sha256("\n".join([*lines, str(self._dtype)]).encode()).hexdigest()[:16]
            return {"pieces": pieces, "tensors": f"{len(lines)} tensors, digest {digest}", "first": lines[:3]}

        def decide(answers: Mapping[int, Any]) -> Scatter:
            what = f"the tensors to gather (rank 0 begins with {', '.join(answers[0]['first'])})"
            refuse_differences({rank: {what: answer["tensors"]} for rank, answer in answers.items()})
            self._rounds = self._plan({rank: answer["pieces"] for rank, answer in answers.items()}, staging_bytes)
            common = {"op": uuid.uuid4().hex, "ends": list(self._rounds.ends)}
            return Scatter({rank: {**common, "sends": self._rounds.share(rank)} for rank in answers})

        share = self._coordinator.agree("gather", timeout_s=_TIMEOUTS.barrier_s, local=describe, decide=decide)
        self._op_id: str = share["op"]
        self._ends: list[int] = share["ends"]
        self._sends: list[list[Any]] = share["sends"]

    def _plan(self, parts: Mapping[int, Sequence[Any]], staging_bytes: int) -> GatherPlan:
        tensors = list(self.tensors.values())
        return gather_plan.plan(
            list(self.tensors),
            [tuple(tensor.shape) for tensor in tensors],
            [self._wire_dtype(tensor).itemsize for tensor in tensors],
            {rank: [[dtensor.Piece.from_json(one) for one in of] for of in told] for rank, told in parts.items()},
            staging_bytes,
            late=[dtensor.is_partial(tensor) for tensor in tensors],
        )

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _begin(self, index: int) -> torch.Tensor:
        """The whole tensor, with what rank 0 has of it."""
        tensor = self.tensors[self._names[index]]
        full = torch.empty(tuple(tensor.shape), dtype=self._wire_dtype(tensor), device="cpu")
        for own in self._rounds.own[index]:
            local = dtensor.cut(self._local_of(index), own.begin, own.sizes)
            dtensor.cut(full, own.offsets, own.sizes).copy_(local)
        return full

    def _reduce(self, index: int, barrier: RoundBarrier, timeout_s: float) -> bool:
        tensor = self.tensors[self._names[index]]
        if not dtensor.is_partial(tensor):
            return False
        barrier.enter(f"gather of {self._names[index]}")
        groups = process_groups.process_groups(dtensor.meshes_of([tensor]))
        full = gather_transport.watched(
            lambda: dtensor.reduced(tensor),
            groups,
            devices_of=[dtensor.local_of(tensor)],
            look=barrier.look,
            timeout_s=timeout_s,
        )
        barrier.passed()
        self._local = index, full
        return True

    def _local_of(self, index: int) -> torch.Tensor:
        if self._local[0] != index:
            self._local = index, values_of(dtensor.local_of(self.tensors[self._names[index]])).contiguous()
        return self._local[1]

    def _take(self, index: int, full: torch.Tensor) -> None:
        """On rank 0: put what has come where it belongs."""
        while self._arrived and self._arrived[0][0].tensor == index:
            chunk, piece = self._arrived.pop(0)
            dtensor.cut(full, chunk.at, chunk.sizes).copy_(piece.view(full.dtype).view(chunk.sizes))

    def _exchange(self, number: int, barrier: RoundBarrier, timeout_s: float) -> None:
        """Do one round: every rank sends its chunks to rank 0."""
        size = self._coordinator.size
        coming = self._rounds.rounds[number] if self._coordinator.rank == 0 else []
        splits = [
            sum(gather_plan.padded(chunk.size_bytes) for chunk in coming if chunk.rank == rank) for rank in range(size)
        ]
        if self._buffer.numel() < sum(splits):
            self._buffer = torch.empty(sum(splits), dtype=torch.uint8, device=self._device)
        incoming = self._buffer[: sum(splits)]
        outgoing = self._outgoing(number)
        gather_transport.to_rank_0(incoming, outgoing, splits, self._group, look=barrier.look, timeout_s=timeout_s)
        at = [sum(splits[:rank]) for rank in range(size)]  # what comes from one rank is in the order of the round
        for chunk in coming:
            self._arrived.append((chunk, incoming[at[chunk.rank] : at[chunk.rank] + chunk.size_bytes]))
            at[chunk.rank] += gather_plan.padded(chunk.size_bytes)

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
        StateError: a value is neither, or its memory is shorter than its shape says, or two have one name; names it.
    """
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(state, torch.nn.Module):
        dtensor.refuse_partitioned(state)
    for name, value in (state.state_dict() if isinstance(state, torch.nn.Module) else state).items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            inner = named_tensors(value, f"{key}.")
            _refuse_twice(tensors, inner)
            tensors.update(inner)
        elif isinstance(value, torch.Tensor) and not value.is_meta:
            for part in dtensor.parts_of(value):
                refuse_short(key, part)
            _refuse_twice(tensors, (key,))
            tensors[key] = value
        else:
            what = "a tensor without values (meta)" if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateError(key=key, message=f"expected a tensor, got {what}")
    return tensors


def _refuse_twice(tensors: Collection[str], names: Iterable[str]) -> None:
    for name in names:
        if name in tensors:
            message = "two tensors have this name once it is text, as with the keys 1 and '1': rename one"
            raise StateError(key=name, message=message)


def gather_nested(state: Mapping[str, Any], timeout_s: float, group: ProcessGroup | None) -> dict[str, Any] | None:
    """A nested state, such as a model's beside its optimizers', with whole tensors in place of the parts.

    On rank 0; None elsewhere. Every rank calls this.

    Args:
        state: nested mappings and lists of parts and of anything else, of which rank 0's counts.
        timeout_s: as for ``iter_full_tensors``.
        group: the ranks.

    Raises:
        SafeCheckpointError: as for ``iter_full_tensors``.
    """
    parts: dict[str, torch.Tensor] = {}
    for path, leaf in dtensor.placed(state, tuples=True):
        if dtensor.is_sharded(leaf):
            name = "/".join(map(str, path))
            parts[name if name not in parts else f"{name}, number {len(parts)}"] = leaf  # the keys 1 and "1"
    gathered = [tensor for _, tensor in iterate(parts, timeout_s, group, None)]
    whole = dict(zip(map(id, parts.values()), gathered, strict=True))
    return _filled(state, whole) if process_groups.group_of(group).rank == 0 else None


def _filled(value: Any, whole: Mapping[int, Any]) -> Any:
    """The same with whole tensors in the places of the parts, by their ``id``. What has no part in it stays as it is."""
    if id(value) in whole:
        return whole[id(value)]
    if not isinstance(value, Mapping | list | tuple) or whole.keys().isdisjoint(map(id, dtensor.leaves_of(value))):
        return value
    if isinstance(value, Mapping):
        return {key: _filled(inner, whole) for key, inner in value.items()}
    parts = [_filled(inner, whole) for inner in value]
    return getattr(type(value), "_make", type(value))(parts)  # a named tuple takes its fields one by one


class RoundBarrier:
    """The signals of one streamed gather, on one rank: when the next round begins, and why there will be none.

    A round begins when every rank has reported that it is ready; the writing rank is ready when it has room. So the ranks
    wait here, in the store, for a rank that left or whose storage is slow. No rank enters a collective that another does not.
    Used on the thread that gathers; issues no collectives.

    Args:
        coordinator: where the ranks meet.
        op_id: unique to this gather.
        timeout_s: how long the writing rank may take between two rounds.
        late_s: how long the others may take, who have nothing to do meanwhile.

    Attributes:
        alone: whether there is no other rank.
    """

    def __init__(self, coordinator: Coordinator, op_id: str, *, timeout_s: float, late_s: float) -> None:
        self._coordinator = coordinator
        self.alone = coordinator.size == 1
        self._store_client = coordinator.store_client("gather")
        self._round = Round(self._store_client, f"gather/{op_id}", range(coordinator.size), "gather")
        self._timeout_s = timeout_s
        self._late_s = late_s
        self._next = 0
        self._begun = self._done = 0
        self._reported = False
        self._looked = time.monotonic()
        self._needed = [0] if coordinator.rank else list(range(1, coordinator.size))

    def enter(self, phase: str) -> None:
        """Wait until every rank is here for the next round.

        Raises:
            SafeCheckpointError: what made another rank leave.
            RendezvousTimeout: some ranks did not come; names them.
            PeerLostError: a rank died or stopped.
        """
        if self.alone:
            return
        number, rank = self._next, self._coordinator.rank
        over = [number - 2] if rank == 0 and number > 1 else []  # all have passed that one
        self._round.phase = phase
        self._round.post(rank, number + 1, turn=number, drop=over)
        self._next = number + 1
        wait_s = self._late_s if rank == 0 else self._timeout_s + self._late_s
        try:
            reason = self._round.wait(wait_s=wait_s, check=self._check_peers, turn=number)
        except KeyTimeout:
            posted = self._round.messages()
            missing = tuple(rank for rank in range(self._coordinator.size) if posted.get(rank, 0) <= number)
            raise RendezvousTimeout(phase=phase, seconds=wait_s, missing=missing) from None
        self._receive(reason)
        self._begun = number + 1

    def look(self) -> None:
        """Called again and again within a round. Raises as ``enter`` does when it will not end."""
        if self.alone or time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked = time.monotonic()
        self._check_peers()
        reason = self._round.peek(turn=self._next) or {}
        # One that left behind this round took part in it: it will end.
        if reason.get("done", 0) < self._next:
            self._receive(reason)

    def passed(self) -> None:
        """The round is over for this rank."""
        self._done = self._next

    def leave(self, error: BaseException, where: str) -> None:
        """Report to the other ranks why there will be no further round with this rank."""
        rank = self._coordinator.rank
        if isinstance(error, GeneratorExit):
            reason = f"rank {rank} left the gather at {where}: its loop ended early or raised"
            error = PeerLostError(phase="gather", ranks=(rank,), reason=reason)
        if self._reported:
            return
        if rank == 0:
            # The store ends with rank 0, which stays until the others have read why there is no further round.
            self._coordinator.receipts.expect(self._round.read, self._coordinator.size - 1 - _lost_with(error, rank))
        wire = to_wire(error, rank=rank, phase=f"gather: {where}")
        # Also in the round that this rank waited for: where it begins all the same, the others look for the next one within.
        turns = range(self._begun, self._next + 1)
        self._round.wake({"error": wire, "done": self._done}, turns=turns)

    def close(self) -> None:
        """Give the connection back. Rank 0 notes which keys are left; the next agreement, to which all come, drops them."""
        self._store_client.close()
        if self._coordinator.rank == 0 and not self.alone:
            turns = range(max(0, self._next - 2), self._next + 1)
            self._coordinator.over += [self._round.read, *self._round.message_keys(turns)]

    def _check_peers(self) -> None:
        self._coordinator.check(self._needed)

    def _receive(self, reason: Mapping[str, Any]) -> None:
        if "error" not in reason:
            return
        self._reported = True
        error = from_wire(reason["error"])
        if self._coordinator.rank == 0:
            self._coordinator.receipts.expect(
                self._round.read, self._coordinator.size - 1 - max(1, _lost_with(error, 0))
            )
        else:
            self._round.acknowledge()
        raise error


def _lost_with(error: BaseException, rank: int) -> int:
    """Return how many other ranks will not read the report."""
    return len(set(getattr(error, "ranks", getattr(error, "missing", ()))) - {rank})
