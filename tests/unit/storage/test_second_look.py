"""What looks at an object have to say before it counts as damaged."""

import pytest

from safe_ckpt.core.storage.objects.second_look import look_thrice
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


@pytest.mark.parametrize("answers", [(1,), ("is cut off", 1), ("is cut off", "is cut off", 1)], ids=str)
def test_a_checkpoint_that_one_of_three_looks_finds_whole_is_not_damaged(answers):
    """One wrong answer of the store, and one of the disk to which it was fetched, cost further looks and nothing else."""
    action, left = looks(*answers)
    assert look_thrice(Place(), action) == 1
    assert left == []


def test_a_damage_that_three_looks_find_is_raised():
    """And nothing is read a fourth time."""
    action, left = looks("is cut off", "is missing", "is cut off")
    with pytest.raises(CorruptCheckpointError, match="is cut off"):
        look_thrice(Place(), action)
    assert left == []
