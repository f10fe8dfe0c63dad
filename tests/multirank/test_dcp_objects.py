"""Objects beside tensors in ``safe_ckpt.dcp``: what a load will refuse is said at the save."""

import collections
import datetime
import io
from typing import NamedTuple

import numpy
import pytest
import torch

from safe_ckpt import dcp
from safe_ckpt.errors import SafeCheckpointError


class Named(torch.Tensor):
    """A subclass of the user's."""


def test_an_object_that_no_load_would_take_is_one_warning_at_the_save(tmp_path, caplog):
    """Once for each class, with what to do; then it is loaded. Arrays and ``BytesIO`` need nothing."""
    state = {
        "at": datetime.date(2026, 1, 2),
        "array": numpy.arange(3),
        "bytes": io.BytesIO(b"abc"),
        "scalar": numpy.float64(2),
    }
    for _ in range(2):
        dcp.save(state, checkpoint_id=tmp_path / "one")
    assert [record.message for record in caplog.records if "a load will refuse" in record.message] == [
        record.message for record in caplog.records if "datetime.date" in record.message
    ]
    assert caplog.text.count("datetime.date") == 1
    found = dict.fromkeys(state)
    with pytest.raises(SafeCheckpointError, match="at cannot be read"):
        dcp.load(found, checkpoint_id=tmp_path / "one")
    with torch.serialization.safe_globals([datetime.date]):
        dcp.load(found, checkpoint_id=tmp_path / "one")
    assert (found["at"], found["scalar"], found["bytes"].getvalue()) == (state["at"], 2, b"abc")
    assert (found["array"] == state["array"]).all()


class Pair(NamedTuple):
    """A named tuple of the user's."""

    x: int
    y: int


@pytest.mark.parametrize(
    "inner",
    [
        (datetime.date(2026, 1, 2), 1),
        Pair(1, 2),
        [collections.deque([1])],
        ({"k": torch.ones(1).as_subclass(Named)}, 1),
    ],
    ids=["in a tuple", "a tuple's subclass", "in a list", "a tensor's subclass"],
)
def test_an_object_that_no_load_would_take_is_one_warning_wherever_it_lies(tmp_path, caplog, inner):
    """In whatever DCP pickles as a whole; where there is no warning, the load takes it."""
    dcp.save({"deep": {"in": inner}}, checkpoint_id=tmp_path / "one")
    with pytest.raises(SafeCheckpointError, match="cannot be read"):
        dcp.load({"deep": {"in": None}}, checkpoint_id=tmp_path / "one")
    assert caplog.text.count("a load will refuse") == 1
