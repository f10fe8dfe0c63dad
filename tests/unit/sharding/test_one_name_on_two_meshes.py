"""One name on several meshes of some of the ranks: replicas are saved, other values are refused by name."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from safe_ckpt.core.sharding.dcp_ranks import on_part, refuse_others
from safe_ckpt.errors import DesyncError

RANKS = 4
MESHES = {
    "pairs": [[0, 1], [2, 3]],
    "odd and even": [[0, 2], [1, 3]],
    "each alone": [[0], [1], [2], [3]],
    "three": [[0, 1, 2]],
}
WHOLE = torch.arange(24.0).view(4, 6)


def told(meshes, values):
    """What each rank says of its part of ``values[mesh]``, which is name -> (whole tensor, placement)."""
    found = {}
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            mine = [number for number, ranks in enumerate(meshes) if rank in ranks]
            state = {}
            for number in mine:
                mesh = DeviceMesh("cpu", meshes[number], _init_backend=False)
                for name, (whole, placement) in values[number].items():
                    state[name] = part(whole, mesh, placement, meshes[number].index(rank))
            found[rank] = on_part(state, RANKS)
        finally:
            dist.destroy_process_group()
    return found


def part(whole, mesh, placement, at):
    local = whole if placement.is_replicate() else whole.tensor_split(mesh.size(), placement.dim)[at]
    return DTensor.from_local(
        local.clone(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("meshes", MESHES.values(), ids=MESHES)
def test_replicas_of_a_sharded_tensor_are_saved(meshes, placement):
    """However each mesh cuts it, for its parts differ from one another, and not from those of the other meshes."""
    names = {"a": (WHOLE, placement), "b": (WHOLE + 1, Shard(0))}
    assert refuse_others("model", told(meshes, [names] * len(meshes))) is (len(meshes) > 1)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("meshes", [one for one in MESHES.values() if len(one) > 1])
@pytest.mark.parametrize("at", [(0, 0), (3, 5)])
def test_one_other_number_anywhere_is_refused_by_name(meshes, placement, at):
    """In the first part or in the last, on any mesh but the first; the error says which ranks have which."""
    for other in range(1, len(meshes)):
        changed = WHOLE.clone()
        changed[at] += 1
        values = [
            {"a": (WHOLE, Shard(0)), "b": (changed if number == other else WHOLE, placement)}
            for number in range(len(meshes))
        ]
        with pytest.raises(DesyncError, match=r"state\['model'\]: b") as found:
            refuse_others("model", told(meshes, values))
        assert set(map(int, found.value.values)) & set(meshes[other])


def test_other_names_on_other_meshes_are_no_replicas():
    """Each has its own, and nothing is compared."""
    values = [{"a": (WHOLE, Shard(0))}, {"b": (WHOLE + 1, Shard(0))}]
    assert refuse_others("model", told(MESHES["pairs"], values)) is False


PLACES = st.dictionaries(st.sampled_from(["[[0]]", "[[2]]", "[[4]]"]), st.sampled_from("xyz"), min_size=1)


@settings(max_examples=60, deadline=None)
@given(st.lists(PLACES, min_size=1, max_size=3), st.booleans())
def test_parts_are_compared_by_their_place(meshes, shuffled):
    """Whatever the ranks say in whatever order: it is refused exactly if two meshes differ in one place."""
    rows = [["w", place, mesh, digest] for mesh, places in enumerate(meshes) for place, digest in places.items()]
    rows = rows[::-1] if shuffled else rows
    said = {rank: [row] for rank, row in enumerate(rows)}
    differ = any(one[1] == two[1] and one[3] != two[3] for one, two in itertools.combinations(rows, 2))
    if differ:
        with pytest.raises(DesyncError):
            refuse_others("model", said)
    else:
        refuse_others("model", said)
