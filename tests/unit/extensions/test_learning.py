"""What comes into a model, or into the state, after the first save is learnt when it comes, also after a resume."""

import math

import pytest
import torch

from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.extensions.health import verdict
from safe_ckpt.extensions.health.extension import Known
from safe_ckpt.extensions.health.verdict import Expectation, is_sick

FACTS = {"tensors": 2, "numbers": 10, "norm": 2.0, "most": 1.0, "least": -1.0, "largest": "w"}


def observed(layer):
    layer.register_buffer("least", torch.tensor(math.inf))
    layer.register_buffer("most", torch.tensor(-math.inf))


def masked(layer):
    layer.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))


def scored(layer):
    layer.best = torch.nn.Parameter(torch.tensor(math.inf), requires_grad=False)


def model_of(state):
    return state["model"]


@pytest.mark.parametrize("comes", [observed, masked, scored])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["its own file", "among others"])
def test_buffers_that_come_after_the_first_save_are_no_alarm(tmp_path, comes, resumed, whole):
    """An observer, a mask, a score in a module: then, at every save that follows, and in the next job."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

    def state():
        return {"all": {"model": model.state_dict(), "n": 1}, "model": model} if whole else {"model": model}

    ckpt = Checkpointer(tmp_path)
    for step in range(2):
        assert not ckpt.save(step, state()).result().marked
    if resumed:
        ckpt.close()
        ckpt = Checkpointer(tmp_path)
        ckpt.resume(state())
    comes(model[1])
    for step in range(2, 5):
        with torch.no_grad():
            model[0].weight += 1
        assert not ckpt.save(step, state()).result().marked, step
    ckpt.close()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.resume(state()).step == 4
        with torch.no_grad():
            model[1].weight[0, 0] = math.inf
        assert ckpt.save(5, state()).result().marked


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("per_rank", [False, True])
def test_a_score_that_comes_into_data_is_no_alarm(tmp_path, resumed, per_rank):
    """In a dict of the user's, beside tensors that may not become infinite with it."""
    scores = {"loss": torch.tensor([1.0]), "note": "x"}
    state = {"scores": PerRank(scores) if per_rank else scores}
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state).result()
    if resumed:
        ckpt.close()
        ckpt = Checkpointer(tmp_path)
        ckpt.resume(state)
    scores["best"] = torch.tensor([math.inf])
    for step in (2, 3):
        assert not ckpt.save(step, state).result().marked
    scores["other"], scores["loss"] = torch.tensor([2.0]), torch.tensor([math.inf])
    assert ckpt.save(4, state).result().marked
    ckpt.close()


@pytest.mark.parametrize("more", [{}, {"note": {1}}], ids=["tensors", "an archive"])
def test_a_score_that_comes_where_all_were_infinite_is_no_alarm(tmp_path, more):
    """Beside one that was infinite at the first save, and nothing else: at every save that follows, and in the resume."""
    scores = {"best": torch.tensor(math.inf), **more}
    with Checkpointer(tmp_path) as ckpt:
        assert not ckpt.save(1, {"scores": scores}).result().marked
        scores["best"] = torch.tensor(0.5)
        assert not ckpt.save(2, {"scores": scores}).result().marked
        for step, name in ((3, "least"), (4, "most")):
            scores[name] = torch.tensor(-math.inf)
            assert not ckpt.save(step, {"scores": scores}).result().marked
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.resume({"scores": scores}).step == 4


def test_a_parameter_that_is_trained_later_is_held_to_it(tmp_path):
    """Frozen at the first save and trained from the second one on: an infinite number in it is an alarm then."""
    model = torch.nn.Linear(3, 3).requires_grad_(False)
    with Checkpointer(tmp_path) as ckpt, torch.no_grad():
        model.weight[0, 0] = math.inf
        assert not ckpt.save(1, {"model": model}).result().marked
        model.requires_grad_(True)
        model.bias[0] = math.inf
        assert ckpt.save(2, {"model": model}).result().marked


def test_names_of_another_layout_alone_are_not_new():
    """With another layout alone nothing is new: what was finite before is an alarm, and so is what nobody can tell."""
    names = ["best", "w", "state.0.exp_avg"]
    optimizers = names[-1:]
    first = Expectation().judge({**FACTS, "layout": "L"}, [], names, optimizers)
    assert first["learnt"] == {"best": ("", 0), "w": ("", 0)}
    later = Expectation(first=False, layout="L", learnt=first["learnt"])
    row = {"numbers": 9, "nan": 0, "inf": 1, "pattern": "p"}
    found = {
        name: later.judge({**FACTS, "layout": "M"}, [{"name": name, **row}], [*names, "new"], optimizers)
        for name in (*names, "new")
    }
    assert {name: is_sick(one) for name, one in found.items()} == {
        "best": True, "w": True, "state.0.exp_avg": True, "new": False,
    }  # fmt: skip
    assert found["new"]["learnt"]["new"] == ("p", 1)
    assert is_sick(later.judge({**FACTS, "layout": "L"}, [{"name": "new", **row}], names, optimizers))


def test_with_too_many_names_to_keep_the_models_decide(monkeypatch):
    """Then what the models say decides."""
    monkeypatch.setattr(verdict, "_MOST_FINITE", 2)
    row = {"name": "new", "numbers": 9, "nan": 0, "inf": 1, "pattern": "p"}
    for trained, sick in (((), True), (("w",), False)):
        first = Expectation(trained=trained).judge({**FACTS, "layout": "L"}, [], ["a", "b", "c"])
        assert first["learnt"] == {"": ("", 0)}
        later = Expectation(first=False, layout="L", trained=trained, learnt=first["learnt"])
        assert is_sick(later.judge({**FACTS, "layout": "M"}, [row], ["a", "b", "c", "new"])) == sick


def test_tensors_learnt_as_infinite_are_noted_in_the_manifest(tmp_path):
    """It is read back as it was, and by releases that know of infinite ones only."""
    with Checkpointer(tmp_path) as ckpt:
        info = ckpt.save(1, {"x": {"a": torch.ones(2), "b": torch.tensor(math.inf)}}).result()
    health = read_manifest(info.file_path).health
    assert health["files"]["x.safetensors"]["learnt"].keys() == {"a", "b"}
    assert health["files"]["x.safetensors"]["learnt"]["a"] == ["", 0]
    known = Known()
    known.recall(health)
    assert not known.expectation("x.safetensors", Expectation()).first
