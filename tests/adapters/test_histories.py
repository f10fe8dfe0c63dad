"""Histories of each adapter in one process, made from seeds by ``tests/programs_of``; ``make programs`` runs more of them."""

import pytest

from programs_of import runner

EACH, AT_ONCE = 12, 4
pytestmark = [pytest.mark.quick, pytest.mark.timeout(180)]


def run(name, first):
    wrong = [
        result
        for result in runner.many(runner.kinds()[name](), range(first, first + AT_ONCE), 1)
        if result.verdict.wrong
    ]
    assert not wrong, "\n".join(line for result in wrong for line in runner.lines_of(result))


@pytest.mark.parametrize("first", range(0, EACH, AT_ONCE))
def test_lightnings_callback_keeps_what_stocks_would_have_kept_without_faults(first):
    """Saves that fail, a second callback, stops, signals and resumes: files, best paths, links, and what each hook sees."""
    run("fits", first)


@pytest.mark.parametrize("first", range(0, EACH, AT_ONCE))
def test_an_accelerator_goes_on_as_one_that_was_not_stopped(first):
    """Saves that fail, stops, another Accelerator or the same one: each step's batch, weights and generators; what is kept."""
    run("prepared", first)


@pytest.mark.parametrize("first", range(0, EACH, AT_ONCE))
def test_a_trainer_goes_on_as_one_that_was_not_stopped(first):
    """Saves that fail, stops, signals and resumes: hooks, logs, state, and what the limit and the best model leave."""
    run("trained", first)
