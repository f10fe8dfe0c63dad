"""Hooks cannot harm what they watch."""

import logging
import threading

import pytest
import torch

from safe_ckpt import Checkpointer
from safe_ckpt.events import StopRequested, Written
from safe_ckpt.hooks.emitter import Emitter


def event(step=1):
    return Written(rank=0, name="x", step=step, size_bytes=1, seconds=1.0)


def test_a_hook_that_does_not_return_is_named_and_not_waited_for(caplog):
    """The caller goes on after the patience, later calls do not wait at all, and nothing is lost when it returns."""
    leave, heard = threading.Event(), []

    def slow(told):
        leave.wait(30)
        heard.append(told.step)

    emit = Emitter([slow], patience_s=0.05)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            emit(event(step))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "slow" in said
    assert "has not returned" in said
    leave.set()
    emit(event(5))
    emit.close()
    assert heard == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("x")])
def test_whatever_a_hook_raises_it_is_dropped(error, caplog):
    """SystemExit and KeyboardInterrupt too; the others go on hearing."""
    heard = []

    def bad(_):
        raise error

    emit = Emitter([bad, heard.append])
    with caplog.at_level(logging.WARNING):
        emit(event())
        emit(event())
    emit.close()
    assert len(heard) == 2
    assert len(caplog.records) == 1


def test_a_hook_may_tell_something_itself():
    """An event from within a hook is delivered after it, and nobody waits for himself."""
    heard = []

    def echo(told):
        heard.append(told.kind)
        if told.kind == "written":
            emit(StopRequested(rank=0, signal="SIGTERM", by_rank=0, left_s=1.0, forecast_s=0.0))

    emit = Emitter([echo])
    emit(event())
    emit.close()
    assert heard == ["written", "stoprequested"]


def test_closing_leaves_no_thread_and_later_events_are_still_told():
    """As an Engine does at its end."""
    heard = []
    emit = Emitter([heard.append])
    emit(event())
    emit.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "safe_ckpt-hooks"]
    emit(event())
    emit.close()
    assert len(heard) == 2


def test_saves_go_on_beside_a_hook_that_hangs(tmp_path, monkeypatch):
    """Committed, one after the other, and close() comes back."""
    leave = threading.Event()
    monkeypatch.setattr(Emitter.__init__, "__kwdefaults__", {"patience_s": 0.05})
    with Checkpointer(tmp_path, hooks=[lambda _: leave.wait(60)]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"m": {"w": torch.ones(3)}}).result(timeout_s=20)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002", "step-00000003"]
    leave.set()


def test_a_save_that_is_refused_is_told(tmp_path):
    """What cannot be saved is a Failed event too: a run whose every save is refused does not look as if none had failed."""
    heard = []
    with Checkpointer(tmp_path, hooks=[heard.append]) as ckpt, pytest.raises(TypeError):
        ckpt.save(1, {"f": {"x": lambda: 0}})
    (failed,) = [told for told in heard if told.kind == "failed"]
    assert failed.step == 1
    assert not failed.outcome_unknown
