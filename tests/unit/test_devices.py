"""The device types of this process: which are asked at all, which are in use, and their generators, with pretended modules."""

import functools
import logging
import multiprocessing
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from safe_ckpt import Checkpointer, RngState, devices
from safe_ckpt.core.staging import device
from safe_ckpt.core.staging.device import Devices
from safe_ckpt.core.state import rng


class Generators:
    """torch's generators on some devices of one type: numbers, here."""

    def __init__(self, monkeypatch, kind, count=2):
        self.states = [torch.tensor([index, 7], dtype=torch.uint8) for index in range(count)]
        for name, function in {
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "device_count": lambda: count,
            "get_rng_state": lambda device: self.states[device.index].clone(),
            "set_rng_state": self.set_state,
        }.items():
            monkeypatch.setattr(getattr(torch, kind), name, function)

    def set_state(self, state, device):
        self.states[device.index] = state

    def numbers(self):
        return [state.tolist() for state in self.states]


def test_a_question_initialises_no_device(monkeypatch):
    """A process that has not used its devices may still fork: whether one is there is a question to its driver."""

    def driver(*_):
        raise AssertionError("a driver was asked")

    for kind in ("cuda", "xpu", "mtia"):
        for name in ("is_available", "device_count", "current_device", "current_stream", "init", "_lazy_init"):
            monkeypatch.setattr(getattr(torch, kind), name, driver)
    assert devices.in_use() == []
    assert devices.where_the_caller_works() == []
    assert Devices().here() == []
    assert rng.get_rng_state().keys() <= {"python", "torch", "numpy"}


def test_the_types_are_those_of_torch_and_that_of_a_plug_in(monkeypatch):
    """Neither the host, nor one for which torch has no module."""
    assert {"cuda", "xpu", "mtia"} <= set(devices.types())
    assert not {"cpu", "meta", "hpu"} & set(devices.types())
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_initialized=lambda: True), raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    assert devices.types()[-1] == "npu"


def test_a_module_that_does_not_say_whether_it_is_initialised_is_asked_whether_it_is_there():
    """As torch asks of a plug-in; in a process that was forked from one that uses it, it is not."""
    assert devices._is_in_use(SimpleNamespace(is_available=lambda: True))
    assert not devices._is_in_use(SimpleNamespace(is_available=lambda: False))
    assert not devices._is_in_use(SimpleNamespace(is_available=lambda: True, _is_in_bad_fork=lambda: True))


def test_meta_and_mps_have_no_streams():
    """Nor has the host, and nothing that torch has no module for: torch waits for each copy from there by itself."""
    assert [name for name in ("cpu", "meta", "mps", "vulkan", "cuda", "xpu", "mtia") if devices.has_streams(name)] == [
        "cuda", "xpu", "mtia",
    ]  # fmt: skip
    assert not Devices().has(torch.empty(2, device="meta"))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_each_device_are_saved_and_put_back(tmp_path, monkeypatch, kind):
    """Each under the name of its type, in the order of the devices, whatever the type."""
    generators = Generators(monkeypatch, kind)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"rng": RngState()}).result(timeout_s=30)
        before = generators.numbers()
        generators.states = [state + 1 for state in generators.states]
        assert ckpt.resume({"rng": RngState()}).step == 1
    assert generators.numbers() == before


def test_generators_of_devices_that_are_not_here_are_left_out(tmp_path, monkeypatch):
    """Fewer devices than were saved, and a type of which there is none: the others are put back."""
    with monkeypatch.context() as there:
        Generators(there, "cuda")
        Generators(there, "xpu", count=3)
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"rng": RngState()}).result(timeout_s=30)
            drawn = random.random()
    here = Generators(monkeypatch, "xpu", count=1)
    here.states[0] += 9
    with Checkpointer(tmp_path) as ckpt:
        ckpt.resume({"rng": RngState()})
    assert here.numbers() == [[0, 7]]
    assert random.random() == drawn


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_devices_that_this_process_did_not_use_yet_are_put_back(tmp_path, monkeypatch, kind):
    """A resume comes before the first use in a new process: from then on its draws are those of the run that was saved."""
    generators = Generators(monkeypatch, kind)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"rng": RngState()}).result(timeout_s=30)
        before = generators.numbers()
        generators.states = [state + 1 for state in generators.states]
        monkeypatch.setattr(getattr(torch, kind), "is_initialized", lambda: False)
        ckpt.resume({"rng": RngState()})
    assert generators.numbers() == before


def test_a_rank_without_generators_in_the_checkpoint_seeds_those_of_devices_too(monkeypatch):
    """By what rank 0 saved and by its own number: alike at each such resume, and another draw on each rank."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    saved = rng.get_rng_state()
    drawn = []
    for rank in (1, 2, 1):
        RngState().start_anew(saved, rank)
        drawn.append((random.random(), torch.rand(1).item(), float(numpy.random.rand())))
    rng.set_rng_state(saved)
    assert len(seeds) == 3
    assert (seeds[0], drawn[0]) == (seeds[2], drawn[2])
    assert seeds[0] != seeds[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_only_device_types_are_read_as_such():
    """A checkpoint may name anything: what is no device type of this process is not looked up in torch."""
    state = rng.get_rng_state()
    rng.set_rng_state({**state, "hub": [torch.zeros(1)], "nn": [torch.zeros(1)], "mps": [torch.zeros(1)]})


def test_the_text_of_all_generators_is_that_of_the_host(monkeypatch):
    """Loaders keep it for each worker, and a worker uses no device."""
    Generators(monkeypatch, "cuda")
    text = rng.all_to_text()
    monkeypatch.setattr(torch.cuda, "set_rng_state", None)  # it would be called
    rng.put_all_back(text)


def test_memory_that_cannot_be_registered_is_said_once(monkeypatch, caplog):
    """Only CUDA and ROCm register memory by its address. Each snapshot would ask for it again."""
    monkeypatch.setattr(device, "_say_unpinned", functools.cache(device._say_unpinned.__wrapped__))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert Devices().register(4096, 4096, torch.device("xpu", 0)) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert "cannot be pinned for xpu devices" in message


@pytest.mark.parametrize("refused", [0, 712])
def test_host_memory_is_registered_on_the_device_that_is_named(monkeypatch, refused):
    """And given back there, by whatever thread. After a refusal the error is taken away: the next kernel would raise it."""
    log = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
            log.append(("register", address, size, flags))
            return refused

        def cudaHostUnregister(self, address):  # noqa: N802
            log.append(("unregister", address))

        def cudaGetLastError(self):  # noqa: N802
            log.append("error taken away")

    class Standing:
        def __init__(self, at):
            self.at = at

        def __enter__(self):
            log.append(f"on {self.at}")

        def __exit__(self, *error):
            log.append(f"from {self.at}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", Standing)
    take_back = Devices().register(4096, 8192, torch.device("cuda", 1))
    registered = ["on cuda:1", ("register", 4096, 8192, 0)]
    if refused:
        assert take_back is None
        assert log == [*registered, "error taken away", "from cuda:1"]
        return
    take_back()
    assert log == [*registered, "from cuda:1", "on cuda:1", ("unregister", 4096), "from cuda:1"]


def _forked(results):
    results.put((devices.in_use(), sorted(rng.get_rng_state())))


def test_a_forked_process_asks_nothing_of_its_parents_device(monkeypatch):
    """Of CUDA's own: initialised in the parent, it is not in a child, and must not be touched there."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_forked, args=(results,))
    child.start()
    found, names = results.get(timeout=60)
    child.join()
    assert found == []
    assert "cuda" not in names
