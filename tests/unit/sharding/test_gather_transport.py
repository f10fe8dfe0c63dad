"""The collectives of a gather that are awaited while the caller looks around, and over which device they go."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.sharding import gather_transport


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_collective_on_a_thread_of_its_own_works_where_the_caller_does(monkeypatch, kind):
    """A new thread stands on device 0 and its default stream: it would not wait for what the trainer has queued."""
    entered = []

    @contextlib.contextmanager
    def stream(of):
        entered.append((threading.current_thread().name, of.of))
        yield

    module = getattr(torch, kind)
    monkeypatch.setattr(module, "is_initialized", lambda: True)
    device = torch.device(kind, 0)
    standing = lambda: SimpleNamespace(device=device, of=threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(module, "current_stream", standing)
    monkeypatch.setattr(module, "stream", stream)
    found = gather_transport.watched(lambda: torch.ones(1), [], look=lambda: None, timeout_s=5)
    assert found.tolist() == [1]
    assert entered == [("safe_ckpt-collective", "MainThread")]


@pytest.mark.parametrize(
    ("offered", "of_tensors", "expected"),
    [
        (["cpu"], ["cpu"], "cpu"),
        (["cpu"], ["xpu"], "cpu"),
        (["cuda", "cpu"], ["cpu", "cuda"], "cuda:3"),
        (["cuda", "cpu"], ["cpu"], "cpu"),
        (["xpu", "cpu"], ["cuda"], "cpu"),
        (["xpu", "cpu", "cuda"], ["cpu", "xpu"], "xpu:3"),
        (["xpu"], [], "xpu:3"),
        (["cuda"], ["cpu"], "cuda:3"),
    ],
)
def test_parts_travel_on_the_tensors_device_where_the_group_can(monkeypatch, offered, of_tensors, expected):
    """Whatever the type of the device; over the host where the group has no backend for it, and it alone may not."""
    group = SimpleNamespace(_device_types=[torch.device(name) for name in offered])
    monkeypatch.setattr(process_groups, "itself", lambda asked: asked)
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "current_device", lambda: 3)
    tensors = [SimpleNamespace(device=torch.device(name), is_cpu=name == "cpu") for name in of_tensors]
    assert gather_transport.wire_device(tensors, group) == torch.device(expected)
    assert gather_transport.wire_device(tensors, None) == torch.device("cpu")
