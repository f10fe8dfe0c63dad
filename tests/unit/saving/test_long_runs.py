"""A run that saves for ever: no save leaves anything behind in the process."""

import logging
import shutil

import pytest
import torch
from small_runs import config

from kit.kept import SLACK, kept
from safe_ckpt import Checkpointer, Retention, SafeCheckpointError
from safe_ckpt.core.saving.recent import MOST, Recent

STATE = {"w": {"t": torch.ones(2)}, "step": {"n": 1}}


def saved(ckpt, folder, number):
    return ckpt.save(number, STATE)


def exported(ckpt, folder, number):
    return ckpt.export(STATE["w"], folder / f"weights-{number % 4}")


def exported_elsewhere(ckpt, folder, number):
    if number > 3:
        shutil.rmtree(folder / f"run-{number - 4}")
    return ckpt.export(STATE["w"], folder / f"run-{number}/weights")


@pytest.mark.parametrize(
    ("save", "in_flight", "early"),
    [
        pytest.param(saved, 1, 10, marks=pytest.mark.thorough),
        (saved, 3, 10),
        pytest.param(exported, 1, 10, marks=pytest.mark.thorough),
        (exported_elsewhere, 1, MOST + 5),
    ],
)
def test_handles_of_finished_saves_do_not_pile_up(tmp_path, save, in_flight, early):
    """Handles of saves that are over go by themselves, without ``wait``; one that the user keeps still answers."""
    settings = config(retention=Retention(keep_last=2), max_in_flight=in_flight)
    with Checkpointer(tmp_path / "checkpoints", settings) as ckpt:
        first = save(ckpt, tmp_path, 0)
        for number in range(1, early):
            handle = save(ckpt, tmp_path, number)
        handle.wait_until_over(timeout_s=20)
        before = kept()
        for number in range(early, early + 60):
            handle = save(ckpt, tmp_path, number)
        handle.wait_until_over(timeout_s=20)
        assert kept() < before + SLACK
        assert len(ckpt._engine._handles) <= in_flight + 1
        assert first.result().path.name == first.name


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failure_that_nobody_has_seen_is_not_let_go(tmp_path, in_flight):
    """However many handles are let go: an error that nobody has looked at is raised, once, at the next save, or by ``wait``."""
    with Checkpointer(tmp_path, config(max_in_flight=in_flight)) as ckpt:
        for number in range(10):
            ckpt.save(number, STATE)
        ckpt.wait()
        pending = tmp_path / ".safe_ckpt/pending"
        for ask in (ckpt.wait, lambda: ckpt.save(99, STATE)):
            shutil.rmtree(pending)
            pending.write_text("in the way")
            failed = ckpt.save(50, STATE)
            failed.wait_until_over(timeout_s=20)
            pending.unlink()
            with pytest.raises(SafeCheckpointError, match="step-00000050"):
                ask()
            with pytest.raises(SafeCheckpointError, match="step-00000050"):
                failed.result()
            ckpt.save(60, STATE).result(timeout_s=20)


def test_failures_that_are_tolerated_do_not_accumulate(tmp_path):
    """With ``on_failure="warn"`` a full night of failures leaves nothing behind either."""
    logging.disable(logging.WARNING)  # pytest keeps what is logged, and the errors with it
    try:
        with Checkpointer(tmp_path, config(on_failure="warn", max_consecutive_failures=1000)) as ckpt:
            shutil.rmtree(tmp_path / ".safe_ckpt/pending")
            (tmp_path / ".safe_ckpt/pending").write_text("in the way")
            counts = []
            for number in range(100):
                ckpt.save(number, STATE).wait_until_over(timeout_s=20)
                if number in (20, 99):
                    counts.append(kept())
            assert counts[1] < counts[0] + SLACK
    finally:
        logging.disable(logging.NOTSET)


def test_places_used_long_ago_are_forgotten_unless_still_needed():
    """What is used stays, what was used long ago goes, and what is still needed stays however long ago that was."""
    recent = Recent(lambda value: value == "needed")
    recent.use("needed", lambda: "needed")
    recent.use("old", lambda: "old")
    for number in range(MOST):
        recent.use(number, lambda: "new")
        assert recent.use("used", lambda: "used") == "used"
    assert recent.get("old") is None
    assert recent.get("used") == "used"
    assert recent.use("needed", lambda: "made again") == "needed"
    assert len(recent) <= MOST + 1
    with pytest.raises(OSError, match="no"):
        recent.use("broken", lambda: (_ for _ in ()).throw(OSError("no")))
    assert recent.get("broken") is None
