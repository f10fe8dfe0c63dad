"""A resume reads every byte of the storage once for all ranks of a host, and tensors go straight to where they belong."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank
from safe_ckpt.core.sharding import dcp_read
from safe_ckpt.core.storage.reader import drop_cache

CONFIG = CheckpointConfig(timeouts=QUICK)
ROWS, COLUMNS = 3072, 2048  # 24 MiB


def stored_bytes():
    """What the kernel has read from storage for this process."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def state_of(kind, fill):
    whole = torch.full((ROWS, COLUMNS), float(fill))
    if kind == "replicated":
        return {"w": {"a": whole, "b": whole + 1}}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": {key: distribute_tensor(whole + n, mesh, [Shard(0)]) for n, key in enumerate("ab")}}


def _save(rank, folder, kind):
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, {**state_of(kind, 5), "own": PerRank({"rank": rank})}).result()


def _read(rank, folder, kind):
    state = {**state_of(kind, 0), "own": PerRank({"rank": -1})}
    with Checkpointer(folder, CONFIG) as ckpt:
        dist.barrier()
        if rank == 0:
            os.sync()
            drop_cache(folder)
        dist.barrier()
        before = stored_bytes()
        ckpt.resume(state)
        read = stored_bytes() - before
    for number, key in enumerate("ab"):
        part = state["w"][key]
        part = part.to_local() if isinstance(part, DTensor) else part
        assert bool((part == 5 + number).all())
    assert state["own"].value == {"rank": rank}
    return read


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_storage_is_read_once_for_all_ranks_of_a_host(tmp_path, kind):
    """Three ranks, nothing in memory: the kernel counts at most 1.05 times the state, as for a single rank."""
    values(spawn_ranks(_save, 3, tmp_path, kind, timeout_s=100))
    size = 2 * 4 * ROWS * COLUMNS
    read = sum(values(spawn_ranks(_read, 3, tmp_path, kind, timeout_s=100)))
    if read < size // 2:
        pytest.skip("these files lie in memory, there is no storage to be counted")
    assert read <= 1.05 * size


SHAPES = {"rows": (40, 6), "uneven": (7, 3), "flat": (11,), "one": (), "deep": (5, 4, 3), "empty": (0, 4)}


def spread(fill, dim):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        whole = torch.arange(size, dtype=torch.float64).view(shape) * fill
        on = [Shard(min(dim, len(shape) - 1))] if shape else None
        found[name] = distribute_tensor(whole, mesh, on) if on else whole
        found[f"half {name}"] = (
            distribute_tensor(whole.to(torch.bfloat16), mesh, on) if on else whole.to(torch.bfloat16)
        )
    return found


def _write(rank, folder, tool):
    if tool == "torch":
        dcp.save({"w": spread(3, 0)}, checkpoint_id=folder / "step-1")
    else:
        with Checkpointer(folder, CONFIG) as ckpt:
            ckpt.save(1, {"w": spread(3, 0)}).result()


def _load(rank, folder, dim, turned):
    others, original = [], FileSystemReader.read_data

    def note(self, plan, planner):
        others.extend(item.dest_index.fqn for item in plan.items)
        return original(self, plan, planner)

    FileSystemReader.read_data = note
    state = spread(0, dim)
    if turned:  # memory that is not in the order of the elements
        state["rows"]._local_tensor = state["rows"]._local_tensor.t().contiguous().t()
    (place,) = folder.glob("step-*")
    dcp_read.fit_value(dcp_read.Stored(place, "w"), state, lambda _: None, lambda saved: saved).apply(())
    for name, expected in spread(3, dim).items():
        assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (state[name], expected))), name
    return others


@pytest.mark.parametrize(
    ("world", "dim", "turned"),
    [
        (3, 0, True),
        (3, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((1, 0, False), (1, 0, True), (2, 0, False), (2, 0, True), (3, 0, False), (3, 1, True))
        ),
    ],
)
def test_tensors_of_our_files_are_read_straight_to_their_places(tmp_path, world, dim, turned):
    """Two ranks save; other numbers of ranks read rows by themselves, and columns with DCP's own reader."""
    values(spawn_ranks(_write, 2, tmp_path, "ours", timeout_s=100))
    for others in values(spawn_ranks(_load, world, tmp_path, dim, turned, timeout_s=100)):
        assert bool(others) is (dim == 1)


def test_a_resume_reads_files_that_torch_wrote_by_dcps_own_reader(tmp_path):
    """Entries that lie otherwise are left to DCP's own reader."""
    values(spawn_ranks(_write, 2, tmp_path, "torch", timeout_s=100))
    for others in values(spawn_ranks(_load, 3, tmp_path, 0, False, timeout_s=100)):
        assert others


def _turned(rank, folder):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    mesh = init_device_mesh("cpu", (1,))
    part = distribute_tensor(torch.ones(2), mesh, [Shard(0)])

    def state(z):
        return {"w": {"part": part, "conj": z.conj(), "neg": z.conj().imag}}

    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, state(numbers)).result()
        empty = torch.zeros(2, dtype=torch.complex64)
        again = state(empty)
        version = empty._version
        ckpt.resume(again)
        # ``neg`` is a view of the same memory as ``conj``: whichever is read last, both have the numbers that were saved.
        assert torch.equal(again["w"]["conj"].resolve_conj().imag, again["w"]["neg"].resolve_neg())
        assert torch.equal(again["w"]["conj"].resolve_conj(), numbers.conj().resolve_conj())
        assert empty._version > version


def test_conjugated_and_negated_views_are_read_as_what_they_show(tmp_path):
    """A conjugated and a negated view are read as what they show, and torch knows that they have changed."""
    values(spawn_ranks(_turned, 1, tmp_path, timeout_s=100))
