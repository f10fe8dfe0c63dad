"""Programs made from fixed seeds: states, and a few of each framework's. ``make programs`` runs a thousand of each kind."""

import sys

import pytest

from kit.thorough import THOROUGH
from programs_of import runner
from programs_of.planted import FOUND_AT, PLANTED, found_by, planted_in

STATES, OF_EACH = (200, None) if THOROUGH else (100, 1)
HERE = ("loaders", "fits", "prepared", "trained")
"""These kinds need no process of their own: tests of histories run them."""
KINDS = [name for name in runner.kinds() if name not in HERE]


@pytest.mark.timeout(300)
def test_what_a_resume_gives_back_of_a_random_state_is_what_torch_would():
    """Or the save refuses the state by name: never a save that no resume takes, never a silent difference."""
    kind = runner.kinds()["states"]()
    wrong = [result for result in runner.many(kind, range(STATES), 1) if result.verdict.wrong]
    assert not wrong, "\n".join(line for result in wrong for line in runner.lines_of(result))


@pytest.mark.framework
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KINDS)
def test_a_program_that_was_killed_goes_on_as_one_that_was_not(name):
    """In every step's batch, weights, optimizer, learning rate, generators and logged values."""
    kind = runner.kinds()[name]()
    for seed in sys.modules[type(kind).__module__].FIXED[:OF_EACH]:
        result = runner.run(kind, seed)
        assert not result.verdict.wrong, "\n".join(runner.lines_of(result))


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_bug_still_fits(title):
    """Whoever changes the code changes the planted bug with it: a search for one that fits no more would find nothing."""
    file, old, new = PLANTED[title]
    text = (planted_in() / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    assert new != old
    compile(text.replace(old, new), file, "exec")  # else every program is wrong, or none comes to anything


@pytest.mark.thorough
@pytest.mark.framework
@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", FOUND_AT)
def test_a_planted_bug_is_found_by_the_program_that_is_known_for_it(title):
    """Programs that find a bug no more look at something less than they did."""
    seed, told = found_by(title, FOUND_AT[title], 1, 500)
    assert seed is not None, told
