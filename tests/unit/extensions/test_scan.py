"""The numbers of a file, whatever their type and wherever the bytes are cut: compared with what torch says of them."""

import math
import random

import pytest
import torch

from safe_ckpt.extensions.health.regions import FLOATS, Region
from safe_ckpt.extensions.health.scan import Scan

DTYPES = {name: getattr(torch, name) for name in FLOATS if hasattr(torch, name)}


def bytes_of(tensor):
    return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def scanned(data, regions, cuts=()):
    scan, at = Scan(regions), 0
    for cut in (*cuts, len(data)):
        scan.take(at, memoryview(data)[at:cut])
        at = cut
    return scan


def numbers(chance, dtype, kind, count=5000):
    made = torch.tensor([chance.gauss(0, 1) * 10.0 ** chance.randint(-4, 2) for _ in range(count)], dtype=torch.float64)
    made = {"mixed": made, "positive": made.abs() + 1e-3, "negative": -made.abs() - 1e-3, "zero": made * 0}[kind]
    if dtype is torch.float8_e4m3fn:
        made = made.clamp(-400, 400)
    if dtype is torch.float8_e4m3fnuz:
        made = made.clamp(-200, 200)
    return made.to(dtype)


@pytest.mark.parametrize("kind", ["mixed", "positive", "negative", "zero"])
@pytest.mark.parametrize("name", DTYPES)
def test_extremes_and_norm_are_those_of_torch(name, kind):
    """Of healthy numbers: the largest, the smallest and the norm; nothing is sick."""
    chance = random.Random(f"{name} {kind}")
    tensor = numbers(chance, DTYPES[name], kind)
    data = bytes_of(tensor)
    scan = scanned(data, [Region("t", name, 0, len(data))], sorted(chance.sample(range(len(data)), 5)))
    wide = tensor.to(torch.float64)
    facts = scan.facts()
    assert scan.sick() == []
    assert (facts["most"], facts["least"]) == (wide.max().item(), wide.min().item())
    assert facts["norm"] == pytest.approx(wide.norm().item(), rel=1e-4)
    assert (facts["numbers"], facts["tensors"], facts["largest"]) == (len(tensor), 1, "t")


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_is_read_as_torch_reads_it(name):
    """All patterns of narrow types, and random ones of wide ones, NaN, Inf and subnormal numbers among them."""
    dtype = DTYPES[name]
    if FLOATS[name] <= 2:
        bits = torch.arange(1 << 8 * FLOATS[name], dtype=torch.int64)
        tensor = bits.to({1: torch.uint8, 2: torch.uint16}[FLOATS[name]]).view(dtype)
    else:
        tensor = torch.randint(0, 256, (8 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).view(
            dtype
        )
        tensor = torch.cat([tensor, torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0]).to(dtype)])
    data, wide = bytes_of(tensor), tensor.to(torch.float64)
    scan = scanned(data, [Region("t", name, 0, len(data))])
    finite = wide[wide.isfinite()]
    facts, (sick,) = scan.facts(), scan.sick()
    assert (sick["nan"], sick["inf"]) == (wide.isnan().sum().item(), wide.isinf().sum().item())
    assert (facts["most"], facts["least"]) == (finite.max().item(), finite.min().item())
    assert facts["norm"] == pytest.approx(min(finite.norm().item(), 1.3408e154), rel=1e-3)


@pytest.mark.parametrize("seed", range(30))
def test_sick_numbers_are_found_wherever_the_bytes_are_cut(seed):
    """Several tensors and types, with bytes between them that nobody looks at: counts, names, and one pattern for all cuts."""
    chance = random.Random(seed)
    data, regions, expected = bytearray(), [], {}
    for number in range(chance.randint(1, 6)):
        name = chance.choice(list(DTYPES))
        tensor = numbers(chance, DTYPES[name], "mixed", chance.randint(1, 3000))
        places = chance.sample(range(len(tensor)), min(len(tensor), chance.choice([0, 0, 1, 3])))
        for place in places:
            tensor[place] = math.nan
        data += b"\xff" * chance.randint(0, 40)
        regions.append(Region(f"t{number}", name, len(data), len(tensor) * FLOATS[name]))
        data += bytes_of(tensor)
        if places:
            expected[f"t{number}"] = len(places)
    data += b"\xff" * 8
    found = []
    for _ in range(4):
        scan = scanned(data, regions, sorted(chance.sample(range(len(data)), min(len(data), chance.randint(0, 30)))))
        assert {row["name"]: row["nan"] for row in scan.sick()} == expected
        found.append(scan.sick())
    assert all(one == found[0] for one in found)


def test_the_pattern_of_sick_numbers_tells_place_and_kind():
    """Another place, or NaN in the place of Inf, is another pattern; other finite numbers are not."""

    def pattern(tensor):
        data = bytes_of(tensor)
        (row,) = scanned(data, [Region("t", "float32", 0, len(data))]).sick()
        return row["pattern"]

    mask = torch.full((8, 8), -math.inf).triu(1)
    other = mask.clone()
    other[7, 0] = 5.0
    assert pattern(mask) == pattern(other)
    other[7, 0] = -math.inf
    assert pattern(mask) != pattern(other)
    assert pattern(mask) != pattern(torch.where(mask.isinf(), math.nan, mask))


def test_numbers_too_large_for_a_square_are_no_alarm():
    """The norm of the largest floats overflows in their own type, and not in ours."""
    tensor = torch.full((100,), torch.finfo(torch.float32).max)
    data = bytes_of(tensor)
    scan = scanned(data, [Region("t", "float32", 0, len(data))])
    assert scan.sick() == []
    assert scan.facts()["norm"] == pytest.approx(3.4028235e39)
