"""Tags that an earlier commit saved: today's code resumes them. ``tests/adapters/test_corpus.py`` lists and verifies them."""

import shutil

import pytest

pytest.importorskip("deepspeed")

from corpus import of_deepspeed
from corpus.make import CHECKPOINTS
from kit.ranks import spawn_ranks, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_ranks_resume_tags_that_an_earlier_commit_saved(tmp_path):
    """ZeRO-2 and ZeRO-3: weights, what the optimizer has, the client's state, and the batch that was left of the epoch."""
    saved = shutil.copytree(CHECKPOINTS, tmp_path / "checkpoints")
    left = values(spawn_ranks(of_deepspeed.resume, 2, saved, timeout_s=250))
    assert left == [[[[16, 0, 15, 21]]] * 2, [[[10, 14, 23, 6]]] * 2]
