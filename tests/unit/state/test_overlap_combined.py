"""Overlapped snapshots of several Checkpointers at a time, and of what becomes another plan from one save to the next."""

import threading

import pytest
import torch
from torch import nn

from kit.inside import copy_after
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.state.overlap import OverlapPlan

OVERLAPPED = CheckpointConfig(snapshot="overlapped", record_events=False)


def trained():
    net = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    return {"model": net, "optimizer": optimizer}


def step(net, optimizer):
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def numbers(state):
    """All of it, to be compared."""
    found = [value.tolist() for value in state["model"].state_dict().values()]
    slots = state["optimizer"].state.values() if "optimizer" in state else ()
    return found + [value.tolist() for slot in slots for value in slot.values()]


def sub_gradient(parameter):
    parameter.data.sub_(parameter.grad, alpha=0.1)


@pytest.fixture
def is_over(monkeypatch):
    """A copy begins when a step waits for this very copy; one for which no step waits begins when this is called."""
    awaited, turn, passing, copying = [], threading.Condition(), StagingCopy.pass_gate, StagingCopy.run_deferred

    def say(one):
        with turn:
            awaited.append(one)
            turn.notify_all()

    def pass_gate(self, timeout_s):
        say(self)
        passing(self, timeout_s)

    def run_deferred(self):
        with turn:
            assert turn.wait_for(lambda: any(one in (self, None) for one in awaited), 30)
        copying(self)

    monkeypatch.setattr(StagingCopy, "pass_gate", pass_gate)
    monkeypatch.setattr(StagingCopy, "run_deferred", run_deferred)
    return lambda: say(None)


@pytest.mark.parametrize("count", [2, 3])
def test_a_step_waits_for_the_copies_of_all_checkpointers(tmp_path, is_over, count):
    """Several keep the same model, each in a directory of its own: each has it as it was at the save."""
    state = trained()
    expected = numbers(state)
    jobs = [Checkpointer(tmp_path / str(number), OVERLAPPED) for number in range(count)]
    handles = [job.save(1, state) for job in jobs]
    step(state["model"], state["optimizer"])
    is_over()
    for handle in handles:
        handle.result(timeout_s=60)
    assert numbers(state) != expected
    for job in jobs:
        job.resume(state)
        assert numbers(state) == expected
        step(state["model"], state["optimizer"])
        job.close()


@pytest.mark.parametrize("change", ["hooks", "another class", "not saved any more"])
def test_what_is_copied_later_is_asked_anew_when_the_plan_is_another_one(tmp_path, monkeypatch, change):
    """From some save on something else may change a tensor at any time. It is where it was, and is copied at once then."""
    state = trained()
    net, optimizer = state["model"], state["optimizer"]
    event = threading.Event()
    event.set()
    copy_after(monkeypatch, event)
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        for number in (1, 2):
            ckpt.save(number, state).result(timeout_s=60)
        assert OverlapPlan([net], [optimizer])
        if change == "hooks":
            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(sub_gradient)
        elif change == "another class":
            optimizer.__class__ = type("Mine", (torch.optim.AdamW,), {})
        else:
            del state["optimizer"]
        expected = numbers(state)
        event.clear()
        handle = ckpt.save(3, state)
        if change == "hooks":
            net(torch.randn(8, 4)).square().mean().backward()
        else:
            net[0].weight.data.add_(1)
        event.set()
        handle.result(timeout_s=60)
        assert numbers(state) != expected
        ckpt.resume(state)
        assert numbers(state) == expected


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_a_hook_may_change_in_backward_is_copied_at_once(is_saved):
    """A parameter with a hook of its own, the optimizer's state of it, and what lies in the same memory; all else is left for
    later. Also where the optimizer alone is saved.
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked, other = net[0].weight, net[1].weight
    beside = nn.Parameter(hooked.detach().view(-1)[:4])
    optimizer = torch.optim.AdamW([*net.parameters(), beside])
    step(net, optimizer)
    beside.grad = torch.ones(4)
    optimizer.step()
    hooked.register_post_accumulate_grad_hook(sub_gradient)
    part = nn.ParameterList([beside])
    plan = OverlapPlan([net, part] if is_saved else [part], [optimizer])
    assert not plan.covers(hooked)
    assert not plan.covers(beside)
    assert plan.covers(other) is is_saved
    for key in ("exp_avg", "exp_avg_sq"):
        assert not plan.covers(optimizer.state[hooked][key])
        assert plan.covers(optimizer.state[other][key])
        assert plan.covers(optimizer.state[beside][key])


def test_what_a_hook_makes_of_an_optimizers_state_is_not_in_the_save_before(tmp_path, monkeypatch):
    """It changes the moments in backward, while what may be copied later is not copied yet."""
    state = trained()
    net, optimizer = state["model"], state["optimizer"]

    def forget(parameter):
        optimizer.state[parameter]["exp_avg"].data.zero_()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(forget)
    event = threading.Event()
    copy_after(monkeypatch, event)
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        expected = numbers(state)
        handle = ckpt.save(1, state)
        net(torch.randn(8, 4)).square().mean().backward()
        event.set()
        handle.result(timeout_s=60)
        assert numbers(state) != expected
        ckpt.resume(state)
        assert numbers(state) == expected


def test_a_parameter_without_values_defers_nothing_and_hides_nothing():
    """One on the meta device has no memory that could be copied later; the others are left for later all the same."""
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*empty.parameters(), *net.parameters()], lr=0.1)
    plan = OverlapPlan([empty, net], [optimizer])
    assert plan.covers(net.weight)
    assert not plan.covers(empty.weight)
