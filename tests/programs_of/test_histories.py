"""Histories in this process: of loaders. Those of frameworks are in ``tests/adapters/test_histories.py``."""

import pytest

from programs_of import runner

LOADERS, AT_ONCE = 100, 25


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(
            pytest.param(one, marks=[pytest.mark.slow, pytest.mark.thorough])
            for one in range(AT_ONCE, LOADERS, AT_ONCE)
        ),
    ],
)
def test_a_loader_that_is_stopped_again_and_again_gives_what_torchs_own_gives(first):
    """Batches, what is drawn for them and by training, and the generators behind each epoch, from any place on."""
    kind = runner.kinds()["loaders"]()
    wrong = [result for result in runner.many(kind, range(first, first + AT_ONCE), 1) if result.verdict.wrong]
    assert not wrong, "\n".join(line for result in wrong for line in runner.lines_of(result))
