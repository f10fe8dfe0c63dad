"""Every file of a checkpoint damaged in every way: found at the resume, by all ranks together, and set aside.

What is only missing is passed over and stays where it is.
"""

import pytest
from damage import damage_all, judge
from entries import ENTRIES

from kit.ranks import spawn_ranks, values

SOME = [pytest.param(name, marks=[pytest.mark.thorough] if name != "Checkpointer" else []) for name in ENTRIES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SOME)
def test_every_damage_to_every_file_moves_all_ranks_to_the_same_older_one(tmp_path, matrix, name):
    """Each file of a two-rank checkpoint, the manifest included, in each way; an extra file only is no damage."""
    found = values(spawn_ranks(damage_all, 2, tmp_path, name, timeout_s=280))
    assert len({file for file, *_ in found[0][0]}) == 6
    outcomes = judge(found, name)
    matrix("bit flipped, truncated, grown, emptied, deleted", f"each file and the manifest, 2 ranks; {name}", outcomes)
