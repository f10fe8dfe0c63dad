"""Where the floating-point numbers of a file lie, read from the file that our writer gets."""

import collections
import datetime
import math
import pathlib
import types
import typing

import pytest
import torch

from safe_ckpt.core.formats import safetensors, torch_archive
from safe_ckpt.core.formats.file_plan import KnownBytes
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.extensions.health import regions
from safe_ckpt.extensions.health.regions import of_file
from safe_ckpt.extensions.health.scan import Scan


def plan_of(plan):
    buffer = SharedBuffer()
    (task,) = snapshot.take([plan], buffer, "/nowhere", {})
    whole = bytes(buffer.memory[task.offset : task.offset + task.length])
    buffer.close()
    return memoryview(whole), task.records


def archive(state, *, strict=False):
    return torch_archive.torch_plan("x.pt", state, strict=strict, key="state")


def read(image, found):
    """Every region's numbers, by name."""
    made = {}
    for name, dtype, offset, length, _ in found:
        made[name] = torch.frombuffer(bytearray(image[offset : offset + length]), dtype=getattr(torch, dtype))
    return made


FLOATS = {
    "a": torch.randn(7),
    "b": torch.randn(3, 4).to(torch.bfloat16),
    "c": torch.randn(2).to(torch.float8_e5m2),
    "d": torch.randn(5, dtype=torch.float64),
    "e": torch.randn(5, dtype=torch.complex64),
    "f": torch.randn(4).half(),
}
OTHERS = {"n": torch.arange(5), "o": torch.tensor([True]), "p": torch.empty(0)}


def flat(tensor):
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


@pytest.mark.parametrize("kind", ["safetensors", "archive"])
def test_the_floats_of_a_file_are_found_and_nothing_else(kind):
    """Each tensor under its name, element by element; integers and empty ones are left out."""
    state = {**FLOATS, **OTHERS}
    if kind == "safetensors":  # releases before 0.6 have no complex numbers
        state = {name: tensor for name, tensor in state.items() if tensor.dtype in safetensors.SAFETENSORS_DTYPES}
    plan = safetensors.safetensors_plan("x.safetensors", state) if kind == "safetensors" else archive(state)
    image, records = plan_of(plan)
    found = read(image, of_file(image, records))
    assert set(found) == FLOATS.keys() & state.keys()
    assert all(torch.equal(found[name].view(torch.uint8), flat(FLOATS[name]).view(torch.uint8)) for name in found)
    assert of_file(KnownBytes(plan.length, plan.pieces), records) == of_file(image, records)


class Anything:
    """Of a user's own."""

    def __init__(self):
        self.inner = {"x": torch.randn(3)}


def test_names_are_paths_and_objects_are_not_run():
    """In nested states; parameters and tied tensors too. Objects of any class stand in the way of nothing."""
    weight, known = torch.randn(4, 4), torch.randn(2)
    known.note = "with an attribute"
    state = {
        "known": known,
        "state_dict": collections.OrderedDict(w=weight, tied=weight, p=torch.nn.Parameter(torch.randn(2))),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(3)}}, "param_groups": [{"betas": (0.9, 0.99)}]}],
        "odd": [Anything(), pathlib.Path("x"), datetime.date(2020, 1, 1), {1, 2}, collections.Counter("ab")],
        "functions": (math.sqrt, torch.float32, torch.device("cpu"), slice(1, 2)),
    }
    image, records = plan_of(archive(state))
    names = {region.name for region in of_file(image, records)}
    assert names == {"known", "state_dict.w", "state_dict.p", "optimizer_states.0.state.0.exp_avg"}


class Row(typing.NamedTuple):
    """Of a user's own."""

    first: object
    second: object


class MyDict(dict):
    """Of a user's own."""


class MyList(list):
    """Of a user's own."""


T = torch.ones(2)
CONTAINERS = {
    "defaultdict": (collections.defaultdict(list, {"a": [T]}), "x.a.0"),
    "UserDict": (collections.UserDict({"a": {"b": T}}), "x.a.b"),
    "UserList": (collections.UserList([1, T]), "x.1"),
    "deque": (collections.deque([1, T], maxlen=3), "x.1"),
    "ChainMap": (collections.ChainMap({"a": T}), "x.maps.0.a"),
    "Counter": (collections.Counter({"a": T}), "x.a"),
    "namespace": (types.SimpleNamespace(a=T), "x.a"),
    "namedtuple": (Row(1, T), "x.1"),
    "set": ({T}, "x.0"),
    "frozenset": (frozenset({T}), "x.0"),
    "own dict": (MyDict(a=T), "x.a"),
    "own list": (MyList([1, T]), "x.1"),
    "nested": (collections.defaultdict(dict, {"a": collections.deque([collections.UserDict(b=T)])}), "x.a.0.b"),
    "item": (collections.OrderedDict(a=collections.deque([collections.OrderedDict(b=T)])), "x.a.0.b"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_does_not_hide_its_tensors(kind):
    """Those of Python, and a user's own dicts and lists. Not the attributes of a user's objects."""
    value, name = CONTAINERS[kind]
    image, records = plan_of(archive({"x": value, "again": value}))
    assert [region.name for region in of_file(image, records)] == [name]


def test_a_container_within_itself_is_walked_once():
    """Also one that holds itself in two ways."""
    value = collections.deque([T])
    value.append(collections.defaultdict(list, {"self": value}))
    image, records = plan_of(archive({"x": value}))
    assert [region.name for region in of_file(image, records)] == ["x.0"]


def test_a_sparse_tensor_is_not_looked_at():
    """Its parts are no tensors of the state."""
    image, records = plan_of(archive({"x": torch.eye(3).to_sparse()}))
    assert of_file(image, records) == []


def test_only_the_elements_of_views_are_looked_at():
    """Two views of one storage: the bytes between them are nobody's, and may be anything."""
    storage = torch.full((100,), math.nan)
    first, second = storage[10:20], storage[50:90].view(8, 5)
    first.fill_(1), second.fill_(2)
    image, records = plan_of(archive({"first": first, "second": second.t(), "third": storage[60:60]}))
    found = of_file(image, records)
    scan = Scan(found)
    scan.take(0, image)
    assert scan.sick() == []
    assert scan.facts()["numbers"] == 50
    assert {region.name for region in found} == {"first", "second"}


def test_a_tensor_of_mixed_types_keeps_its_own():
    """One storage under two types is saved as bytes; each tensor is read as what it is."""
    whole = torch.randn(8)
    image, records = plan_of(archive({"floats": whole[:4], "integers": whole.view(torch.int32)[4:]}))
    assert [region[:2] for region in of_file(image, records)] == [("floats", "float32")]


def test_json_and_broken_headers_have_no_regions():
    """JSON, and anything that begins like no safetensors header."""
    for content in (b"", b"{}", b"[1, 2]", b"\x00" * 64, b"\xff" * 64):
        assert of_file(memoryview(content), None) == []


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "complex128", "float8_e4m3fn"])
def test_rows_of_a_tensor_say_its_type_and_bytes(name):
    """For layouts in which we know where each tensor lies."""
    tensor = torch.zeros(3, dtype=getattr(torch, name))
    (row,) = regions.rows_of("t", tensor, 64)
    assert (row.offset, row.length) == (64, 3 * tensor.element_size())
    assert regions.rows_of("t", torch.zeros(3, dtype=torch.int64), 64) == []


ADAM = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": torch.ones(1), "params": [0]}]}
PLACES = {
    "an optimizer": (ADAM, {"state.0.exp_avg": True, "param_groups.0.lr": False}),
    "one within": ({"a": {"b": ADAM}}, {"a.b.state.0.exp_avg": True, "a.b.param_groups.0.lr": False}),
    "beside a model": ({"o": ADAM, "m": {"state": {"w": T + 1}}}, {"o.state.0.exp_avg": True, "m.state.w": False}),
    "within one's state": ({**ADAM, "state": {0: {"deep": {"q": T}}}}, {"state.0.deep.q": True}),
    "in an odd class": (MyDict(ADAM), {"state.0.exp_avg": True, "param_groups.0.lr": False}),
    "a state alone": ({"state": {0: {"exp_avg": T}}}, {"state.0.exp_avg": False}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_of_an_optimizers_state_is_told_from_all_others(place):
    """In an archive it lies below ``state``, beside ``param_groups``; a model's part that is called ``state`` is none."""
    state, expected = PLACES[place]
    image, records = plan_of(archive(state))
    found = {region.name: region.of_optimizer for region in of_file(image, records)}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["state.w.exp_avg", "param_groups.w.lr"], {"state.w.exp_avg"}),
        (["o.state.w.exp_avg", "o.param_groups.w.lr", "m.state.w.x"], {"o.state.w.exp_avg"}),
        (["state.w.exp_avg"], set()),
    ],
)
def test_in_flat_names_an_optimizers_state_is_told_too(names, expected):
    """As in a safetensors file, whose names are paths."""
    image, records = plan_of(safetensors.safetensors_plan("x.safetensors", {name: torch.ones(2) for name in names}))
    assert {region.name for region in of_file(image, records) if region.of_optimizer} == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("state.w.exp_avg", True), ("o.state.w.exp_avg", True), ("net.state.w", False), ("state.w", False), ("w", False)],
)
def test_a_row_is_an_optimizers_by_its_name(name, expected):
    """``state``, a parameter, and what of it: a parameter that is called ``state`` has nothing below what is below it."""
    (row,) = regions.rows_of(name, torch.ones(2), 0)
    assert row.of_optimizer is expected
