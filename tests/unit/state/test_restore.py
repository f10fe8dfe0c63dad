"""Putting loaded items back: what is compared before, and what an object that refuses leaves behind."""

from collections import Counter
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.errors import RestoreError

CONFIG = CheckpointConfig(timeouts=QUICK)


class Migrates(torch.nn.Linear):
    """Loads what an earlier version of it saved under another name."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}bias"] = state_dict.pop(f"{prefix}shift")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Renames(torch.nn.Linear):
    """Loads its state through a hook, from other names."""

    def __init__(self, *args):
        super().__init__(*args)
        self._register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(state_dict, prefix, *_):
        for name in ("weight", "bias"):
            if f"{prefix}old_{name}" in state_dict:
                state_dict[prefix + name] = state_dict.pop(f"{prefix}old_{name}")


class Picky:
    """Refuses its state when it gets it."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise KeyError("mine")


@pytest.fixture
def saved(tmp_path):
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        old = torch.nn.Module()
        old.weight, old.shift = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        renamed = {"old_weight": torch.ones(2, 2), "old_bias": torch.ones(2)}
        counts = {"c": Counter(a=2), "scale._extra_state": torch.ones(3)}
        state = {"old": old, "renamed": renamed, "model": model, "optimizer": optimizer, "n": 1, "d": counts}
        ckpt.save(1, {**state, "picky": Picky(), "half": model}).result()
        yield ckpt


def test_modules_that_load_in_their_own_way_are_left_to_it(saved):
    """An earlier version's names, a hook's names, another type of number: compared by the module itself."""
    migrates, renames, half = Migrates(2, 2), Renames(2, 2), torch.nn.Linear(2, 2).half()
    saved.resume({"old": migrates, "renamed": renames, "half": half})
    assert migrates.bias.tolist() == renames.bias.tolist() == [1, 1]
    assert half.weight.dtype == torch.float16


@pytest.mark.parametrize(
    "misfit",
    [
        {"model": torch.nn.Linear(2, 3)},
        {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))},
        {"model": torch.nn.Linear(2, 2, bias=False)},
        {"n": torch.nn.Linear(2, 2)},
        {"optimizer": torch.optim.SGD(torch.nn.Linear(2, 2, bias=False).parameters())},
    ],
    ids=["shape", "name", "fewer", "kind", "groups"],
)
def test_an_item_that_does_not_fit_is_found_before_any_is_applied(saved, misfit):
    """The item before it keeps what it had, and the error names the one that does not fit."""
    first = {"c": Counter(a=1)}
    state = {"d": first, **misfit}
    with pytest.raises(RestoreError, match=next(iter(misfit))):
        saved.resume(state)
    assert first == {"c": Counter(a=1)}


def test_a_read_only_state_is_refused_before_anything_is_applied(saved):
    """A number in it could not be replaced."""
    first = {"c": Counter(a=1)}
    with pytest.raises(RestoreError, match="read-only"):
        saved.resume(MappingProxyType({"d": first, "n": 0}))
    assert first == {"c": Counter(a=1)}


def test_a_mapping_keeps_the_order_that_it_has(tmp_path):
    """The order is the program's, as in a zip with its parameters; what the mapping had not comes behind, as it was saved."""
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"d": {name: torch.full((2,), ord(name)) for name in "wxyz"}}).result()
        state = {"d": {name: torch.zeros(2, dtype=torch.int64) for name in "ywx"}}
        ckpt.resume(state)
    assert [(name, chr(tensor[0])) for name, tensor in state["d"].items()] == [(name, name) for name in "ywxz"]


def test_an_object_that_refuses_is_told_with_what_was_applied_before(saved):
    """Only it knows before it gets its state."""
    state = {"n": 0, "picky": Picky()}
    with pytest.raises(RestoreError, match=r"mine.*Applied before: n\.") as caught:
        saved.resume(state)
    assert caught.value.key == "state['picky']"
    assert state["n"] == 1


def test_a_dict_takes_an_extra_state_of_another_size(saved):
    """As a module does."""
    state = {"d": {"c": Counter(), "scale._extra_state": torch.zeros(1)}}
    saved.resume(state)
    assert state["d"]["scale._extra_state"].tolist() == [1, 1, 1]
    assert state["d"]["c"] == Counter(a=2)


class Extra(torch.nn.BatchNorm1d):
    """Has an extra state of empty bytes, and loads with the version of its class."""

    found = None

    def get_extra_state(self):
        return b""

    def set_extra_state(self, state):
        assert state == b""

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.found = local_metadata
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_empty_bytes_in_an_extra_state_leave_the_versions_of_the_classes(tmp_path):
    """``load_state_dict`` migrates by them."""
    module = Extra(2)
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"m": torch.nn.Sequential(module)}).result()
        ckpt.resume({"m": torch.nn.Sequential(module)})
    assert module.found == {"version": 2}


class Pair(NamedTuple):
    """A tuple whose fields have names."""

    weight: torch.Tensor
    count: int


def test_tensors_in_tuples_are_restored_in_place(tmp_path):
    """As those in lists are, at any depth, in a tuple, a named tuple, and a list where a tuple was saved."""
    one, two, three, four, five = (torch.full((2,), float(n)) for n in range(1, 6))
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"pair": (one, 7), "deep": {"in": [(two, {"w": three}), 8]}, "named": (four, 9), "list": (five,)})
        own = {name: torch.zeros(2) for name in ("one", "two", "three", "four", "five")}
        kept = (own["two"], {"w": own["three"]})
        state = {
            "pair": (own["one"], 0),
            "deep": {"in": [kept, 0]},
            "named": Pair(own["four"], 0),
            "list": [own["five"]],
        }
        ckpt.resume(state)
    assert [tensor.tolist() for tensor in own.values()] == [[n, n] for n in range(1, 6)]
    assert state["pair"][0] is own["one"]
    assert state["pair"][1] == 7
    assert state["deep"]["in"][0] is kept
    assert state["deep"]["in"][1] == 8
    assert type(state["named"]) is Pair
    assert state["named"].weight is own["four"]
    assert state["named"].count == 9
    assert state["list"] == [own["five"]]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"n": torch.zeros(1)}, "['n']: it is a tensor, the checkpoint has int"),
        ({"n": [torch.zeros(1)]}, "['n']: it is list with tensors, the checkpoint has int"),
        ({"pair": (torch.zeros(3), 0)}, "['pair'][0]: it is (3,)"),
        ({"pair": {"w": torch.zeros(2)}}, "['pair']: it is dict with tensors, the checkpoint has tuple"),
        ({"pair": (torch.zeros(2), 0, torch.zeros(2))}, "['pair']: the checkpoint has nothing for the tensors [2]"),
        ({"pair": (torch.zeros(2), torch.zeros(2))}, "['pair'][1]: it is a tensor, the checkpoint has int"),
        ({"new": {"w": torch.zeros(2)}}, "nothing for the tensors ['new']"),
        ({"triple": Pair(torch.zeros(2), 0)}, "['triple']: it is a Pair, the checkpoint has 3 values"),
    ],
)
def test_a_tensor_that_nothing_is_restored_into_is_an_error_by_name(tmp_path, target, words):
    """It is not replaced without a word: whoever else has it would keep what it was. Nothing else is changed either."""
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        triple = (torch.ones(2), 1, 2)
        ckpt.save(1, {"first": {"a": 1}, "d": {"n": 3, "pair": (torch.ones(2), 5), "triple": triple}}).result()
        first = {"a": 0}
        with pytest.raises(RestoreError) as caught:
            ckpt.resume({"first": first, "d": target})
        assert words in str(caught.value)
        assert first == {"a": 0}
        free = {"d": {"n": None, "pair": None}}
        ckpt.resume(free)
        assert free["d"]["n"] == 3
        assert free["d"]["pair"][0].tolist() == [1, 1]


def nested(depth, leaf):
    """A list that lies twice in a list, which lies twice in a list, and so on."""
    for _ in range(depth):
        leaf = [leaf, leaf]
    return leaf


@pytest.mark.timeout(60)
@pytest.mark.parametrize("leaf", [[1], [torch.ones(2)]], ids=["numbers", "tensors"])
def test_lists_that_lie_in_several_places_are_walked_once(tmp_path, leaf):
    """Sixty lists, each twice in the next, are saved and restored at once, as one list in two places, and into such lists."""
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"d": nested(60, leaf), "empty": [nested(60, leaf), b""]}).result()
        state, own = {"d": None, "empty": None}, {"d": nested(60, list(leaf))}
        ckpt.resume(state)
        ckpt.resume(own)
    for found in (state["d"], own["d"], state["empty"][0]):
        assert found[0] is found[1]
        inner = found
        while isinstance(inner[0], list):
            inner = inner[0]
        assert torch.equal(torch.as_tensor(inner[0]), torch.as_tensor(leaf[0]))


@pytest.mark.parametrize("value", [1, torch.ones(2)], ids=["number", "tensor"])
def test_a_list_or_dict_within_itself_comes_back_within_itself(tmp_path, value):
    """Also into one that is within itself."""
    loop, named = [value], {"value": value}
    loop.append(loop)
    named["itself"] = named
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"loop": loop, "named": named}).result()
        for state in ({"loop": None, "named": None}, {"loop": loop, "named": named}):
            ckpt.resume(state)
            assert state["loop"][1] is state["loop"]
            assert state["named"]["itself"] is state["named"]
            assert torch.equal(torch.as_tensor(state["loop"][0]), torch.as_tensor(value))
