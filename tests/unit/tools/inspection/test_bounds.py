"""What a few bytes can claim: text without end, and parts that are no whole."""

import pickle
import random
import subprocess
import sys
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from kit.thorough import THOROUGH
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.tools.inspection import dcp_reader
from safe_ckpt.tools.inspection.tensors import describe

NESTED = {
    "tuple": b"\x80\x02)" + b"2\x86" * 28 + b".",
    "key": b"\x80\x02})" + b"2\x86" * 28 + b"K\x01s.",
    "member of a set": b"\x80\x04\x8f()" + b"2\x86" * 28 + b"\x90.",
    "member of a frozenset": b"\x80\x04()" + b"2\x86" * 28 + b"\x91.",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NESTED)
def test_two_small_files_do_not_keep_the_command_busy(tmp_path, kind):
    """A tuple of a tuple, 28 times, is 65 bytes; its whole text would have hundreds of millions of them."""
    for name in ("a.pkl", "b.pkl"):
        (tmp_path / name).write_bytes(NESTED[kind])
    for names in (["a.pkl"], ["a.pkl", "b.pkl"]) if THOROUGH else (["a.pkl", "b.pkl"],):
        words = [sys.executable, "-m", "safe_ckpt.tools.cli", "inspect", *names]
        subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60, check=False)


def test_a_text_shows_what_is_small():
    """Lists, numbers and names are shown as they are; what is long or deep is cut."""
    assert describe([1, 2.5, "a", None, (1, 2), {"k": [1]}]) == "[1, 2.5, 'a', None, (1, 2), {'k': [1]}]"
    assert describe([0.12345678901234566]) == "[0.12345678901234566]"
    deep = ()
    for _ in range(100):
        deep = (deep, deep)
    assert len(describe(deep)) <= 80


def cover(shape, parts):
    """How often each element is there, counted one by one."""
    counts = np.zeros(shape, dtype=int)
    for at, size in parts:
        counts[tuple(slice(a, a + s) for a, s in zip(at, size, strict=True))] += 1
    return bool((counts == 1).all())


def test_parts_are_a_whole_exactly_if_each_element_is_there_once():
    """Of random divisions, and of these with a part moved, doubled or left out: the same answer as by counting."""
    chance = random.Random(3)
    answers = []
    for _ in range(400):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(0, 3)))
        cuts = [sorted({0, size, *(chance.randint(0, size) for _ in range(2))}) for size in shape]
        rows = product(*(list(pairwise(cut)) for cut in cuts))
        parts = [(tuple(a for a, _ in row), tuple(b - a for a, b in row)) for row in rows]
        if chance.random() < 0.6:
            victim = chance.randrange(len(parts))
            parts[victim : victim + 1] = chance.choice([[], [parts[victim]] * 2, [chance.choice(parts)]])
        answers.append(cover(shape, parts))
        assert dcp_reader._tile(shape, parts) is answers[-1], (shape, parts)
    assert 50 < sum(answers) < 350


def test_a_repeated_part_and_a_gap_are_no_whole():
    """The sum of elements is right, and half of them are missing: refused, as damage."""
    with pytest.raises(ValueError, match="overlap, or leave a gap"):
        dcp_reader._shape("w", "float32", (16,), (((0,), (8,)), ((0,), (8,))))


def test_a_tensor_of_many_dimensions_does_not_keep_the_command_busy(tmp_path, monkeypatch):
    """A part that divides 20 dimensions has a million corners: such ones are refused, also where many tensors share it."""
    monkeypatch.setattr(dcp_reader, "_MOST_CORNERS", 100_000)
    for count, dimensions in ((1, 23), (20, 12)):
        rest = [2] * (dimensions - 1)  # two halves along the first dimension; an empty part divides all others
        boxes = [
            ([0] * dimensions, [1, *rest]),
            ([1, *(0 for _ in rest)], [1, *rest]),
            ([0] * dimensions, [0] * dimensions),
        ]
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2, *rest]), chunks)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({f"{n}": tensor for n in range(count)})))
        with pytest.raises(CorruptCheckpointError, match="divided in more ways"):
            dcp_reader.read_directory(tmp_path)
