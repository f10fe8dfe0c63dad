"""How parts of tensors lie in the buffer of one round of a gather."""

import pytest
import torch

from safe_ckpt.core.sharding import gather_plan

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


@pytest.mark.parametrize("before", [1, 3, 8, 15, 16, 24, 1000])
def test_the_chunk_behind_one_of_any_length_is_aligned_for_every_type(before):
    """A view of a type needs a beginning that its elements divide: 16 bytes for complex128, behind an odd number of int64."""
    begin = gather_plan.padded(before)
    assert before <= begin < before + 16
    assert [dtype for dtype in DTYPES if begin % dtype.itemsize] == []
