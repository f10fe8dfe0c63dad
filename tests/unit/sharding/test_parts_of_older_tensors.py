"""ShardedTensor, of which FSDP 1 gives each rank one part."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard

from safe_ckpt.core.sharding.dtensor import Piece, local_of, parts_of, pieces_of
from safe_ckpt.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of(*parts):
    rows, shards = 0, []
    for part in parts:
        shards.append(Shard.from_tensor_and_offsets(part, [rows, 0], 0))
        rows += part.shape[0]
    return sharded_tensor.init_from_local_shards(shards, rows, 3)


def test_one_part_of_a_rank_is_its_piece(group):
    """It lies where the tensor says, and its memory is the tensor's own."""
    part = torch.arange(6.0).reshape(2, 3)
    tensor = of(part)
    assert pieces_of(tensor) == [Piece.first((0, 0), (2, 3))]
    assert local_of(tensor).data_ptr() == part.data_ptr()
    assert [one.data_ptr() for one in parts_of(tensor)] == [part.data_ptr()]


def test_several_parts_on_one_rank_are_refused(group):
    """The values of one would be saved in the places of all."""
    with pytest.raises(StateError, match="2 parts of it are on one rank"):
        pieces_of(of(torch.zeros(2, 3), torch.ones(1, 3)))
