"""Lives of a directory from fixed seeds, in four parts so that two processes share them. ``--all`` lives ten times as many."""

import pytest

from kit.thorough import THOROUGH
from lives.run import failures

pytest.importorskip("obstore")
EACH = 380 if THOROUGH else 20
PARTS = 4


@pytest.mark.timeout(550)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_kept_resumed_and_mirrored_is_what_the_docs_say(part):
    """Saves, marks, rules, damage, lost disks and failing stores in any order: after each step all is as a plain model says."""
    found = failures(range(part * EACH, (part + 1) * EACH))
    assert not found, "\n".join(map(str, found))
