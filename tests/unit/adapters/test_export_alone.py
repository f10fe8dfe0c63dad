"""``Checkpointer.export`` in one process: tensors that share memory are one tensor only where they are the same values."""

import pytest
import torch
from safetensors.torch import load_file

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.testing import inline_saves

WHOLE = torch.arange(16.0)
SQUARE = WHOLE.view(4, 4)
SHARING = {
    "two halves": ([WHOLE[:8], WHOLE[8:]], [0, 1]),
    "overlapping": ([WHOLE[:8], WHOLE[1:9]], [0, 1]),
    "every second": ([WHOLE[:8], WHOLE[::2]], [0, 1]),
    "transposed": ([SQUARE, SQUARE.T], [0, 1]),
    "rows of one": ([SQUARE[0], SQUARE[1], SQUARE[2]], [0, 1, 2]),
    "columns of one": ([SQUARE[:, 0], SQUARE[:, 1]], [0, 1]),
    "another type": ([WHOLE, WHOLE.view(torch.int32)], [0, 1]),
    "another shape": ([WHOLE, SQUARE], [0, 1]),
    "tied": ([WHOLE, WHOLE, SQUARE[0], SQUARE[0, :]], [0, 2]),
    "a parameter and its data": ([torch.nn.Parameter(WHOLE), WHOLE], [0]),
    "equal, each its own": ([WHOLE, WHOLE.clone()], [0, 1]),
}


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_of_tensors_in_one_memory_only_the_same_ones_are_left_out(tmp_path, dtype):
    """Tied ones are stored once, under their first name; any other view is there with its own values, converted too."""
    with inline_saves(), Checkpointer(tmp_path / "run", CheckpointConfig(timeouts=QUICK)) as ckpt:
        for case, (tensors, kept) in SHARING.items():
            folder = tmp_path / case
            ckpt.export({f"t{n}": tensor for n, tensor in enumerate(tensors)}, folder, dtype=dtype).result(timeout_s=20)
            found = load_file(folder / "model.safetensors")
            assert sorted(found) == [f"t{n}" for n in kept], case
            for n in kept:
                expected = tensors[n].detach()
                expected = expected if dtype is None or not expected.is_floating_point() else expected.to(dtype)
                assert torch.equal(found[f"t{n}"], expected), (case, n)
