"""The collectives of a gather that are awaited while the caller looks around."""

import contextlib
import threading

import torch

from safe_ckpt.core.sharding import gather_transport


def test_a_collective_on_a_thread_of_its_own_works_where_the_caller_does(monkeypatch):
    """With CUDA a new thread stands on device 0 and its default stream: it would not wait for what the trainer has queued."""
    entered = []

    @contextlib.contextmanager
    def stream(of):
        entered.append((threading.current_thread().name, of))
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: f"of {threading.current_thread().name}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    found = gather_transport.watched(lambda: torch.ones(1), [], look=lambda: None, timeout_s=5)
    assert found.tolist() == [1]
    assert entered == [("safe_ckpt-collective", "of MainThread")]
