"""Which parameters are trained: noted at a save, and a warning where training goes on from it with others."""

import copy
import logging

import pytest
import torch

from safe_ckpt import Checkpointer
from safe_ckpt.core.formats.manifest import read_manifest


class Net(torch.nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.body = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(layers)])
        self.head = torch.nn.Linear(2, 1)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.head(x)


def frozen(model=None):
    model = model or Net()
    model.body.requires_grad_(False)
    return model


def state_of(model):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def step(state):
    state["optimizer"].zero_grad()
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()


def saved(folder, model):
    with Checkpointer(folder) as ckpt:
        state = state_of(model)
        step(state)
        return ckpt.save(1, state).result().path


def resumed(folder, model, caplog, between=lambda model: None, steps=3):
    """What is warned of when training goes on from what ``folder`` has."""
    caplog.clear()
    with Checkpointer(folder) as ckpt, caplog.at_level(logging.WARNING, "safe_ckpt"):
        state = state_of(model)
        assert ckpt.resume(state) is not None
        assert caplog.messages == []
        between(model)
        for _ in range(steps):
            step(state)
        ckpt.save(2, state).result()
    return caplog.messages


def test_what_was_unfrozen_and_is_frozen_again_is_named(tmp_path, caplog):
    """One warning, at the first step, with the names and what to do; as well where what was frozen is trained now."""
    saved(tmp_path / "a", Net())
    (said,) = resumed(tmp_path / "a", frozen(), caplog)
    assert "step-" in said
    assert "model.body.0.weight, model.body.0.bias, model.body.1.weight" in said
    assert "and 1 more no longer" in said
    assert "model.head" not in said
    assert "has to do so again" in said
    saved(tmp_path / "b", frozen())
    (said,) = resumed(tmp_path / "b", Net(), caplog)
    assert "model.body.0.weight, model.body.0.bias" in said
    assert "and 1 more now" in said


def test_a_resume_with_the_same_trained_parameters_gets_no_warning(tmp_path, caplog):
    """Nor those that are unfrozen between the resume and the first step, or later by a schedule."""
    saved(tmp_path / "a", frozen())
    assert resumed(tmp_path / "a", frozen(), caplog) == []
    saved(tmp_path / "b", Net())
    assert resumed(tmp_path / "b", frozen(), caplog, lambda model: model.requires_grad_(True)) == []


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compiled", "DataParallel"])
def test_trained_parameters_of_a_wrapped_model_have_plain_names(tmp_path, caplog, wrap):
    """A model that is wrapped has the names of the plain one in the note and in the warning."""
    path = saved(tmp_path, wrap(frozen()) if wrap is torch.nn.DataParallel else wrap(frozen(), backend="eager"))
    assert read_manifest(path).frozen == ["model.body.*.bias", "model.body.*.weight"]


def test_names_are_few_and_right_where_layers_differ(tmp_path):
    """Names that differ in numbers are one, unless only some of them are frozen; nothing frozen is said, too."""
    model = Net()
    model.body[1].requires_grad_(False)
    assert read_manifest(saved(tmp_path / "a", model)).frozen == ["model.body.1.bias", "model.body.1.weight"]
    assert read_manifest(saved(tmp_path / "b", Net())).frozen == []


def test_the_note_of_trained_parameters_follows_a_change(tmp_path):
    """From one save to the next, with a plan that is known."""
    model = frozen()
    state, notes = state_of(model), []
    with Checkpointer(tmp_path) as ckpt:
        for number in range(4):
            if number == 2:
                model.requires_grad_(True)
            step(state)
            notes.append(read_manifest(ckpt.save(number, state).result().path).frozen)
    names = ["model.body.*.bias", "model.body.*.weight"]
    assert notes == [names, names, [], []]


def test_networks_frozen_in_turns_within_a_step_are_no_difference(tmp_path, caplog):
    """While one's optimizer steps the other is frozen: that is no difference. One that stays frozen is."""

    def both():
        nets = {"a": Net(), "b": Net()}
        return {**nets, **{f"of_{n}": torch.optim.SGD(net.parameters(), lr=0.1) for n, net in nets.items()}}

    def turn(state, on, off):
        state[off].requires_grad_(False)
        state[f"of_{on}"].zero_grad()
        state[on](torch.ones(1, 2)).sum().backward()
        state[f"of_{on}"].step()
        state[off].requires_grad_(True)

    with Checkpointer(tmp_path) as ckpt:
        state = both()
        turn(state, "a", "b")
        turn(state, "b", "a")
        ckpt.save(1, state)
    for freeze in (False, True):
        caplog.clear()
        with Checkpointer(tmp_path) as ckpt, caplog.at_level(logging.WARNING, "safe_ckpt"):
            state = both()
            ckpt.resume(state)
            turn(state, "a", "b")
            state["b"].body.requires_grad_(not freeze)
            state["of_b"].step()
            turn(state, "a", "b")
        assert len(caplog.messages) == freeze
        assert not freeze or "b.body.0.weight" in caplog.text


def test_a_checkpoint_without_a_note_of_trained_parameters_is_silent(tmp_path, caplog):
    """A state without a model has none, and a resume into a model from such a one is silent."""
    with Checkpointer(tmp_path) as ckpt:
        info = ckpt.save(1, {"model": copy.deepcopy(Net().state_dict())}).result()
    assert read_manifest(info.path).frozen is None
    with Checkpointer(tmp_path) as ckpt, caplog.at_level(logging.WARNING, "safe_ckpt"):
        model = frozen()
        ckpt.resume({"model": model})
        step(state_of(model))
    assert caplog.messages == []
