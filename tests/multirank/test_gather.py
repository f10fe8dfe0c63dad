"""Full tensors of a sharded state: equal bit for bit, in step, and nobody waits for a rank that will not come."""

import errno
import os
import signal
import time
from collections import Counter, OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kit.inside import store_keys
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Timeouts, iter_full_tensors, lengthy_timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.sharding import dtensor, gather, gather_plan, gather_transport
from safe_ckpt.core.sharding.gather import gather_nested, iterate
from safe_ckpt.errors import ConfigError, DesyncError, PeerLostError, RendezvousTimeout, SafeCheckpointError, StateError
from support import heeds_raised_timeouts, placements

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]
QUICK = Timeouts(lengthy_s=600, barrier_s=60, peer_stall_s=3, shutdown_s=10)


def some(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def _random_states(rank, cases, sizes):
    world = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (world,)), init_device_mesh("cpu", sizes)]
    for shapes, budget in cases:
        state, expected = {}, {}
        for number, (shape, dtype, mesh, choice) in enumerate(shapes):
            whole = some(shape, DTYPES[dtype], number)
            expected[f"t{number}"] = whole
            kinds = placements(meshes[mesh], choice, len(shape))
            state[f"t{number}"] = distribute_tensor(whole, meshes[mesh], kinds) if shape else whole
        found = dict(iter_full_tensors(state, staging_bytes=budget))
        assert list(found) == list(expected)
        for name, whole in expected.items():
            assert found[name] is None if rank else torch.equal(found[name], whole), (name, shapes)
            assert rank or found[name].dtype == whole.dtype


@pytest.mark.parametrize(("world", "sizes"), [(4, (2, 2)), pytest.param(3, (1, 3), marks=pytest.mark.thorough)])
def test_any_shape_type_mesh_and_placement_comes_back_whole(world, sizes):
    """60 random states of tensors over 1-D and 2-D meshes, uneven and empty parts included, with tiny and large buffers."""
    cases = []

    @settings(
        max_examples=60, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )  # on a busy machine
    @given(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 7), max_size=3).map(tuple),
                st.integers(0, len(DTYPES) - 1),
                st.integers(0, 1),
                st.integers(0, 15),
            ),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from([16, 100, 1 << 20]),
    )
    def collect(shapes, budget):
        cases.append((shapes, budget))

    collect()
    values(spawn_ranks(_random_states, world, cases, sizes, timeout_s=100))


def _partial_and_parallel(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    line = init_device_mesh("cpu", (4,))
    state = {
        "first": distribute_tensor(some((5, 3), torch.float32), line, [Shard(0)]),
        "sum": DTensor.from_local(torch.full((3, 2), float(rank)), line, [Partial()]),
        "mean": DTensor.from_local(torch.full((3, 2), float(rank)), mesh, [Partial("avg"), Shard(0)]),
        "last": distribute_tensor(some((5, 3), torch.float32, 1), line, [Shard(1)]),
    }
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7))
    plain = {name: value.clone() for name, value in module.state_dict().items()}
    parallelize_module(module, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=mesh["data"])
    expected = {name: value.full_tensor() for name, value in state.items()}
    for source, whole in ((state, expected), (module, plain)):
        for budget in (32, 1 << 20):
            for name, tensor in iter_full_tensors(source, staging_bytes=budget):
                assert tensor is None if rank else torch.equal(tensor, whole[name]), name


def test_partial_tensors_and_two_kinds_of_sharding_are_gathered_whole():
    """Partial tensors give their sum or mean; FSDP2 over tensor parallelism, strided parts included, gives the module."""
    values(spawn_ranks(_partial_and_parallel, 4))


def _partial_elsewhere(rank):
    mesh = DeviceMesh("cpu", [1, 2])
    parts = [torch.full((3, 2), float(rank + number)) for number in range(3)]
    state = {f"p{number}": DTensor.from_local(part, mesh, [Partial()]) for number, part in enumerate(parts)}
    state = {"first": torch.full((5,), 7.0), **state}
    for budget in (32, 1 << 20):
        found = dict(iter_full_tensors(state, staging_bytes=budget))
        if rank == 0:
            assert [found[f"p{number}"].unique().tolist() for number in range(3)] == [[3.0], [5.0], [7.0]], budget


def test_sums_of_other_ranks_are_added_up_before_they_travel():
    """Rank 0 has no part of them, so they come from another rank, several in one round: each is the sum by then."""
    values(spawn_ranks(_partial_elsewhere, 3))


def _other_type(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.linspace(0, 1, 11)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": {"i": torch.arange(3)}}
    found = dict(iter_full_tensors(state, dtype=torch.bfloat16))
    if rank == 0:
        assert torch.equal(found["w"], whole.to(torch.bfloat16))
        assert torch.equal(found["n.i"], torch.arange(3))


def test_a_gathers_dtype_converts_floating_point_tensors_alone():
    """``dtype`` is for floating point alone; nested names are joined by dots."""
    values(spawn_ranks(_other_type, 2))


def test_a_gather_on_one_rank_needs_no_process_group():
    """A plain state dict on one rank is handed out as it is."""
    state = {"a": torch.arange(4), "b": torch.ones(())}
    for name, tensor in iter_full_tensors(state):
        assert torch.equal(tensor, state[name])
        assert tensor.data_ptr() != state[name].data_ptr()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"timeout_s": 0}, "timeout_s"), ({"staging_bytes": -1}, "staging_bytes"), ({"dtype": torch.int8}, "dtype")],
)
def test_bad_arguments_are_refused_at_the_call(arguments, match):
    """Not at the first tensor."""
    with pytest.raises(ConfigError, match=match):
        iter_full_tensors({}, **arguments)


def test_chunks_that_do_not_make_up_a_tensor_are_refused():
    """A part that no rank has is named, not filled with whatever memory held."""
    with pytest.raises(StateError, match="6 of its 9 elements"):
        pieces = {rank: [[dtensor.Piece.first((at,), (3,))]] for rank, at in enumerate((0, 3))}
        gather_plan.plan(["w"], [(9,)], [4], pieces, 100)


def _differ(rank):
    try:
        list(iter_full_tensors({"w": torch.ones(2 + rank)} if rank < 2 else {"w": "text"}))
    except SafeCheckpointError as error:
        return type(error), str(error)


def test_ranks_with_different_states_are_told_so():
    """Another shape on one rank is a DesyncError on all, what is no tensor a StateError on all."""
    for kind, text in values(spawn_ranks(_differ, 2)):
        assert kind is DesyncError
        assert "tensors" in text
    for kind, text in values(spawn_ranks(_differ, 3)):
        assert kind is StateError
        assert "expected a tensor, got str" in text


# ---------------------------------------------------------------- storage and faults


def _sharded(count=6, rows=1 << 16):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"t{number}": distribute_tensor(some((rows, 4), torch.float32, number), mesh, [Shard(0)])
        for number in range(count)
    }


def _timeouts():
    return [
        seconds
        for group in process_groups.process_groups(None)
        for _, seconds in process_groups.backend_timeouts(group)
    ]


def _slow_storage(rank):
    before, seen = _timeouts(), []
    for name, tensor in iter_full_tensors(_sharded(3), timeout_s=100, staging_bytes=1 << 18):
        if tensor is not None and name == "t1":
            time.sleep(8)
        seen.append(name)
    dist.barrier()
    return before, _timeouts(), seen


@heeds_raised_timeouts
def test_storage_may_be_slower_than_the_groups_timeout():
    """WORLD's timeout is 4 s, rank 0 stalls for 8 s between two parameters: all goes on, and the timeout is 4 s again."""
    for before, after, seen in values(spawn_ranks(_slow_storage, 4, group_timeout_s=4)):
        assert before == after == [4.0]
        assert seen == ["t0", "t1", "t2"]


def _interrupted(rank, how):
    before, problem = _timeouts(), None
    begun = time.monotonic()
    try:
        for name, tensor in iter_full_tensors(_sharded(), timeout_s=3600, staging_bytes=1 << 16):
            if name == "t2":
                begun = time.monotonic()
                if how == "raises" and rank == 0:
                    raise OSError(errno.ENOSPC, "disk full")
                if how == "breaks" and rank == 1:
                    break
                if how == "all break":
                    break
            del tensor
    except (OSError, SafeCheckpointError) as error:
        problem = error
    seconds = time.monotonic() - begun
    if how == "all break":
        dist.barrier()
    return before == _timeouts(), type(problem), str(problem), seconds


@pytest.mark.parametrize(("how", "culprit"), [("raises", 0), ("breaks", 1)])
def test_a_rank_that_leaves_is_named_at_once(how, culprit):
    """An error in the consumer, or a loop that is left on one rank: the others hear it in seconds, not after the hour."""
    for rank, (restored, kind, text, seconds) in enumerate(values(spawn_ranks(_interrupted, 4, how))):
        assert restored
        assert seconds < 30
        if rank != culprit:
            assert kind is PeerLostError
            assert f"rank {culprit} left the gather at t2" in text


def test_all_ranks_may_stop_early_together():
    """That is no error, and the group goes on to work."""
    for restored, kind, _, _ in values(spawn_ranks(_interrupted, 3, "all break")):
        assert restored
        assert kind is type(None)


def _own_error(rank):
    stream = iterate(_sharded(), 3600, None, None, 1 << 16)
    try:
        for name, _ in stream:
            if rank == 0 and name == "t1":
                stream.throw(OSError(errno.ENOSPC, "No space left on device", "/somewhere"))
    except Exception as error:
        return type(error).__name__, str(error)


def test_the_consumers_error_on_rank_0_is_raised_on_every_rank():
    """ENOSPC of rank 0's disk is what the others raise, not that somebody left."""
    for rank, (_, text) in enumerate(values(spawn_ranks(_own_error, 3))):
        assert "No space left on device" in text
        assert rank == 0 or "rank 0" in text


def _skips(rank, folder):
    gather._LATE_S = 4.0
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)):  # its timeouts hold for the gather as well
        stream = iter(iter_full_tensors(_sharded(), timeout_s=3600, staging_bytes=1 << 16))
        for _ in range(2):
            next(stream)
        begun = time.monotonic()
        try:
            if rank == 1:
                time.sleep(11)  # held open, as by a rank that went on to something else
                return None
            while True:
                next(stream)
        except SafeCheckpointError as error:
            return type(error), getattr(error, "missing", str(error)), time.monotonic() - begun


def test_a_rank_that_does_not_come_back_is_named(tmp_path):
    """One that neither closes nor goes on: the others raise its name within 30 s."""
    found = values(spawn_ranks(_skips, 3, str(tmp_path)))
    for rank in (0, 2):
        kind, missing, seconds = found[rank]
        assert kind is RendezvousTimeout
        assert missing == (1,)
        assert seconds < 30


def _stopped(rank, folder, victim, within):
    def stop(*_, **__):
        os.kill(os.getpid(), signal.SIGSTOP)

    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)):
        begun = time.monotonic()
        try:
            state = _sharded(40, 1 << 10)
            if within == "a sum":
                mesh = init_device_mesh("cpu", (3,))
                state = {name: DTensor.from_local(torch.ones(5), mesh, [Partial()]) for name in state}
            stream = iter_full_tensors(state, timeout_s=3600, staging_bytes=1 << 12)
            for number, _ in enumerate(stream):
                if number == 5 and rank == victim:
                    gather_transport.to_rank_0 = dtensor.reduced = stop  # every rank has come; this one goes no further
                    if not within:
                        stop()
        except SafeCheckpointError as error:
            return type(error), getattr(error, "ranks", ()), time.monotonic() - begun
    return None


STOPS = [
    (0, ""),
    pytest.param(2, "", marks=pytest.mark.thorough),
    pytest.param(2, "a round", marks=pytest.mark.thorough),
    (2, "a sum"),
]


@pytest.mark.parametrize(("victim", "within"), STOPS)
def test_a_rank_that_is_stopped_is_named(tmp_path, victim, within):
    """SIGSTOP between two rounds or within a collective: every live rank raises its number after peer_stall_s (3 s here)."""
    for outcome in spawn_ranks(_stopped, 3, str(tmp_path), victim, within, expendable=[victim]):
        if outcome.rank != victim:
            kind, lost, seconds = outcome.value
            assert kind is PeerLostError
            assert lost == (victim,)
            assert seconds < 30


def _odd_gathers(rank):
    world = dist.get_world_size()
    partial = init_device_mesh("cpu", (world,))
    state = {f"p{number}": DTensor.from_local(torch.ones(3), partial, [Partial()]) for number in range(4)}
    told = None
    try:
        for name, _ in iter_full_tensors(state, timeout_s=3600):
            if rank == 0 and name == "p1":
                raise OSError(errno.ENOSPC, "disk full")
    except (OSError, SafeCheckpointError) as error:
        told = str(error)
    coordinator = open_coordinator(None, QUICK, observe=False)
    keys = []
    for _ in range(4):
        list(iter_full_tensors(_sharded(), staging_bytes=1 << 16))
        dist.barrier()  # all are counted at the same place
        keys.append(store_keys(coordinator))
        dist.barrier()
    dist.barrier()  # rank 0 hosts the store that the others still count in
    coordinator.release(keep=True)
    return told, keys, len(coordinator.receipts)


def test_leaving_between_sums_is_told_and_keys_do_not_pile_up():
    """A rank that leaves between two tensors that are still to be summed is named; four gathers leave as many keys as one."""
    for rank, (told, keys, reads) in enumerate(values(spawn_ranks(_odd_gathers, 3))):
        assert "disk full" in told if rank == 0 else "rank 0 left the gather at p1" in told
        assert max(keys) == min(keys), keys
        assert reads <= 3


def _submesh(rank):
    mesh = DeviceMesh("cpu", [0, 1])  # rank 2 is not in it
    state = {"w": DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)], run_check=False)}
    whole = dict(iter_full_tensors(state))["w"]
    with lengthy_timeouts(mesh, 500):
        inside = _timeouts()
    return None if whole is None else whole.tolist(), inside, _timeouts()


def test_tensors_of_a_mesh_without_some_ranks_are_gathered():
    """Its tensors are gathered, its timeouts raised, and the rank outside takes part in WORLD alone."""
    assert values(spawn_ranks(_submesh, 3, group_timeout_s=60)) == [
        ([0.0, 0.0, 1.0, 1.0], [500.0], [60.0]),
        (None, [500.0], [60.0]),
        (None, [500.0], [60.0]),
    ]


def _interleaved(rank):
    first, second = (iter_full_tensors(_sharded(), timeout_s=seconds) for seconds in (100, 200))
    seen = [_timeouts()]
    for stream in (first, second):
        next(stream)
    seen.append(_timeouts())
    for stream in (first, second):
        stream.close()
        seen.append(_timeouts())
    return seen


def test_gathers_that_end_in_another_order_put_the_timeouts_back():
    """The longest that is still asked for counts, and in the end it is what it was."""
    assert values(spawn_ranks(_interleaved, 2, group_timeout_s=60)) == [[[60.0], [200.0], [200.0], [60.0]]] * 2


class Pair(NamedTuple):
    """What user code may keep in its state."""

    one: object
    other: object


def _nested(rank):
    mesh = init_device_mesh("cpu", (2,))
    part = [distribute_tensor(torch.full((3,), float(number)), mesh, [Shard(0)]) for number in range(4)]
    state = {
        "pair": Pair(part[0], Pair(1, [part[1]])),
        "keys": {1: part[0], "1": part[1], "a/b": part[2], "a": {"b": part[3]}},
        "plain": (Pair(1, 2), torch.Size([2]), Counter(a=1), OrderedDict(b=2)),
    }
    return gather_nested(state, 60, None)


def test_a_gathered_nested_state_keeps_its_keys_and_types():
    """Named tuples, keys that look alike, and what has no part in it."""
    found, none = values(spawn_ranks(_nested, 2))
    assert none is None
    assert type(found["pair"]) is type(found["pair"].other) is Pair
    assert found["pair"].one.tolist() == [0, 0, 0]
    assert found["pair"].other.other[0].tolist() == [1, 1, 1]
    keys = found["keys"]
    assert [keys[1][0].item(), keys["1"][0].item(), keys["a/b"][0].item(), keys["a"]["b"][0].item()] == [0, 1, 2, 3]
    plain = (Pair(1, 2), torch.Size([2]), Counter(a=1), OrderedDict(b=2))
    assert found["plain"] == plain
    assert list(map(type, found["plain"])) == list(map(type, plain))


def _shortened(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"fine": torch.ones(3), "part": distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])}
    module = torch.nn.Linear(4, 4)
    fully_shard(module, mesh=mesh)
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        ckpt.save(1, {"shards": state, "module": module}).result()
        if rank:  # of rank 0 nothing is wrong
            state["part"].to_local().untyped_storage().resize_(0)
            module.weight.to_local().untyped_storage().resize_(4)
        for step, name in ((2, "shards"), (3, "module")):
            with pytest.raises(StateError, match=r"(part|weight).*its storage has"):
                ckpt.save(step, {name: {"shards": state, "module": module}[name]})
        with pytest.raises(StateError, match=r"weight.*its storage has"):
            ckpt.export(module, f"{folder}/weights")
        with pytest.raises(StateError, match=r"part.*its storage has"):
            list(iter_full_tensors(state))
        with pytest.raises(StateError, match=r"own.*its storage has"):
            ckpt.save(4, {"x": PerRank({"own": state["part"].to_local(), "rank": rank})})
            ckpt.wait()
        ckpt.save(5, {"x": {"fine": state["fine"]}}).result()


def test_a_part_that_lost_its_memory_is_refused_on_all_ranks(tmp_path):
    """One rank's part of a DTensor, in a save, an export, a gather, or as that rank's own: all raise its name, and go on."""
    values(spawn_ranks(_shortened, 2, str(tmp_path), timeout_s=60))
