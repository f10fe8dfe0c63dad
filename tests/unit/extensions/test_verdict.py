"""What follows from the numbers of a file, and what is learnt for the next save."""

import json

import pytest

from safe_ckpt.core.formats.manifest import describe_unhealthy
from safe_ckpt.extensions.health.extension import Known
from safe_ckpt.extensions.health.regions import Region
from safe_ckpt.extensions.health.verdict import Expectation, is_sick, of_checkpoint

FACTS = {"tensors": 2, "numbers": 10, "norm": 2.0, "most": 1.0, "least": -1.0, "largest": "w", "layout": "L"}
LATER = {"first": False, "layout": "L"}


def row(name, *, nan=0, inf=0, pattern="p"):
    return {"name": name, "numbers": 10, "nan": nan, "inf": inf, "pattern": pattern}


@pytest.mark.parametrize("name", ["mask", "layers.0.mask", "state_dict.model.mask"])
def test_a_fixed_tensor_is_learnt_at_first_and_then_held_to_it(name):
    """By any end of its name that begins at a dot. A new pattern is an alarm, the old one is not."""
    first = Expectation(fixed=["mask"]).judge(FACTS, [row(name, inf=3)])
    assert not is_sick(first)
    later = Expectation(**LATER, fixed=["mask"], learnt=first["learnt"])
    assert not is_sick(later.judge(FACTS, [row(name, inf=3)]))
    assert is_sick(later.judge(FACTS, [row(name, inf=4, pattern="q")]))
    assert later.judge(FACTS, [])["learnt"] == {name: ("p", 3)}


def test_a_buffer_may_become_less_infinite_or_another_one():
    """A running maximum fills up; a mask grows, or is made late: the tensors of the file are others then."""
    later = Expectation(**LATER, fixed=["mask"], learnt={"mask": ("p", 3)})
    assert not is_sick(later.judge(FACTS, [row("mask", inf=2, pattern="q")]))
    grown = {**FACTS, "layout": "M"}
    assert not is_sick(later.judge(grown, [row("mask", inf=9, pattern="q")]))
    assert not is_sick(Expectation(**LATER, fixed=["mask"]).judge(grown, [row("mask", inf=9)]))
    assert is_sick(Expectation(**LATER, fixed=["mask"]).judge(grown, [row("weight", inf=9)]))


def test_tensors_of_no_known_module_may_be_infinite_from_the_first_save():
    """A score in a dict of one's own, the mask of a module whose state dict alone is saved: as long as it stays so."""
    first = Expectation(trained=["head.weight"])
    found = first.judge(FACTS, [row("best", inf=1), row("model.mask", inf=3)])
    assert not is_sick(found)
    later = Expectation(**LATER, learnt=found["learnt"])
    assert not is_sick(later.judge(FACTS, [row("best", inf=1)]))
    assert is_sick(later.judge(FACTS, [row("best", inf=1, pattern="q")]))
    for name in ("head.weight", "state_dict.head.weight", "state.0.exp_avg", "optimizer_states.0.state.1.step"):
        optimizers = [name] if ".state." in f".{name}" else []
        assert is_sick(first.judge(FACTS, [row(name, inf=1)], optimizers=optimizers)), name


@pytest.mark.parametrize(
    ("expected", "sick"),
    [
        (Expectation(**LATER, fixed=["mask"]), row("unmask", inf=1)),
        (Expectation(fixed=["mask"]), row("mask", nan=1, inf=1)),
        (Expectation(trained=["mask"]), row("mask", inf=1)),
        (Expectation(**LATER, fixed=["mask"]), row("mask", inf=1)),
    ],
)
def test_parameters_nan_and_finite_tensors_are_never_learnt(expected, sick):
    """Parameters, NaN, and what was finite before."""
    assert is_sick(expected.judge(FACTS, [sick]))


def test_the_worst_twenty_sick_tensors_are_named():
    """Twenty by name, all of them counted; three in words."""
    found = Expectation().judge(FACTS, [row(f"t{number}", nan=number) for number in range(1, 31)])
    assert [one["name"] for one in found["sick"][:3]] == ["t30", "t29", "t28"]
    assert (len(found["sick"]), found["sick_tensors"]) == (20, 30)
    words = describe_unhealthy(of_checkpoint({"m.safetensors": found}, "mark"))
    assert words.startswith("m.safetensors: t30 has 30 NaN among 10 numbers; ")
    assert words.endswith("; and 27 tensors more")


@pytest.mark.parametrize(("action", "marked"), [("mark", True), ("stop", True), ("warn", False)])
def test_one_sick_file_marks_the_checkpoint(action, marked):
    """Unless a warning is all that is asked for. Where nothing was looked at, nothing is said."""
    well = Expectation().judge(FACTS, [])
    sick = Expectation().judge(FACTS, [row("w", nan=1)])
    health = of_checkpoint({"a": well, "b": sick}, action)
    assert (health["healthy"], health["marked"]) == (False, marked)
    assert of_checkpoint({"a": well}, action)["healthy"]
    assert of_checkpoint({}, action) == {}


def test_a_jump_is_told_from_growth():
    """Against the last healthy norm of the same tensors: with others in it a file has another norm."""
    usual = Expectation(norm=0.1, norm_jump=10.0, layout="L")
    assert usual.judge(FACTS, [])["jump"] == pytest.approx(20.0)
    assert not is_sick(Expectation(norm=0.1, norm_jump=10.0, layout="M").judge(FACTS, []))
    assert not is_sick(Expectation(norm=1.0, norm_jump=10.0, layout="L").judge(FACTS, []))
    assert not is_sick(Expectation(norm=0.0, norm_jump=10.0, layout="L").judge(FACTS, []))


def test_norms_are_compared_with_those_of_the_last_healthy_save():
    """A sick one teaches nothing but its masks; a resume begins with what the manifest says."""
    known = Known()
    known.fixed = ["mask"]
    first = known.expectation("a", Expectation())
    assert (first.first, first.fixed) == (True, ["mask"])
    known.learn({"a": first.judge(FACTS, [row("mask", inf=1)])}, healthy=True)
    known.learn({"a": {**FACTS, "norm": 99.0, "learnt": {"mask": ("p", 1)}}}, healthy=False)
    second = known.expectation("a", Expectation())
    assert (second.first, second.norm, second.learnt) == (False, 2.0, {"mask": ("p", 1)})
    known.recall({"files": {"b": {"norm": 5.0}}})
    assert known.expectation("a", Expectation()).first
    assert known.expectation("b", Expectation()).norm == 5.0
    told = Expectation(**json.loads(json.dumps(vars(second))))  # as the writer process gets it
    assert (told.norm, told.fixed, list(told.learnt["mask"])) == (2.0, ["mask"], ["p", 1])


def test_tensors_whose_names_match_ignored_patterns_are_not_judged():
    """Patterns are of whole names within a file."""
    regions = [Region(name, "float32", 0, 4) for name in ("callbacks.x.score", "state_dict.callbacks", "w")]
    left = Expectation(ignored=("callbacks.*", "*.mask")).regions(regions)
    assert [one.name for one in left] == ["state_dict.callbacks", "w"]
