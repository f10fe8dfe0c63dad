"""The real modules on simulated hosts: what must never happen, does not; and the simulator would see it if it did."""

import os
from pathlib import Path

import pytest

import safe_ckpt
from kit.thorough import THOROUGH
from sim.planted import PLANTED
from sim.running import found_by_its_seed, share_of_saves_that_succeed, sim

pytest.importorskip("greenlet")

SEEDS_OF_PLANTED = {
    "nothing is swept at the start": 0,
    "the name comes before the manifest": 0,
    "retention comes before the commit": 0,
    "the lock is not confirmed before a commit": 2,
    "keys of a save are used again": 2,
    "a holder's signs of life are ignored": 17,
    "the others' reports are left out": 4,
    "the manifest is not synced": 26,
    "the new name is not synced": 83,
    "files are not synced": 32,
    "the clock alone decides the order": 81,
    "one read is believed": 15,
    "a late store is asked without a pause": 315,
    "the lease runs on during an outage": 1112,
    "a lost answer of a rename is a failure": 380,
    "nothing is repaired at the start": 619,
    "a commit whose sync failed stays": 860,
    "another format is believed at one read": 93,
    "a verdict that did not come is a failure": 93,
    "the old one is deleted, then replaced": 7,
    "a checkpoint is deleted where it stands": 1476,
    "a lost answer of moving aside is a failure": 1423,
}
"""A seed that finds a planted bug; ``python -m sim --planted`` prints the first ones. Other plans have other seeds.

Six had one until a start asked the disk less, and were not found again in the first thousands: one read of a lock that a holder
or one who waits believes, what a host remembers, folders that are not synced (two), and a writer that outlives its parent.
Three that had one above 3,000,000 lost it when a start asked more; no other was looked for: another format behind a read that
said something else, what was set aside, and a name that was taken back.
"""
SAMPLE = [name for number, name in enumerate(SEEDS_OF_PLANTED) if THOROUGH or number in (0, 15)]


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_bug_fits_the_source(name):
    """One whose text is not there any more would never be found, and nothing would say so: most have no seed that runs here."""
    for module, patch in PLANTED[name].items():
        text = Path(safe_ckpt.__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py").read_text()
        assert patch(text) != text


@pytest.mark.timeout(900)
def test_simulated_histories_violate_no_rule():
    """Nothing durable is lost or torn, no two owners commit, ranks agree, every wait ends; saves succeed, but for faults."""
    count, processes = (20_000, os.cpu_count() or 1) if THOROUGH else (150, 2)
    ended = sim("--count", count, "--processes", processes)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    print(ended.stdout[-1500:])
    assert share_of_saves_that_succeed(ended) > 0.85, ended.stdout[-1500:]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [301, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (3, 29))])
def test_a_seed_gives_the_same_history_again(seed):
    """Two processes write the same log, line by line, so a seed is all that a report needs."""
    first, second = sim("--seed", seed, "--trace"), sim("--seed", seed, "--trace")
    assert len(first.stdout.splitlines()) > 20
    assert first.stdout == second.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_found(name):
    """With the bug the history violates a rule; without it the same history violates none."""
    found_by_its_seed(name, SEEDS_OF_PLANTED[name])
