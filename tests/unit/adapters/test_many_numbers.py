"""What each adapter makes of the names in its directory, and a callback's decisions: pure code, without a Trainer."""

import random

import pytest

from safe_ckpt.accelerate import directories
from safe_ckpt.core.home import candidates as homes
from safe_ckpt.lightning.callback_state import PendingActions
from safe_ckpt.transformers import saver as trainers

NUMBERS = (1, 2, 9, 10, 11, 19, 99, 100, 101, 999_999_999, 1_000_000_000)


@pytest.mark.parametrize(
    ("find", "name", "file"),
    [
        (directories.candidates, "checkpoint_{}", "model.safetensors"),
        (trainers.candidates, "checkpoint-{}", "model.safetensors"),
    ],
    ids=["accelerate", "transformers"],
)
def test_names_are_ordered_by_number(tmp_path, find, name, file):
    """The step of a checkpoint of stock is the number in its name, and the highest is tried first, however the text sorts."""
    shuffled = [*NUMBERS]
    random.Random(3).shuffle(shuffled)
    for number in shuffled:
        folder = tmp_path / name.format(number)
        folder.mkdir()
        (folder / file).write_bytes(b"12345678")
        (folder / "trainer_state.json").write_text("{}")
    found = {one.path.name: one.step for one in find(tmp_path)}
    assert found == {name.format(number): number for number in NUMBERS}
    ordered = homes.by_commit(find(tmp_path))
    assert [one.step for one in ordered if not one.problem] == [
        one.step for one in sorted(ordered, key=lambda one: -one.step) if not one.problem
    ]


def test_what_a_hook_writes_again_is_not_deleted():
    """Each path that a callback removes is deleted once, in order, but for those that are saved or linked in the same hook."""
    actions = PendingActions(
        saves=["new.ckpt", "again.ckpt"],
        links={"last.ckpt": "new.ckpt"},
        removals=["b.ckpt", "again.ckpt", "last.ckpt", "a.ckpt", "b.ckpt"],
    )
    assert actions.to_delete == ["b.ckpt", "a.ckpt"]
    assert actions.names == {"new.ckpt", "again.ckpt", "last.ckpt"}
    assert not PendingActions()
    assert all([PendingActions(saves=["x"]), PendingActions(links={"x": "y"}), PendingActions(removals=["x"])])
