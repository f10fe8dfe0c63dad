"""SIGKILL of a job that publishes with a saver of its own, at random moments, again and again."""

import pytest
import torch
from kills import killed

import safe_ckpt


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_lose_nothing_that_was_published(tmp_path):
    """6 SIGKILLs with keep_last=1, 20 in ``make faults``: what was announced is there, whole, and nothing torn is seen."""
    for which, announced in killed("kills_publishing", tmp_path / "run"):
        newest = safe_ckpt.newest(tmp_path / "run")
        assert (newest.step if newest is not None else 0) >= announced, which
        if newest is not None:
            for part in range(4):
                found = torch.load(newest.path / "deep" / f"{part}.pt")
                assert found.unique().tolist() == [float(newest.step)], which
    with safe_ckpt.publishing(tmp_path / "run", 10_000) as folder:
        (folder / "last").touch()
    assert not (tmp_path / "run/.safe_ckpt/pending").exists(), f"{which}: something was left over"
