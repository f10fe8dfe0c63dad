"""Parts that are no boxes of the whole: rows of each of several weights in one, as tensor parallelism deals them out.

torch's DCP takes such a part for one box: it refuses to save it, or would read another tensor into it.
"""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, iter_full_tensors
from safe_ckpt.core.sharding import dtensor

pytestmark = pytest.mark.timeout(120)

LAYOUTS = {
    "of two in one": ((2,), (8, 6), lambda strided, shard: [strided(0, split_factor=2)]),
    "of two, not evenly": ((2,), (7, 6), lambda strided, shard: [strided(0, split_factor=2)]),
    "along the columns": ((2,), (3, 10), lambda strided, shard: [strided(1, split_factor=2)]),
    "of three in one": ((2,), (12,), lambda strided, shard: [strided(0, split_factor=3)]),
    "and another in front of it": ((2, 2), (5, 8), lambda strided, shard: [shard(0), strided(1, split_factor=2)]),
    "and FSDP on the same rows": ((2, 2), (16, 3), (0, 2)),
    "and FSDP on the same rows, not evenly": ((2, 2), (14, 3), (0, 2)),
    "and FSDP on other rows": ((2, 2), (6, 8), (1, 2)),
    "a box after all": ((2, 2), (11, 3), (0, 1)),
}
RARELY = ("of two in one", "along the columns", "and FSDP on the same rows", "and FSDP on other rows")
SOME = [pytest.param(name, marks=[pytest.mark.thorough] if name in RARELY else []) for name in LAYOUTS]


def spread(name):
    """The whole, and a DTensor of it whose layout is that of this name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, shape, placements = LAYOUTS[name]
    whole = torch.arange(float(math.prod(shape))).reshape(shape) + 1
    if not callable(placements):
        return whole, fully_sharded(whole, *placements)
    placed = placements(_StridedShard, Shard)
    return whole, distribute_tensor(whole, init_device_mesh("cpu", mesh), placed, src_data_rank=None)


def fully_sharded(whole, dim, factor):
    """A parameter as FSDP2 leaves it, of which tensor parallelism had made parts along this dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placement = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None))
    fully_shard(module, mesh=mesh["fsdp"])
    return module.w.detach()


def _every_way(rank, folder, name):
    whole, parts = spread(name)
    held = [dtensor.cut(dtensor.local_of(parts), one.begin, one.sizes) for one in dtensor.pieces_of(parts)]
    lies = [dtensor.cut(whole, one.offsets, one.sizes) for one in dtensor.pieces_of(parts)]
    assert all(map(torch.equal, held, lies))
    assert sum(one.numel() for one in held) == dtensor.local_of(parts).numel()
    gathered = [tensor for _, tensor in iter_full_tensors({"w": parts})]
    assert rank or gathered[0].equal(whole)
    with Checkpointer(folder / "parts") as checkpointer:
        for step in (1, 2):  # the second save is planned as the first one
            checkpointer.save(step, {"w": parts})
        checkpointer.wait()
    states = [{"w": torch.zeros_like(whole)}, {"w": torch.zeros_like(parts)}]
    for state in states:
        with Checkpointer(folder / "parts") as checkpointer:
            checkpointer.resume(state)
    with Checkpointer(folder / "whole") as checkpointer:
        checkpointer.save(1, {"w": whole})
        checkpointer.wait()
    again = {"w": torch.zeros_like(parts)}
    with Checkpointer(folder / "whole") as checkpointer:
        checkpointer.resume(again)
    stock = {"w": torch.zeros_like(whole)}
    (saved,) = (folder / "parts").glob("step-*2")
    dcp.load(stock, checkpoint_id=saved)
    local = dtensor.local_of(parts)
    found = [states[0]["w"].equal(whole), stock["w"].equal(whole)]
    return [*found, *(dtensor.local_of(one["w"]).equal(local) for one in (states[1], again))]


@pytest.mark.parametrize("name", SOME)
def test_scattered_parts_are_saved_read_and_gathered(tmp_path, name):
    """By ``Checkpointer`` into parts and into the whole, from the whole, by torch's DCP into the whole, and one by one."""
    count = math.prod(LAYOUTS[name][0])
    assert values(spawn_ranks(_every_way, count, tmp_path, name, timeout_s=100)) == [[True] * 4] * count
