"""Lightning, Accelerate and the Trainer on the late accelerator; and bugs of order that plain loops do not meet."""

import pytest

from devices import runner
from kit import device
from kit.thorough import THOROUGH

pytestmark = [
    pytest.mark.skipif(not device.HAS_COMPILER, reason="no g++, which builds the accelerator"),
    pytest.mark.slow,
]
COUNT = 60 if THOROUGH else 2
FIRST = {"lightning": 3, "accelerate": 0, "transformers": 1}
"""Of the short run: one that raises, one with two ranks, among others."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", runner.FRAMEWORKS)
def test_a_run_that_is_killed_and_started_again_is_one_that_was_not(kind):
    """Killed behind saves and within them, with steps queued: batches, each checkpoint, and the end are equal to the bit.

    That is: weights, moments, buffers, the learning rate, and the generators of the devices and of the host.
    """
    first = 0 if THOROUGH else FIRST[kind]
    wrong = [f"seed {seed}: {what}" for seed, what in runner.many(first, COUNT, kind) if what]
    assert not wrong, "\n".join(wrong)
