"""What comes back is what was saved: beside DTensors as without them, and whatever the state has there at the resume."""

from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.errors import RestoreError

CONFIG = CheckpointConfig(timeouts=QUICK)


class Object:
    """A Stateful of the user's own, whose ``state_dict`` is what it has."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


def saved():
    """Plain data, by what is special about it."""
    return {
        "grew": {"a": {"b": 2}},
        "none": {"a": 1, "t": torch.ones(2)},
        "counter": Counter(a=3, b=1),
        "ordered": OrderedDict(z=1, a=2),
        "emptied": {},
        "empties": {"x": {}, "y": [], "l": [{}, {"a": {}}, torch.ones(1)]},
        "fewer": {"x": 1},
        "shorter": [1],
        "pair": (1, 2),
        "nothing": None,
        "number": 0.5,
        "more": [torch.ones(2), {"n": 3}],
    }


def fresh():
    """The same before a resume."""
    return {
        "grew": {},
        "none": None,
        "counter": Counter(),
        "ordered": OrderedDict(),
        "emptied": {"old": {"er": 1}},
        "empties": 3,
        "fewer": {"x": 0, "gone": 2},
        "shorter": [1, 2, 3],
        "pair": None,
        "nothing": {"a": 1},
        "number": {},
        "more": [torch.zeros(2)],
        "later": 7,
    }


def plain(value):
    """Types and values, in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def _data(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    with Checkpointer(folder, CONFIG) as ckpt:
        whole = torch.arange(4.0)
        part = distribute_tensor(whole, mesh, [Shard(0)])
        ckpt.save(
            1,
            {
                "beside": {"t": part, **saved()},
                "object": Object({"t": part, **saved()}),
                "without": {"t": whole, **saved()},
                "own": Object({"t": whole, **saved()}),
            },
        ).result()
        room, zeros = distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), torch.zeros(4)
        state = {
            "beside": {"t": room, **fresh()},
            "object": Object({"t": room, **fresh()}),
            "without": {"t": zeros, **fresh()},
            "own": Object({"t": zeros, **fresh()}),
        }
        ckpt.resume(state)
    assert state["beside"]["t"] is room
    assert torch.equal(room.full_tensor(), whole)
    found = {name: item.state if isinstance(item, Object) else item for name, item in state.items()}
    for item in found.values():
        del item["t"]
    return {name: plain(item)[1] for name, item in found.items()}


def _list(rank, folder):
    mesh, size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()

    def made(factor):
        parts = [distribute_tensor(factor * torch.arange(4.0), mesh, [Shard(0)]) for _ in range(12)]
        return [*parts, factor, {"deeper": [parts[0], {}]}]

    state = {"history": made(1 if size == 2 else 0)}
    kept, first = state["history"], state["history"][0]
    with Checkpointer(folder, CONFIG) as ckpt:
        if size == 2:
            ckpt.save(1, state).result()
            state["history"] = kept = made(0)
            first = kept[0]
        ckpt.resume(state)
    whole = [one.full_tensor().tolist() for one in [*kept[:12], kept[13]["deeper"][0]]]
    return state["history"] is kept and kept[0] is first, whole, kept[12], kept[13]["deeper"][1]


def test_a_list_of_dtensors_comes_back_in_place(tmp_path):
    """As an item of its own, such as a history of averages, on as many ranks and on fewer."""
    for size in (2, 1):
        for found in values(spawn_ranks(_list, size, str(tmp_path))):
            assert found == (True, [[0.0, 1.0, 2.0, 3.0]] * 13, 1, {})


def test_plain_data_beside_a_dtensor_comes_back_as_it_does_without_one(tmp_path):
    """What grew, shrank, became a mapping or stopped being one, is empty, or a Counter: equal, in a dict and in an object."""
    expected = plain(saved())[1]
    for found in values(spawn_ranks(_data, 2, str(tmp_path))):
        for name, item in found.items():
            assert item.keys() == expected.keys(), name
            for key, value in expected.items():
                assert item[key] == value, (name, key)


class Extra(torch.nn.Linear):
    """A layer that saves what it is told to."""

    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


EXTRAS = {
    "larger": (torch.zeros(0), torch.arange(5)),
    "smaller": (torch.zeros(7), torch.arange(2.0)),
    "grew": ({}, {"a": 1, "b": {"c": 2}}),
    "became a dict": (None, {"scale": torch.ones(2), "n": 1}),
    "counter": (Counter(), Counter(a=2)),
    "emptied": ({"a": 1}, {}),
    "other keys": ({"a": 1, "gone": 2}, {"a": 5}),
    "became a tensor": (None, torch.ones(3)),
    "became None": (torch.ones(3), None),
    "bytes": (b"", b"abc"),
    "empty bytes": (b"abc", b""),
}


def extra_model(which, shard):
    model = torch.nn.Sequential(*(Extra(2, 2) for _ in EXTRAS))
    for part, pair in zip(model, EXTRAS.values(), strict=True):
        part.extra = pair[which]
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _extra_states(rank, folder):
    found = []
    for saves in (True, False):
        with Checkpointer(f"{folder}/{saves}", CONFIG) as ckpt:
            model = extra_model(1, saves)
            ckpt.save(1, {"model": model, "dict": model.state_dict()}).result()
            for shard in (True, False):
                other = extra_model(0, shard)
                raw = other.state_dict()
                ckpt.resume({"model": other})
                ckpt.resume({"dict": raw})
                found.append([plain(part.extra) for part in other])
                found.append([plain(raw[f"{number}._extra_state"]) for number in range(len(EXTRAS))])
    return found


def test_an_extra_state_comes_back_whatever_the_fresh_one_is(tmp_path):
    """Of another size, kind or structure, into a module and into its state dict, sharded or not when saved or resumed."""
    expected = [plain(after) for _, after in EXTRAS.values()]
    for found in values(spawn_ranks(_extra_states, 2, str(tmp_path))):
        for number, values_found in enumerate(found):
            for name, value, wanted in zip(EXTRAS, values_found, expected, strict=True):
                assert value == wanted, (number, name)


# ---------------------------------------------------------------- nothing is applied before all fits


def two_layers(width=4, *, shard=True, names=("a", "b")):
    model = torch.nn.Sequential(OrderedDict((name, torch.nn.Linear(4, width)) for name in names))
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.25)


def numbers(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


ALONE = {"tensor", "type", "lost", "module", "names", "kind", "groups", "shapes"}
"""What does not fit on rank 1 alone."""


def _misfit(rank, folder):
    """Each item fits but the last, or but one on rank 1: whatever it is, the others keep what they had."""
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = two_layers()
    plain_model, plain_optimizer = two_layers(shard=False)
    for one in (model, plain_model):
        one(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    plain_optimizer.step()
    part = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    goods = {"n": 1, "d": {"t": torch.ones(2), "x": 1}, "t": torch.ones(3), "w": {"t": part, "n": 1}}
    goods |= {"model": plain_model, "optimizer": plain_optimizer, "sharded": model, "steps": optimizer}
    found = {}
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, goods).result()
        kept = two_layers()[0]
        room = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        bads = {
            "tensor": {"t": torch.zeros(4)},
            "type": {"d": {"t": torch.zeros(2).double()}},
            "lost": {"d": {"t": torch.zeros(2), "u": torch.zeros(1)}},
            "module": {"model": two_layers(5, shard=False)[0]},
            "names": {"model": two_layers(shard=False, names=("a", "c"))[0]},
            "kind": {"n": two_layers(shard=False)[0]},
            "groups": {"optimizer": torch.optim.AdamW(list(kept.parameters())[:1])},
            "shapes": {"optimizer": torch.optim.AdamW(two_layers(5, shard=False)[0].parameters())},
            "dtensor": {"w": {"t": distribute_tensor(torch.zeros(6), mesh, [Shard(0)])}},
            "dtensor's type": {"w": {"t": distribute_tensor(torch.zeros(4).half(), mesh, [Shard(0)])}},
            "sharded module": {"sharded": two_layers(6)[0]},
            "sharded names": {"sharded": two_layers(names=("a", "c"))[0]},
        }
        other, other_steps = two_layers(names=("a",))
        bads["sharded groups"] = {"sharded": other, "steps": other_steps}
        for what, wrong in bads.items():
            bad, fits = wrong, {"w": {"t": room, "n": 0}, "d": {"t": torch.zeros(2), "x": 0}, "sharded": kept}
            fits["model"] = plain_model
            before = [numbers(value).clone() for value in kept.state_dict().values()]
            with torch.no_grad():
                plain_model.a.weight.fill_(7.0)
            if rank == 0 and what in ALONE:
                bad = {name: goods[name] for name in wrong}
            state = {**fits, **bad}
            try:
                ckpt.resume(state)
                found[what] = "resumed"
            except RestoreError as error:
                found[what] = str(error)
            same = all(map(torch.equal, before, map(numbers, kept.state_dict().values())))
            same = same and not room.full_tensor().any() and float(plain_model.a.weight.mean()) == 7.0
            same = same and not any(
                isinstance(v, dict) and (v.get("n") == 1 or v.get("x") == 1) for n, v in fits.items()
            )
            found[what] += "" if same else " and something was applied"
    return found


def test_nothing_is_applied_on_any_rank_where_one_item_does_not_fit_on_one(tmp_path):
    """Names, shapes and types of all items on all ranks come first: tensors, dicts, modules, optimizers, sharded or not."""
    for found in values(spawn_ranks(_misfit, 2, str(tmp_path))):
        for what, text in found.items():
            assert text.startswith("cannot restore state["), (what, text)
            assert "and something was applied" not in text, (what, text)


def test_stock_dcp_reads_the_plain_data_too(tmp_path):
    """``dcp.load`` finds each entry under the name that it has in DCP."""
    values(spawn_ranks(_data, 2, str(tmp_path)))
    state = {"t": torch.zeros(4), "grew": {"a": {"b": 0}}, "counter": Counter(a=0), "pair": None, "emptied": {}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"beside": state}, storage_reader=dcp.FileSystemReader(tmp_path / "step-00000001"), no_dist=True)
    assert state["t"].tolist() == [0, 1, 2, 3]
    assert (state["grew"], state["counter"]["a"], state["pair"]) == ({"a": {"b": 2}}, 3, (1, 2))
