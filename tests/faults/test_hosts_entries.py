"""The faults that other tests try on the ranks of one host, as a sample on two hosts with two ranks each."""

from collections import Counter

import damage
import lost_ranks
import pytest
from entries import entered

from kit.hosts import Hosts, needs_hosts
from kit.ranks import spawn_over, values
from support import names_in

pytestmark = [needs_hosts, pytest.mark.slow]
SAMPLE = [
    ("Checkpointer", 0, "write", "SIGKILL"),
    ("Checkpointer", 0, "commit", "SIGSTOP"),
    pytest.param("Checkpointer", 2, "snapshot", "SIGSTOP", marks=pytest.mark.thorough),
    pytest.param("Checkpointer", 2, "report", "SIGKILL", marks=pytest.mark.thorough),
    ("accelerator.save_state", 2, "agree", "late"),
]


def lose(rank, *args):
    # A stopped rank is ended from outside: on another host its pid means nothing.
    lost_ranks.release = lambda *_, **__: None
    return lost_ranks.lose(rank, *args)


def load(rank, folder, name):
    with entered(name, folder, lost_ranks.CONFIG) as entry:
        return entry.load()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "victim", "phase", "action"), SAMPLE)
def test_ranks_on_another_host_learn_of_a_rank_that_dies_stops_or_is_late(
    tmp_path, matrix, name, victim, phase, action
):
    """What ranks of one host are told of one that dies, stops or is late, those on another host are told as well."""
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share("bindfs")
        stopped = [victim] if action == "SIGSTOP" else []
        arguments = (folder.path, name, victim, phase, action)
        outcomes = spawn_over(hosts, 2, lose, *arguments, expendable=stopped)
        (found,) = values(spawn_over([hosts[0]], 1, load, folder.path / "exp", name))
        assert names_in(folder.behind / "exp/.safe_ckpt/pending") == []
        what = lost_ranks.judge(outcomes, found, victim, phase, action)
    matrix(f"rank {victim} {action}", f"2 hosts x 2 ranks; {name}", Counter({what: 1}))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["ext4", pytest.param("bindfs", marks=pytest.mark.thorough)])
def test_damage_is_found_by_the_ranks_of_all_hosts(tmp_path, matrix, kind):
    """Damage to some files, in every way: all ranks on both hosts go back to the same older checkpoint."""
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share(kind)
        found = values(spawn_over(hosts, 2, damage.damage_all, folder.path, "Checkpointer", 3, timeout_s=150))
    outcomes = damage.judge(found, "Checkpointer")
    matrix("bit flipped, truncated, grown, emptied, deleted", f"some files, 2 hosts x 2 ranks, {kind}", outcomes)
