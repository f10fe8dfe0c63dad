"""What acting as one costs, counted in store operations: it must not grow with the number of ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from control_plane import simulate


def test_a_rank_asks_the_store_as_often_however_many_there_are():
    """From agree to commit on 8 and 48 ranks (threads): as many operations per rank, and on rank 0 in proportion."""
    few, many = (simulate(ranks, rounds=2)[1] for ranks in (8, 48))
    own = [max(sum(calls.values()) for calls in counted[1:]) for counted in (few, many)]
    assert own[1] <= own[0] + 6, own  # one rank or another comes last and wakes the rest
    leads = [sum(counted[0].values()) / len(counted) for counted in (few, many)]
    assert leads[1] <= leads[0], leads
