"""What two looks at an object have to say before it counts as damaged."""

import pytest

from safe_ckpt.core.storage.objects.second_look import look_twice
from safe_ckpt.errors import CorruptCheckpointError


class Place:
    """Stands for the folder of a checkpoint; which connection asks does not matter here."""

    def afresh(self):
        return self


def looks(*answers):
    """An action that finds these: a message is a damage, anything else is what it returns."""
    left = list(answers)

    def action(place):
        answer = left.pop(0)
        if isinstance(answer, str):
            raise CorruptCheckpointError(path="s3://bucket/run/step-1", file="a.pt", message=answer)
        return answer

    return action, left


@pytest.mark.parametrize("answers", [(1,), ("is cut off", 1), ("is cut off", "is missing", 1)], ids=str)
def test_a_checkpoint_that_looks_disagree_about_is_not_damaged(answers):
    """One wrong answer, or two different ones, cost a further look and nothing else."""
    action, left = looks(*answers)
    assert look_twice(Place(), action) == 1
    assert left == []


@pytest.mark.parametrize("answers", [("is cut off", "is cut off"), ("is cut off", "is missing", "is cut off")], ids=str)
def test_a_damage_that_looks_agree_about_is_raised(answers):
    """It is looked for twice, and a third time only where the two differ."""
    action, left = looks(*answers)
    with pytest.raises(CorruptCheckpointError, match="is cut off"):
        look_twice(Place(), action)
    assert left == []
