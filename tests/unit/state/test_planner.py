"""What is as it was at the save before is not planned again, and whatever has changed is."""

import collections
import copy
import math
import threading

import pytest
import torch

from kit.inside import copy_after
from safe_ckpt import CheckpointConfig, Checkpointer, RngState
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.core.state import planner as planning
from safe_ckpt.core.state.items import PerRank, items_of
from safe_ckpt.core.state.planner import Planner


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


def trained(net, optimizer, seed=0):
    torch.manual_seed(seed)
    net(torch.randn(4, 6, dtype=next(net.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fresh():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    trained(net, optimizer)
    data = {"w": torch.randn(5), "deep": {"v": torch.randn(2, 3)}, "rate": 0.5, "count": 3, "on": True}
    return {"net": net, "optimizer": optimizer, "data": data, "own": PerRank({"t": torch.randn(3)})}


@pytest.fixture
def planned(monkeypatch):
    """The names that were planned."""
    names, original = [], planning.plan_item

    def note(item, *args, **options):
        names.append(item.name)
        return original(item, *args, **options)

    monkeypatch.setattr(planning, "plan_item", note)
    return names


Z = torch.tensor([1 + 2j, 3 - 4j])


def flat(value, path=""):
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for n, inner in enumerate(value) for k, v in flat(inner, f"{path}/{n}").items()}
    return {path: value}


def assert_same(one, other):
    one, other = flat(one), flat(other)
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
            one_dense, other_dense = (tensor.detach().to_dense() for tensor in (value, other[name]))
            assert one_dense.equal(other_dense), name
        else:
            assert type(value) is type(other[name]), name
            assert repr(value) == repr(other[name]), name  # also of numbers that are none


def whole(state):
    found = {}
    for name, value in state.items():
        inner = value.value if isinstance(value, PerRank) else value
        found[name] = copy.deepcopy(inner.state_dict() if hasattr(inner, "state_dict") else inner)
    return found


def loaded(folder, step):
    """What the files hold, read by torch and safetensors alone."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted((folder / catalog.step_name(step)).iterdir()):
        if file.suffix == ".safetensors":
            found[file.stem.partition(".")[0]] = load_file(file)
        elif file.suffix == ".pt":
            found[file.stem.partition(".")[0]] = torch.load(file, weights_only=True)
    return found


def values_only(state):
    for parameter in state["net"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    state["data"]["w"].add_(1)
    state["net"].norm.running_mean.add_(1)


def floats(state):
    state["optimizer"].param_groups[0]["lr"] = 0.05
    state["optimizer"].param_groups[0]["betas"] = (0.8, math.nan)
    state["data"]["rate"] = -0.0


UNCHANGED = {"values": values_only, "floats": floats, "nothing": lambda state: None}


@pytest.mark.parametrize("snapshot", ["eager", "overlapped"])
@pytest.mark.parametrize("change", UNCHANGED)
def test_an_item_with_the_same_tensors_is_not_planned_again(tmp_path, planned, change, snapshot):
    """New values, a new learning rate, a number that is none: the known plan holds them, to the bit, save after save."""
    state = fresh()
    with Checkpointer(tmp_path, CheckpointConfig(snapshot=snapshot)) as ckpt:
        ckpt.save(1, state).result(60)
        assert set(planned) == set(state)
        planned.clear()
        for step in (2, 3):
            UNCHANGED[change](state)
            before = whole(state)
            ckpt.save(step, state).result(60)
            for name, saved in loaded(tmp_path, step).items():
                assert_same(dict(sorted(flat(before[name]).items())), dict(sorted(flat(saved).items())))
        assert planned == []


def other_memory(state):
    state["net"].first.weight.data = state["net"].first.weight.data.clone()


def other_shape(state):
    state["net"].first.bias.data = state["net"].first.bias.data.view(2, 3)


def transposed(state):
    state["net"].first.weight.data = state["net"].first.weight.data.t()


def other_dtype(state):
    state["net"].first.bias.data = state["net"].first.bias.data.view(torch.int32).view(torch.float32).to(torch.float64)


def same_bytes_other_dtype(state):
    state["net"].norm.num_batches_tracked.data = state["net"].norm.num_batches_tracked.data.view(torch.float64)


def tied(state):
    state["net"].second.weight = state["net"].first.weight


def renamed(state):
    state["net"].third = state["net"]._modules.pop("second")


def swapped(state):
    net = state["net"]
    net.first, net.second = net.second, net.first


def not_saved_any_more(state):
    state["net"].norm.register_buffer("running_mean", state["net"].norm.running_mean, persistent=False)


def hooked(state):
    state["net"].register_state_dict_post_hook(lambda module, found, prefix, meta: found.__delitem__("first.bias"))


def own_way(state):
    state["net"].state_dict = lambda: {"only": torch.ones(2)}


def without_bias(state):
    state["net"].first.bias = None


def emptied(state):
    state["optimizer"].state.clear()


def another_group(state):
    state["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def another_option(state):
    state["optimizer"].param_groups[0]["maximize"] = True


def post_hook_of_the_optimizer(state):
    state["optimizer"].register_state_dict_post_hook(lambda optimizer, found: {**found, "more": torch.ones(1)})


def given_to_another(state):
    """In the same memory, and in the same order: only whose it is has changed."""
    held, (first, second) = state["optimizer"].state, (state["net"].first.weight, state["net"].second.weight)
    items = [({first: second, second: first}.get(owner, owner), kept) for owner, kept in held.items()]
    held.clear()
    held.update(items)


def in_another_order(state):
    parameters = state["optimizer"].param_groups[0]["params"]
    parameters[0], parameters[2] = parameters[2], parameters[0]


def a_number(state):
    state["data"]["count"] = 4


def a_truth(state):
    state["data"]["on"] = 1


def another_key(state):
    state["data"]["deep"]["u"] = state["data"]["deep"].pop("v")


def another_kind(state):
    state["data"]["deep"] = collections.OrderedDict(state["data"]["deep"])


def view_of_one(state):
    both = torch.cat([state["data"]["w"], state["data"]["deep"]["v"].flatten()])
    state["data"]["w"], state["data"]["deep"]["v"] = both[:5], both[5:].view(2, 3)


def turned_round(state):
    state["data"]["w"] = Z.conj().imag  # the same memory as ``Z.imag``, and every number has the other sign


def sparse(state):
    state["data"]["w"] = torch.eye(3).to_sparse()


def moved_in_its_storage(state):
    both = torch.cat([torch.zeros(7), state["data"]["w"]])
    state["data"]["w"] = both[7:]


def with_a_note(state):
    state["data"]["w"].note = "x"


def other_order(state):
    state["data"]["w"] = state["data"].pop("w")


def another_version(state):
    state["net"].norm._version = 7


def patched(state):
    own = state["net"].norm._save_to_state_dict
    state["net"].norm._save_to_state_dict = lambda found, prefix, keep: own(found, prefix + "new.", keep)


def learning(state):
    state["data"]["w"].requires_grad_()


def of_each_rank(state):
    state["data"] = PerRank(state["data"])


CHANGES = {
    change: name
    for name, changes in {
        "net": [
            *(other_memory, other_shape, transposed, other_dtype, same_bytes_other_dtype, tied, renamed, swapped),
            *(not_saved_any_more, hooked, own_way, without_bias, another_version, patched),
        ],
        "optimizer": [
            *(emptied, another_group, another_option, post_hook_of_the_optimizer),
            *(given_to_another, in_another_order),
        ],
        "data": [
            *(a_number, a_truth, another_key, another_kind, view_of_one, learning, of_each_rank, turned_round, sparse),
            *(moved_in_its_storage, with_a_note, other_order),
        ],
    }.items()
    for change in changes
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_item_with_any_change_is_planned_anew(tmp_path, planned, change):
    """A name, type, shape, stride, memory, tie, hook, group or number: the file is that of today, the rest is not planned."""
    state = fresh()
    with Checkpointer(tmp_path) as ckpt:
        if change is turned_round:
            state["data"]["w"] = Z.imag
        ckpt.save(1, state).result(60)
        ckpt.save(2, state).result(60)
        planned.clear()
        change(state)
        before = whole(state)
        ckpt.save(3, state).result(60)
        assert planned == [CHANGES[change]]
    for name, saved in loaded(tmp_path, 3).items():
        expected, found = dict(sorted(flat(before[name]).items())), dict(sorted(flat(saved).items()))
        if change is tied and name == "net":  # stored once, under the first name
            assert found.pop("/second.weight", None) is None
            expected.pop("/second.weight")
        assert_same(expected, found)


def test_tensors_that_are_tied_no_more_are_stored_twice(tmp_path, planned):
    """What was tied and is not any more is stored twice."""
    state = fresh()
    tied(state)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result(60)
        state["net"].second.weight = torch.nn.Parameter(state["net"].second.weight.detach() + 1)
        planned.clear()
        ckpt.save(2, state).result(60)
        assert planned == ["net"]
    found = loaded(tmp_path, 2)["net"]
    assert found["second.weight"].equal(found["first.weight"] + 1)


def test_a_checkpointer_keeps_no_tensor_of_a_state_alive(tmp_path):
    """Between two saves the memory of a model that was deleted is free."""
    import gc
    import weakref

    with Checkpointer(tmp_path) as ckpt:
        state = fresh()
        for step in (1, 2, 3):
            ckpt.save(step, state).result(60)
        alive = [weakref.ref(p) for p in state["net"].parameters()]
        alive += [weakref.ref(s.untyped_storage()) for s in flat(state["optimizer"].state_dict()["state"]).values()]
        alive += [weakref.ref(state["net"])]
        del state
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)


def test_memory_that_a_tensor_leaves_while_it_is_copied_is_saved_as_it_was(tmp_path):
    """A known plan reads by address: also where a parameter gets other memory before the copy is over."""
    big = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.SGD(big.parameters(), lr=0.1)
    state = {"net": big, "optimizer": optimizer}
    with Checkpointer(tmp_path, CheckpointConfig(snapshot="overlapped")) as ckpt:
        ckpt.save(1, state).result(60)
        for step in range(2, 12):
            expected = big.weight.detach().clone()
            handle = ckpt.save(step, state)
            big.weight.data = torch.zeros_like(big.weight)
            handle.result(60)
            assert loaded(tmp_path, step)["net"]["weight"].equal(expected)
            big.weight.data = expected + 1


class Counter:
    """A part whose state becomes an archive without tensors, and no fingerprint is known of it."""

    def __init__(self):
        self.at = (0, 250)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_files_that_are_planned_anew_are_whole_whatever_lay_in_their_place(tmp_path, alone, in_flight):
    """An archive without tensors that grows by a byte, beside known plans and alone; every save is read back."""
    counter = Counter()
    state = {"counter": counter} if alone else {**fresh(), "counter": counter, "plain": {"n": 0}}
    with Checkpointer(tmp_path, CheckpointConfig(max_in_flight=in_flight)) as ckpt:
        for step in range(12):
            counter.at = (step, 250 + step)
            if not alone:
                state["plain"]["n"] = 10**step
                state["optimizer"].param_groups[0]["lr"] = 0.1 / (step + 1)
            ckpt.save(step, state)
        ckpt.wait()
        for step in range(12):
            found = loaded(tmp_path, step)
            assert found["counter"]["at"] == (step, 250 + step)
            if not alone:
                assert found["optimizer"]["param_groups"][0]["lr"] == 0.1 / (step + 1)
        counter.at = ()
        ckpt.resume(state)
        assert counter.at == (11, 261)


def test_an_optimizer_with_two_groups_is_not_planned_again(tmp_path, planned):
    """With and without weight decay: the usual two groups."""
    net = Net()
    groups = [{"params": net.first.parameters(), "weight_decay": 0.0}, {"params": net.second.parameters()}]
    state = {"net": net, "optimizer": torch.optim.AdamW(groups)}
    trained(net, state["optimizer"])
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result(60)
        planned.clear()
        state["optimizer"].param_groups[1]["lr"] = 0.5
        ckpt.save(2, state).result(60)
        assert planned == []
    assert [group["lr"] for group in loaded(tmp_path, 2)["optimizer"]["param_groups"]] == [0.001, 0.5]


def test_a_parameter_that_moves_to_the_next_group_is_saved_there(tmp_path):
    """The parameters are the same ones in the same order, and one of them belongs to the other group from now on."""
    net = Net()
    groups = [{"params": [*net.first.parameters()], "weight_decay": 0.0}, {"params": [*net.second.parameters()]}]
    state = {"net": net, "optimizer": torch.optim.AdamW(groups)}
    trained(net, state["optimizer"])
    first, second = state["optimizer"].param_groups
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).result(timeout_s=30)
            second["params"].insert(0, first["params"].pop())
    whole = [len([*net.first.parameters()]), len([*net.second.parameters()])]
    for step in (1, 2):
        found = [len(group["params"]) for group in loaded(tmp_path, step)["optimizer"]["param_groups"]]
        assert found == [whole[0] - step + 1, whole[1] + step - 1]


def test_known_copies_and_constant_bytes_are_used_beside_items_that_change(tmp_path, monkeypatch):
    """A step counter and a generator are planned anew each time; the tensors of the model are not laid out again."""
    from safe_ckpt.core.staging.snapshot import KnownCopies

    missed, original = [], KnownCopies.remember

    def note(self, key, plans, deferred):
        missed.append(len(deferred))
        original(self, key, plans, deferred)

    monkeypatch.setattr(KnownCopies, "remember", note)
    state = {**fresh(), "rng": RngState()}
    with Checkpointer(tmp_path) as ckpt:
        for step in (100, 101, 102):
            missed.clear()
            ckpt.save(step, {**state, "step": {"n": step}}).result(60)
            assert (max(missed) > 5) is (step == 100)


def test_parameters_that_another_optimizer_steps_now_are_not_copied_late(tmp_path):
    """Which optimizer owns a parameter decides whether it may be copied after the call; also where nothing else has changed."""
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    state = {"a": first, "b": second, "optimizer": torch.optim.SGD(first.parameters(), lr=0.1)}
    planner = Planner(0, overlapped=True)
    planner.plan(items_of(state))
    assert planner.plan(items_of(state)).overlap.covers(first.weight)
    state["optimizer"] = torch.optim.SGD(second.parameters(), lr=0.1)
    now = planner.plan(items_of(state)).overlap
    assert not now.covers(first.weight)
    assert now.covers(second.weight)


def test_a_model_that_is_as_it_was_is_not_walked_again(tmp_path, monkeypatch):
    """Neither for what may be infinite in it nor for what of it is trained; but where that has changed it is."""
    walked, original = [], torch.nn.Module.named_parameters

    def note(self, *args, **options):
        walked.append(self)
        return original(self, *args, **options)

    state = fresh()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result(60)
        monkeypatch.setattr(torch.nn.Module, "named_parameters", note)
        values_only(state)
        walked.clear()
        ckpt.save(2, state).result(60)
        assert walked == []
        state["net"].first.weight.requires_grad_(False)
        ckpt.save(3, state).result(60)
        assert state["net"] in walked
    assert read_manifest(tmp_path / catalog.step_name(2)).frozen == []
    assert read_manifest(tmp_path / catalog.step_name(3)).frozen == ["net.first.weight"]


@pytest.mark.parametrize("kind", [torch.nn.Module, torch.optim.Optimizer, torch.nn.Linear, torch.optim.AdamW])
def test_a_class_that_was_given_its_own_way_is_planned_each_time(tmp_path, monkeypatch, kind):
    """Also when torch's own method is replaced between two saves."""
    state, original = fresh(), kind.state_dict

    def other(self, *args, **options):
        found = original(self, *args, **options)
        found["param_groups" if kind in (torch.optim.Optimizer, torch.optim.AdamW) else "more"] = [torch.ones(1)]
        return found

    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).result(60)
        monkeypatch.setattr(kind, "state_dict", other)
        before = whole(state)
        ckpt.save(3, state).result(60)
    found = loaded(tmp_path, 3)
    for name in ("net", "optimizer"):
        assert sorted(flat(found[name])) == sorted(flat(before[name]))


def test_small_tensors_that_get_other_memory_before_they_are_copied_are_saved_as_they_were(tmp_path, monkeypatch):
    """Hundreds of tensors that are copied by their addresses: the memory that they leave is kept until it was read."""
    may_copy = threading.Event()
    copy_after(monkeypatch, may_copy)
    parts = torch.nn.ParameterList(torch.full((10_000,), float(n)) for n in range(600))
    state = {"parts": parts, "optimizer": torch.optim.SGD(parts, lr=0.1)}
    with Checkpointer(tmp_path, CheckpointConfig(snapshot="overlapped")) as ckpt:
        for step in range(0, 6, 2):
            may_copy.set()
            ckpt.save(step, state).result(60)
            may_copy.clear()
            handle = ckpt.save(step + 1, state)  # the plan is known
            for part in parts:
                part.data = torch.full((10_000,), -1.0)
            may_copy.set()
            handle.result(60)
            found = loaded(tmp_path, step + 1)["parts"]
            for number in range(600):
                assert bool((found[str(number)] == float(number + step)).all()), (step, number)
                parts[number].data = torch.full((10_000,), float(number + step + 2))


@pytest.mark.parametrize("frozen_apart", [True, False])
@pytest.mark.parametrize("known", [False, True])
def test_what_of_a_sharded_state_is_not_trained_is_told_by_its_model(frozen_apart, known):
    """By the names in the state dict: at its top and one level within, whatever else is there; as it is now, also where all
    else is known. Nothing without the model, and nothing where it is not to be kept apart.
    """
    net = Net()
    states = {
        "flat": net.state_dict(),
        "app": {"model": net.state_dict(), "n": {"x": torch.ones(1)}},
        "other": {"w": Z},
    }
    planner = Planner(0, frozen_apart=frozen_apart)

    def told():
        found = planner.sharded_states(states, {"flat": net, "app": net})
        return {name: set(item.frozen()) & set(flat_names(states[name])) for name, item in found.items()}

    if known:
        assert told() == {"flat": set(), "app": set(), "other": set()}
        kept = [item.known for item in planner.sharded_states(states, {"flat": net, "app": net}).values()]
    net.first.weight.requires_grad_(False)
    flat_now, app_now = {"first.weight"}, {"model.first.weight"}
    assert told() == (
        {"flat": flat_now, "app": app_now, "other": set()} if frozen_apart else {key: set() for key in states}
    )
    if known:
        now = [item.known for item in planner.sharded_states(states, {"flat": net, "app": net}).values()]
        assert [one is two for one, two in zip(kept, now, strict=True)] == [not frozen_apart, not frozen_apart, True]


def flat_names(state):
    """Of its tensors, as a plan of a sharded state calls them."""
    return [path.removeprefix("/").replace("/", ".") for path in flat(state)]
