"""A state with one of everything, and whether two are the same in every respect."""

from collections import Counter, OrderedDict

import torch


def bits(tensor):
    """The bytes of its elements in the order of its shape; strides of dimensions of size one may be anything."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def same(one, other):
    """Equal in every respect that a tensor or a container has."""
    if isinstance(one, torch.Tensor):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad
        if one.layout is torch.strided:
            assert bits(one).equal(bits(other))
        return
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert one == other


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def sample(dtype):
    raw = torch.randint(0, 2, (3, 4)) if dtype is torch.bool else torch.randint(0, 100, (3, 4))
    return raw.to(dtype)


EVERYTHING = {
    **{str(dtype): sample(dtype) for dtype in DTYPES},
    "zero_dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(20)[::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "offset": torch.arange(10)[4:],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "grad": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "nested": {"list": [1, (2, None), {"x": [torch.ones(1)]}], "tuple": (), "ordered": OrderedDict(b=1, a=2)},
    "counter": Counter("aab"),
    "set": {1, 2},
    "text": "ü\ud800\0",
    "bytes": b"\0\xff",
    "no_bytes": b"",
    "bytearray": bytearray(b"xy"),
    "big": 1 << 200,
    "negative": -(1 << 64),
    "float": 0.1,
    "nan": float("inf"),
    "complex": 1 + 2j,
    "dtype": torch.bfloat16,
    "size": torch.Size([1, 2]),
    "device": torch.device("cpu"),
    3: "integer key",
    (1, "a"): True,
    None: False,
}
