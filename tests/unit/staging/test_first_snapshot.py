"""The first snapshot where nobody has made memory ready: it is allocated and copied in one pass, and made ready afterwards."""

import errno
import os
import threading
import time

import pytest
import torch

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.staging import buffer as buffer_module
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.errors import NotEnoughSpaceError

EAGER, OVERLAPPED = (CheckpointConfig(snapshot=kind) for kind in ("eager", "overlapped"))


@pytest.fixture(autouse=True)
def not_by_faults(monkeypatch):
    """As most machines are set: huge pages for shared memory are not given on advice."""
    monkeypatch.setattr(buffer_module, "_huge_on_advice", lambda: False)


def state_of(seed):
    """Large and small tensors, empty ones and some that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (1, 3, 0, 8191, 8192, 300_000, 5_000_000, 7)
    state = {f"w{number}": torch.randn(size, generator=generator) for number, size in enumerate(sizes)}
    state["turned"] = torch.randn(700, 900, generator=generator).t()
    state["some"] = torch.randn(100, 7, generator=generator)[:, 2]
    return {**state, **{f"small{number}": torch.randn(number, generator=generator) for number in range(200)}}


def images_of(state):
    archive = torch_archive.torch_image("x.pt", {"state": state}, strict=True, key="x")
    return [file_plan.single(archive, "x.pt"), file_plan.json_image("x.json", {"a": 1})]


def test_it_holds_the_same_bytes_as_one_that_was_made_ready():
    """Whatever a tensor's size and layout: the fresh buffer and the prepared one are equal, bit for bit, headers included."""
    images = images_of(state_of(1))
    ready, fresh = SharedBuffer(), SharedBuffer()
    ready.reserve(snapshot.buffer_bytes(images))
    assert not ready.fresh
    for made in (ready, fresh):
        tasks = snapshot.take(images, made, "folder", {})
        end = tasks[-1].offset + tasks[-1].length
    assert fresh.fresh
    assert fresh.bytes[:end].equal(ready.bytes[:end])
    fresh.reserve(fresh.size)
    assert not fresh.fresh
    assert fresh.bytes[:end].equal(ready.bytes[:end])
    ready.close()
    fresh.close()


@pytest.mark.parametrize("config", [EAGER, OVERLAPPED], ids=["eager", "overlapped"])
def test_saves_before_and_after_the_memory_is_ready(tmp_path, config):
    """The first save and those right behind it are exact; soon its memory is mapped, as a prepared one's is."""
    net = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path, config) as ckpt:
        for step in range(1, 4):
            net(torch.randn(2, 1500)).sum().backward()
            optimizer.step()
            ckpt.save(step, {"model": net, "optimizer": optimizer, "state": state_of(step)}).result(timeout_s=60)
        limit = time.monotonic() + 30
        while any(buffer.fresh for buffer in ckpt._engine._stager._free):
            assert time.monotonic() < limit
            time.sleep(0.01)
        expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        for step in range(1, 4):
            found = {name: torch.zeros_like(tensor) for name, tensor in state_of(step).items()}
            ckpt.resume({"model": net, "optimizer": optimizer, "state": found}, step=step)
            assert all(found[name].equal(tensor) for name, tensor in state_of(step).items())
        assert all(net.state_dict()[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_memory_that_runs_out_in_the_first_snapshot_fails_that_save_alone(tmp_path, monkeypatch, call):
    """A named error, what was got is given back, and the next save works."""
    original, create, memories, calls = getattr(os, call), os.memfd_create, [], []

    def memfd_create(name, flags):
        memories.append(create(name, flags))
        return memories[-1]

    def short(fd, *rest):
        if fd == memories[0]:
            calls.append(fd)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, *rest)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with Checkpointer(tmp_path, EAGER) as ckpt:
        assert ckpt._engine._stager._free[0].fileno() == memories[0]
        monkeypatch.setattr(os, call, short)
        with pytest.raises(NotEnoughSpaceError, match="The snapshot does not fit") as caught:
            ckpt.save(1, {"state": state_of(1)}).result(timeout_s=60)
        assert caught.value.needed_bytes > sum(tensor.nbytes for tensor in state_of(1).values())
        assert ckpt.save(2, {"state": state_of(2)}).result(timeout_s=60).step == 2
    assert not (tmp_path / "step-00000001").exists()


def test_a_save_does_not_wait_until_all_memory_is_ready(tmp_path, monkeypatch):
    """It comes while memory is being made ready: that stops, and the save goes on with what is there."""
    begun, allocate = threading.Event(), os.posix_fallocate

    def slow(fd, at, length):
        if threading.current_thread().name == "safe_ckpt-prepare":
            begun.set()
            time.sleep(0.01)
        allocate(fd, at, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    state = {"w": torch.ones(2 << 30, dtype=torch.uint8)[: 64 << 20]}
    with Checkpointer(tmp_path, EAGER) as ckpt:
        ckpt.prepare({"w": torch.empty(2 << 30, dtype=torch.uint8)})
        assert begun.wait(30)
        began = time.monotonic()
        ckpt.save(1, state)
        assert time.monotonic() - began < 15, "2,048 calls of 10 ms each were waited for"
