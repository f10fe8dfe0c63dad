"""A rank dies, stops or is late in each phase of a save of four ranks; rank 0, which hosts the store, included."""

from collections import Counter

import pytest
from entries import ENTRIES, entered
from lost_ranks import CONFIG, SIZE, judge, lose
from trials import sampled

from kit.ranks import spawn_ranks
from kit.thorough import THOROUGH
from support import names_in

OF_RANK_0 = ["agree", "snapshot", "prepare", "write", "commit", "after the rename", "after the verdict"]
OF_OTHERS = ["agree", "snapshot", "write", "report", "verdict"]
CASES = [(0, phase, action) for phase in OF_RANK_0 for action in ("SIGKILL", "SIGSTOP", "late")]
CASES += [(2, phase, action) for phase in OF_OTHERS for action in ("SIGKILL", "SIGSTOP", "late")]
ALL = [(name, *case) for name in ENTRIES for case in CASES]
SOME = sampled(
    [("Checkpointer", *case) for number, case in enumerate(CASES) if number % 3 == number // 3 % 3],
    lambda number: number % 3 != 1,
)
SOME += [("accelerator.save_state", *case) for number, case in enumerate(CASES) if number % 12 == 4]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "victim", "phase", "action"), ALL if THOROUGH else SOME)
def test_the_others_learn_in_time_of_a_rank_that_dies_stops_or_is_late(tmp_path, matrix, name, victim, phase, action):
    """The others get a named error well before the deadline, or the save is committed when the rank was only late, or had done
    its part; after a rename nobody guesses: CommitOutcomeUnknown, and the resume finds it.
    """
    outcomes = spawn_ranks(lose, SIZE, tmp_path, name, victim, phase, action, timeout_s=60)
    with entered(name, tmp_path / "exp", CONFIG) as entry:
        found = entry.load()
    assert names_in(tmp_path / "exp/.safe_ckpt/pending") == []
    what = judge(outcomes, found, victim, phase, action)
    matrix(f"rank {victim} {action}", f"in each phase, 4 ranks; {name}", Counter({what: 1}))
