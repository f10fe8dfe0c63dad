"""Histories of hosts with disks of their own behind one far directory: one step for all, and nothing told is lost."""

import pytest

from kit.thorough import THOROUGH
from sim.hosts import FIRST
from sim.running import found_by_its_seed, sim

pytest.importorskip("greenlet")

SEEDS_OF_PLANTED = {
    "other hosts give the name first": FIRST,
    "every sealed part gets its name": FIRST + 9,
    "other hosts delete all": FIRST,
    "files are not spread": FIRST,
    "what is spread gets no name": FIRST,
    "other hosts are not looked at": FIRST,
    "no part is sealed elsewhere": FIRST,
    "nothing is prepared elsewhere": FIRST + 1,
    "rank 0 alone fetches": FIRST + 1,
    "all hosts fetch what rank 0 needs": FIRST + 1,
    "a new host gets no folder": FIRST + 9,
    "hosts delete before the commit": FIRST,
    "a disk that refuses after the commit is a failure": FIRST + 57,
}
"""A seed that finds a planted bug; ``python -m sim --planted`` prints the first ones. Other plans have other seeds.

Not found in the first 30: a part that is sealed without a sync, a name that is late elsewhere, what rank 0 deleted, a host that
deletes all that is older. Two that leave out what is taken on at a start were not looked for to the end.
"""
SAMPLE = list(SEEDS_OF_PLANTED)[: None if THOROUGH else 2]


@pytest.mark.timeout(900)
def test_simulated_hosts_with_disks_of_their_own_lose_nothing_that_was_told():
    """A resume gives all hosts one step: the newest that was told near, or far where a disk is lost or damaged, or newer."""
    ended = sim("--first", FIRST, "--count", 2000 if THOROUGH else 8, "--processes", 2)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_on_hosts_is_found(name):
    """With the bug the history violates a rule; without it the same history violates none."""
    found_by_its_seed(name, SEEDS_OF_PLANTED[name])
