"""Rank 0 saves alone what every rank holds: what another rank holds besides, or instead, is refused by name."""

import pytest
import torch

from safe_ckpt.core.state.items import Restoring, items_of
from safe_ckpt.core.state.planner import Planner, held_by_this_rank, refuse_unsaved
from safe_ckpt.errors import DesyncError, RestoreError


def two(**changed):
    return {"a": torch.zeros(2), "b": torch.zeros(3), **changed}


def optimizer(*sizes):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(sum(sizes))]
    groups = [{"params": [parameters.pop() for _ in range(size)]} for size in sizes]
    return torch.optim.SGD(groups, lr=0.1)


def of_ranks(*values):
    """What each rank says of an item, which is asked on every rank for its own value."""
    return {
        rank: {one.name: held_by_this_rank(one, one.state()) for one in items_of({"x": value})}
        for rank, value in enumerate(values)
    }


REFUSED = {
    "another shape": (two(), two(b=torch.zeros(4))),
    "another type": (two(), two(b=torch.zeros(3, dtype=torch.int64))),
    "another name": (two(), {"a": torch.zeros(2), "c": torch.zeros(3)}),
    "one tensor more": (two(), two(c=torch.zeros(1))),
    "one tensor less": (two(), {"a": torch.zeros(2)}),
    "tensors where rank 0 has none": ({"n": 1}, two()),
    "another kind": (two(), torch.zeros(2)),
    "a module for its state": (torch.nn.Linear(2, 2).state_dict(), torch.nn.Linear(2, 2)),
    "something where rank 0 has nothing": (None, {"n": 1}),
    "a name of its rank": ({"rank0": 1}, {"rank1": 1}),
    "a name of its rank, deeper": ({"seen": {"dp_rank_0": 1}}, {"seen": {"dp_rank_1": 1}}),
    "parameters in other groups": (optimizer(2, 1), optimizer(1, 2)),
    "the last of three alone": (two(), two(), two(b=torch.zeros(4))),
    "the last of three, behind one that holds nothing": (two(), None, two(b=torch.zeros(4))),
}
SAVED = {
    "other values": (two(), two(b=torch.ones(3))),
    "another order": (two(), {"b": torch.zeros(3), "a": torch.zeros(2)}),
    "other numbers": ({"n": 1, "rate": 0.5}, {"n": 2, "rate": 0.25}),
    "nothing on another rank": (two(), None),
    "an empty one on another rank": (two(), {}),
    "numbers where rank 0 has tensors": (two(), {"n": 1}),
    "nothing anywhere": (None, {}),
    "all names of ranks on rank 0": ({"rank0": 1, "rank1": 1}, {"rank1": 1}),
    "names of ranks on all": ({"rank0": 1, "rank1": 1}, {"rank0": 2, "rank1": 2}),
    "names of more ranks than are looked at": (
        {f"rank{n}": n for n in range(80)},
        {f"rank{n}": n for n in range(1, 81)},
    ),
    "groups of as many parameters": (optimizer(2, 1), optimizer(2, 1)),
}


@pytest.mark.parametrize("values", REFUSED.values(), ids=REFUSED)
def test_what_another_rank_holds_and_rank_0_does_not_is_refused(values):
    """It would be lost. The error names the item and says what each rank holds."""
    with pytest.raises(DesyncError) as caught:
        refuse_unsaved(of_ranks(*values))
    assert caught.value.what == "state['x']"
    assert caught.value.values.keys() == {str(rank) for rank in range(len(values))}


@pytest.mark.parametrize("values", SAVED.values(), ids=SAVED)
def test_what_rank_0_may_say_for_all_is_not_refused(values):
    """Values, and a rank that holds nothing: rank 0 saves its own."""
    refuse_unsaved(of_ranks(*values))


def test_the_first_item_that_differs_is_named_and_each_rank_told_apart():
    """Of several items, the one that differs; what it says of each rank shows which tensor."""
    by_rank = {}
    for rank, last in enumerate((torch.zeros(3), torch.zeros(4))):
        state = {"same": two(), "own": two(b=last), "later": two(b=last)}
        by_rank[rank] = {one.name: held_by_this_rank(one, one.state()) for one in items_of(state)}
    with pytest.raises(DesyncError) as caught:
        refuse_unsaved(by_rank)
    assert caught.value.what == "state['own']"
    said = caught.value.values
    assert said["0"] != said["1"]
    assert all(text.startswith("data with 2 names, such as ('a',) torch.float32 (2,)") for text in said.values())


@pytest.mark.parametrize("value", [two(), {"n": 1}, torch.nn.Linear(2, 2)], ids=["tensors", "data", "a module"])
def test_what_is_planned_as_before_is_compared_again(value):
    """A rank says at each save what it holds, also of an item that has not changed since."""
    planner = Planner(1)
    first, again = (planner.plan(items_of({"x": value})).held for _ in range(2))
    assert first.keys() == {"x"}
    assert again == first


def test_names_that_no_rank_has_a_place_for_are_refused_with_the_checkpoint_and_the_item(tmp_path):
    """Where one rank has a place, nothing is wrong; else the error names the checkpoint, the item and the names."""
    restoring = Restoring({}, {}, tmp_path / "step-00000001")
    said = {"m": {"besides": ["a", "b"], "refusal": "there is no place for"}}
    assert restoring.agree({0: said, 1: {}}) == {"m": []}
    with pytest.raises(RestoreError, match=r"there is no place for \['b'\]") as caught:
        restoring.agree({0: said, 1: {"m": {"besides": ["b"], "refusal": ""}}})
    assert (caught.value.path, caught.value.key) == (str(tmp_path / "step-00000001"), "state['m']")
    assert restoring.agree({0: {"m": {**said["m"], "refusal": ""}}, 1: said}) == {"m": ["a", "b"]}
