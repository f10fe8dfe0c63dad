"""A mirror that is slower than the saves: which checkpoints it leaves out, and which it does not."""

import threading

import pytest
import torch

from kit.fault_proxy import FaultProxy
from kit.patience import scaled
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, StorageConfig, Timeouts, events
from safe_ckpt.core.home.object_head import list_objects
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

TIMES = Timeouts(lengthy_s=120, barrier_s=60, shutdown_s=60)


@pytest.fixture
def gate(object_server, bucket, monkeypatch):
    """Two events: the upload of a checkpoint has begun; it, and what comes after it, may go on."""
    begun, free = threading.Event(), threading.Event()

    def hold(record):
        if record.method == "PUT" and "/step-" in record.path:
            begun.set()
            free.wait(scaled(60))

    with FaultProxy(object_server.endpoint) as proxy:
        proxy.on_request = hold
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield begun, free
        free.set()


@pytest.mark.parametrize(("every", "expected"), [(None, [1, 6]), (2, [1, 2, 4, 6]), (5, [1, 5, 6])])
def test_only_the_newest_that_waits_is_uploaded(tmp_path, bucket, gate, every, expected):
    """Besides the one that was under way, the newest; and each that ``keep_every_steps`` names."""
    begun, free = gate
    seen = []
    config = CheckpointConfig(
        timeouts=TIMES,
        mirror=Mirror(url=bucket.url(), keep_every_steps=every),
        storage=StorageConfig(request_timeout_s=60),
    )
    with Checkpointer(tmp_path, config, hooks=[seen.append]) as ckpt:
        for step in range(1, 7):
            ckpt.save(step, {"w": {"t": torch.full((4,), float(step))}}).result(timeout_s=60)
            assert begun.wait(scaled(60))  # of the first; the others wait behind it
        free.set()
    mirrored = [event for event in seen if isinstance(event, events.Mirrored)]
    assert {event.error for event in mirrored} == {""}
    assert sorted(int(event.path[-8:]) for event in mirrored) == expected
    there = [one.manifest.step for one in list_objects(open_place(bucket.url(), StorageOptions(give_up_after_s=30)))]
    assert sorted(there) == [step for step in expected if every is None or step % every == 0 or step == 6]
