"""Plans as plain data: they come back as they were, and what is no plan is refused by name, whatever it is."""

import contextlib
import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from safe_ckpt.core.sharding import plan_data
from safe_ckpt.errors import StateError

NAMES = st.text(max_size=30)
SIZES = st.lists(st.integers(0, 1 << 12), max_size=4)


def over_the_wire(plan, rank=1):
    return plan_data.plan_from_json(json.loads(json.dumps(plan_data.plan_to_json(plan))), rank=rank)


def planned(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


@st.composite
def items(draw):
    name = draw(NAMES)
    kind = draw(st.sampled_from(list(WriteItemType)))
    if kind == WriteItemType.BYTE_IO:
        return WriteItem(index=MetadataIndex(name), type=kind)
    whole = draw(SIZES)
    offsets = [draw(st.integers(0, most)) for most in whole]
    sizes = [draw(st.integers(0, most - at)) for at, most in zip(offsets, whole, strict=True)]
    properties = TensorProperties(
        dtype=draw(st.sampled_from(list(plan_data._NAMED["dtype"][1].values()))),
        layout=draw(st.sampled_from(list(plan_data._NAMED["layout"][1].values()))),
        requires_grad=draw(st.booleans()),
        memory_format=draw(st.sampled_from(list(plan_data._NAMED["memory_format"][1].values()))),
        pin_memory=draw(st.booleans()),
    )
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(whole))
    hint = draw(st.none() | st.integers(0, 1000))
    return WriteItem(index=MetadataIndex(name, torch.Size(offsets), hint), type=kind, tensor_data=data)


PATHS = st.dictionaries(NAMES, st.lists(NAMES | st.integers(0, 99), max_size=4).map(tuple), max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(items(), max_size=6), st.none() | PATHS)
def test_any_plan_comes_back_as_it_was(rows, paths):
    """Tensors, shards and objects of every type, names and paths: equal, their hints and every property included."""
    plan = SavePlan(rows, planner_data=paths)
    found = over_the_wire(plan)
    assert found == plan
    assert [item.index.index for item in found.items] == [item.index.index for item in plan.items]
    assert [item.index.offset for item in found.items] == [item.index.offset for item in plan.items]


def test_a_plan_of_torchs_planner_comes_back_as_it_was():
    """Nested mappings, lists, scalars, empty and zero-dimensional tensors, objects; with their flattened names."""
    state = {
        "model": {"w": torch.ones(3, 4), "s": torch.tensor(1.5)},
        "list": [1, {"a": torch.empty(0, 2)}],
        "text": "x",
    }
    plan = planned(state)
    found = over_the_wire(plan)
    assert found == plan
    assert found.planner_data == dict(plan.planner_data)
    assert DefaultSavePlanner().create_global_plan([found])[1] == DefaultSavePlanner().create_global_plan([plan])[1]


def test_every_type_of_tensor_has_a_name():
    """What torch can save has an entry in the table, under the name that it prints."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert found - set(plan_data._NAMED["dtype"][1].values()) == set()
    assert all(str(value) in (f"torch.{name}", str(value)) for name, value in plan_data._NAMED["dtype"][1].items())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_json_that_is_no_plan_is_refused_by_name(data):
    """Any JSON instead of a plan, or somewhere in one: a StateError of the rank that told it, nothing else."""
    good = plan_data.plan_to_json(planned({"w": torch.ones(2, 3), "n": 1}))
    hostile = [data, [data, *good[1:]], [good[0], data, good[2]], [[data], *good[1:]]]
    hostile += [[[put(good[0][0], path, data)], *good[1:]] for path in places(good[0][0])]
    for one in hostile:
        with contextlib.suppress(StateError):
            plan_data.plan_from_json(one, rank=3)


def places(row, path=()):
    """The path of each fact in a row, and of each row in it."""
    for at, fact in enumerate(row):
        yield (*path, at)
        if isinstance(fact, list):
            yield from places(fact, (*path, at))


def put(row, path, value):
    """A row with another fact at a path; a number beyond its end appends it."""
    if not path:
        return value
    inner = row[path[0]] if path[0] < len(row) else None
    return [*row[: path[0]], put(inner, path[1:], value), *row[path[0] + 1 :]]


OFFSET, HINT, KIND, LENGTH, TENSOR = (0, 1), (0, 2), (1,), (2,), (3,)
AT, SIZES_OF, WHOLE, PROPERTIES = (3, 0, 0), (3, 0, 1), (3, 2), (3, 1)
DTYPE, LAYOUT, TRAINED, FORMAT = ((*PROPERTIES, at) for at in range(4))


def one_entry(path=(), value=None):
    properties = ["float32", "strided", False, "contiguous_format", False]
    row = [["w", [0, 0], None], "SHARD", None, [[[0, 0], [2, 4]], properties, [4, 4]]]
    return [[put(row, path, value) if path else row], None, True]


@pytest.mark.parametrize(
    "data",
    [
        one_entry(KIND, "EXECUTE"),
        one_entry(KIND, "BYTE_IO"),
        one_entry(TENSOR, None),
        one_entry((0, 0), 7),
        one_entry((0, 0), "n" * (1 << 17)),
        one_entry((0,), None),
        one_entry(OFFSET, [-1, 0]),
        one_entry(OFFSET, [True, 0]),
        one_entry(OFFSET, [0.0, 0]),
        one_entry(HINT, -1),
        one_entry(LENGTH, "1"),
        one_entry(LENGTH, ["1"]),
        one_entry(DTYPE, "__class__"),
        one_entry(DTYPE, "load"),
        one_entry(LAYOUT, "float32"),
        one_entry(TRAINED, 1),
        one_entry(FORMAT, "strided"),
        one_entry(WHOLE, [1] * 65),
        one_entry(WHOLE, [1 << 63, 4]),
        one_entry(WHOLE, [1 << 40, 1 << 40]),
        one_entry(AT, [3, 0]),
        one_entry(SIZES_OF, [2]),
        [*one_entry(), {"planner": "x"}],
        [*one_entry(), {}, {}],
        [[], None],
        [[], {"a": ["x", -1]}, True],
        [[], {"a": "xyz"}, True],
        [[], [], True],
        [[["a", "BYTE_IO"]], None, True],
        [[[["a", None, None], "BYTE_IO"]], None, True],
    ],
)
def test_plans_with_values_out_of_bounds_are_refused(data):
    """Unknown kinds, types and fields, numbers and lengths out of range, parts that lie outside: refused."""
    with pytest.raises(StateError) as caught:
        plan_data.plan_from_json(data, rank=2)
    assert caught.value.rank == 2
    assert len(str(caught.value)) < 1000
    plan_data.plan_from_json(one_entry(), rank=2)


def test_lengths_and_choices_are_checked_against_the_plan():
    """Lengths for just the objects of the plan, entries that exist, in their order."""
    plan = planned({"a": torch.ones(2), "b": "object", "c": torch.ones(3)})
    number = next(n for n, item in enumerate(plan.items) if item.type == WriteItemType.BYTE_IO)
    assert plan_data.lengths_from_json({str(number): 7}, plan, rank=1) == {number: 7}
    for bad in ({}, {"9": 1}, {str(number): -1}, {str(number): "7"}, {str(number): 1, "99": 2}, [7], None):
        with pytest.raises(StateError):
            plan_data.lengths_from_json(bad, plan, rank=1)
    assert plan_data.kept_from_json([0, 2], plan, rank=1) == [0, 2]
    for bad in ([3], [-1], [1, 0], [0, 0], ["0"], {"0": 0}, [True], [0, 1, 2, 2]):
        with pytest.raises(StateError):
            plan_data.kept_from_json(bad, plan, rank=1)


def test_a_plan_with_storage_data_is_refused_on_its_rank():
    """Storage data, which only a writer of another kind makes, is an error, not dropped."""
    with pytest.raises(StateError, match="storage_data"):
        plan_data.plan_to_json(SavePlan([], storage_data=object()))


@dataclasses.dataclass
class NewerProperties(TensorProperties):
    """Those of a release to come."""

    order: tuple[int, ...] | None = None
    kind: torch.dtype | None = None
    facts: object = None
    strange: object = None


def newer_plan(**facts):
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([2]))
    data = TensorWriteData(chunk=chunk, properties=NewerProperties(**facts), size=torch.Size([2]))
    index = MetadataIndex("w", torch.Size([0]))
    return SavePlan([WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)])


def test_unknown_plain_fields_of_a_newer_torch_come_back_as_they_were(monkeypatch):
    """A field that is not known here arrives as it was: numbers, text, rows, mappings, sizes, types."""
    monkeypatch.setattr(metadata, "TensorProperties", NewerProperties)
    facts = {"a": [1, None, 2.5], "b": (torch.Size([3]), torch.strided, True), "c": {"d": torch.channels_last}}
    plan = newer_plan(order=(4, 1), kind=torch.int8, facts=facts)
    found = over_the_wire(plan)
    assert found == plan
    assert type(found.items[0].tensor_data.properties.facts["b"][0]) is torch.Size


def test_an_unknown_field_with_an_object_gets_its_default_and_one_warning(monkeypatch, caplog):
    """A new field with an object of some class in it does not stop a save."""
    monkeypatch.setattr(metadata, "TensorProperties", NewerProperties)
    monkeypatch.setattr(plan_data, "_reported", set())
    plan = newer_plan(order=(4, 1), strange=object())
    assert over_the_wire(plan) == over_the_wire(plan) == newer_plan(order=(4, 1))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "TensorProperties.strange" in said


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": 1},
        {"unheard_of": 1},
        {"order": {"dtype": "load"}},
        {"order": {"tuple": 3}},
        {"order": {"size": ["a"]}},
        {"order": {"eval": ["a"]}},
        {"order": {"tuple": [], "list": []}},
        {"order": 1 << 80},
        {"order": [1]},
        [1],
    ],
)
def test_further_fields_are_checked_like_the_others(more, monkeypatch):
    """Classes, fields and values that are none of torch's plans are refused by name, on the rank that told them."""
    monkeypatch.setattr(metadata, "TensorProperties", NewerProperties)
    data = one_entry((*PROPERTIES, 5), more)
    with pytest.raises(StateError) as caught:
        plan_data.plan_from_json(data, rank=2)
    assert caught.value.rank == 2


def test_no_source_unpickles_what_came_through_a_store():
    """Pickles are read from checkpoints alone, by the readers that run nothing in them."""
    from pathlib import Path

    import safe_ckpt

    home = Path(safe_ckpt.__file__).parent
    reading = {
        file.relative_to(home).as_posix()
        for file in home.rglob("*.py")
        if "pickle.load" in (text := file.read_text(encoding="utf-8")) or "Unpickler" in text
    }
    allowed = {"core/formats/pickles.py", "tools/inspection/pickle_reader.py"}
    assert reading == {*allowed, "extensions/health/regions.py"}  # in a file of this process's own
