"""An audit as text, JSON and JUnit XML."""

import json
import pickle
from xml.etree import ElementTree

import pytest

from safe_ckpt.errors import ResumeDiffersError
from safe_ckpt.tools.audit.compare import MEANS, Comparison, Finding
from safe_ckpt.tools.audit.result import Audit

FINDING = Finding(
    category="state", names=("exp_avg",), step=14, resumed_at=14, rank=0, detail="all zero", means="it was not restored"
)
EQUAL = Audit(killed=(13,), comparisons=(Comparison(findings=(), steps=20),), ignored=(), cannot="", findings=())
RESUME = Comparison(findings=(FINDING,), notes=("n: 1 instead of 2",), steps=20)
DIFFERS = Audit(killed=(13,), comparisons=(RESUME,), ignored=("logged time",), cannot="", findings=(FINDING,))
CANNOT = Audit(
    killed=(13,), comparisons=(), ignored=("weights a",), cannot="the weights differ: seed them", findings=()
)


def test_text_says_what_differs_what_is_ignored_and_what_may_matter():
    """The first line that a user reads is the one that counts."""
    assert str(EQUAL) == "equal: 20 optimizer steps after 1 resumes, killed behind 13 steps"
    text = str(DIFFERS)
    assert (
        "step 14, the first after the resume, rank 0: optimizer: exp_avg (all zero)\n  -> it was not restored" in text
    )
    assert "logged time" in text
    assert "n: 1 instead of 2" in text
    assert str(CANNOT).splitlines() == ["cannot compare: the weights differ: seed them"]


def test_json_has_all_fields():
    """Another program finds the names."""
    said = json.loads(json.dumps(DIFFERS.as_json()))
    assert (said["equal"], said["findings"][0]["names"], said["comparisons"][0]["steps"]) == (False, ["exp_avg"], 20)
    assert EQUAL.as_json()["equal"] is True


def test_junit_has_a_case_for_each_category():
    """CI counts one failure, and skips where nothing could be compared."""
    suite = ElementTree.fromstring(DIFFERS.as_junit())
    assert len(suite) == len(MEANS) == int(suite.get("tests"))
    (failed,) = [case for case in suite if case.find("failure") is not None]
    assert failed.get("name") == "optimizer"
    assert "exp_avg" in failed.find("failure").text
    assert all(case.find("skipped") is not None for case in ElementTree.fromstring(CANNOT.as_junit()))
    assert all(len(case) == 0 for case in ElementTree.fromstring(EQUAL.as_junit()))


@pytest.mark.parametrize("audit", [DIFFERS, CANNOT])
def test_check_raises_what_the_text_says(audit):
    """For a test of one's own; the error is an AssertionError and can be pickled."""
    EQUAL.check()
    with pytest.raises(ResumeDiffersError) as caught:
        audit.check()
    assert isinstance(caught.value, AssertionError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(audit)
