"""The same process goes back to a save: what has changed since, in any container, is as it was then, and in its place."""

import copy
from collections import OrderedDict, UserList, defaultdict, deque

import pytest
import torch

from kit.states import same
from safe_ckpt import Checkpointer
from safe_ckpt.errors import StateError
from safe_ckpt.testing import inline_saves


def t(value, size=2):
    return torch.full((size,), float(value))


CONTAINERS = {
    "list": lambda: [1, 2, 3],
    "list of lists": lambda: [[1, 2], [3]],
    "list of tensors": lambda: [t(1), t(2)],
    "list of dicts": lambda: [{"a": 1}, {"b": [2]}],
    "dict": lambda: {"a": 1, "b": 2},
    "dict of lists": lambda: {"a": [1], "b": [2, 3]},
    "dict of tensors": lambda: {"a": t(1), "b": t(2)},
    "keys that are numbers": lambda: {1: [1], 2: [2]},
    "ordered": lambda: OrderedDict(b=[1], a=[2]),
    "tuple with lists": lambda: ([1], {"a": [2]}),
}


def containers_of(value):
    """Every container in it that can change, itself first."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [
        *([value] if isinstance(value, dict | list) else []),
        *(one for part in inner for one in containers_of(part)),
    ]


def grow(one):
    """By plain data: a tensor of which the checkpoint has nothing is refused by name."""
    if isinstance(one, list):
        one += [99, [98], {"a": 97}]
    else:
        one["later"] = [96]


def shrink(one):
    """Of tensors none may be missing: a resume refuses that by name."""
    for key in [key for key in (list(one) if isinstance(one, dict) else [-1] * len(one)) if not has_tensors(one[key])]:
        del one[key]


def has_tensors(value):
    return isinstance(value, torch.Tensor) or any(map(has_tensors, parts_of(value)))


def parts_of(value):
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def replace_all(one):
    for key in one if isinstance(one, dict) else range(len(one)):
        one[key] = one[key] + 5 if isinstance(one[key], torch.Tensor | int) else one[key]


CHANGES = {"grew": grow, "shrank": shrink, "was replaced": replace_all, "stayed": lambda one: None}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_going_back_gives_what_was_saved_whatever_changed_since(tmp_path, make, change):
    """At each depth, twice in a row, also at an item's top: nothing of the abandoned future stays, and the outermost container
    is the same object.
    """
    state = {"deep": {"inner": make(), "w": t(0)}, "top": make()}
    saved = copy.deepcopy(state)
    with inline_saves(), Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
        for _ in range(2):
            before = {name: state[name] for name in state}
            for one in containers_of(state["deep"]["inner"]) + containers_of(state["top"]):
                change(one)
            assert ckpt.resume(state).step == 1
            same(state["deep"], saved["deep"])
            same(state["top"], saved["top"])
            kept = [name for name in state if isinstance(before[name], dict | list)]
            assert all(state[name] is before[name] for name in kept)


@pytest.mark.parametrize("kind", [list, UserList])
@pytest.mark.parametrize("now", [0, 1, 3, 9])
@pytest.mark.parametrize("then", [0, 1, 3])
def test_a_sequence_has_the_length_that_was_saved(kind, then, now):
    """However long it is by now: ``restore_into`` itself, of each kind that can change."""
    from safe_ckpt.core.state.items import restore_into

    target, loaded = kind([10 + n for n in range(now)]), list(range(then))
    assert restore_into(target, loaded) is target
    assert list(target) == loaded


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda given: defaultdict(list, given)])
@pytest.mark.parametrize("now", [{}, {"a": 5}, {"a": 5, "x": 6, "y": 7}])
def test_a_mapping_has_the_keys_that_were_saved(kind, now):
    """The same of mappings."""
    from safe_ckpt.core.state.items import restore_into

    target, loaded = kind(now), {"a": 1, "b": 2}
    assert restore_into(target, loaded) is target
    assert dict(target) == loaded


def test_what_cannot_be_saved_in_place_is_told_at_the_save(tmp_path):
    """A kind of sequence that no file can have is refused by name, rather than saved as another."""
    with inline_saves(), Checkpointer(tmp_path) as ckpt, pytest.raises(StateError, match="history"):
        ckpt.save(1, {"history": deque([1, 2])}).result()
