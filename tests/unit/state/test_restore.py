"""Putting loaded items back: what is compared before, and what an object that refuses leaves behind."""

from collections import Counter
from types import MappingProxyType

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
