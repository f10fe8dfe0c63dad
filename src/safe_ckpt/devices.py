"""The accelerators of this process, of whatever type: CUDA and ROCm, XPU, HPU, MTIA, and those that a plug-in gives to torch.

torch has a module for each device type. What is asked of one here is what FSDP asks of it, too. A device is never initialised
by a question: a process that has not used it may still fork.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_OF_TORCH = ("cuda", "xpu", "mtia", "hpu")
_STREAMS = ("Stream", "stream", "current_stream", "current_device", "device")
_GENERATORS = ("get_rng_state", "set_rng_state", "device_count")


def types() -> list[str]:
    """The device types that this process may use: those of torch, and that of a plug-in (NPU, MUSA, and so on)."""
    accelerator = torch.accelerator.current_accelerator()  # a plug-in's, where there is one; asks no driver
    plugged_in = {accelerator.type} - set(_OF_TORCH) if accelerator is not None else set()
    return [name for name in (*_OF_TORCH, *plugged_in) if hasattr(torch, name)]


def in_use() -> list[str]:
    """The device types that are initialised in this process, which are not those of the process that forked it."""
    return [name for name in types() if _is_in_use(module_of(name))]


def module_of(device_type: str) -> Any:
    """The module of torch for a device type, such as ``torch.cuda``."""
    return torch.get_device_module(device_type)


@functools.cache
def has_streams(device_type: str) -> bool:
    """Whether work is queued for such a device on streams. Not on the host, nor on meta, nor on what waits for each copy."""
    module = getattr(torch, device_type, None)
    return device_type != "cpu" and all(hasattr(module, name) for name in _STREAMS)


def current_device(device_type: str) -> torch.device:
    """The device of a type on which the calling thread stands."""
    return torch.device(device_type, module_of(device_type).current_device())


def where_the_caller_works(beside: Sequence[torch.device] = ()) -> list[AbstractContextManager[Any]]:
    """For another thread: to stand on the caller's device of each type, and to work on its stream, behind what it has queued.

    A new thread stands on device 0, and works on the default stream of each device.

    Args:
        beside: other devices that the thread works on. Not all are asked for: each that is used takes memory.
    """
    others = [module_of(one.type).current_stream(one) for one in beside if has_streams(one.type)]
    modules = [module_of(name) for name in in_use() if has_streams(name)]
    streams = [
        *others,
        *(module.current_stream() for module in modules),
    ]  # the last of a type is where the thread stands
    return [module_of(stream.device.type).stream(stream) for stream in streams]


def wait_for(device: torch.device) -> None:
    """Block until what the calling thread has queued on a device is done; at once where nothing is queued."""
    if has_streams(device.type):
        module_of(device.type).current_stream(device).synchronize()


def generator_states(device_type: str) -> list[torch.Tensor]:
    """Where the generators of a type's devices are, one for each device; nothing where they have none. Initialises them."""
    module = module_of(device_type)
    if not all(hasattr(module, name) for name in _GENERATORS):
        return []
    return [module.get_rng_state(torch.device(device_type, index)) for index in range(module.device_count())]


def set_generator_states(device_type: str, states: Sequence[torch.Tensor]) -> None:
    """Set the generators of a type's devices, of as many as there are."""
    module = module_of(device_type)
    if not all(hasattr(module, name) for name in _GENERATORS) or not module.is_available():
        return
    for index, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, torch.device(device_type, index))


def _is_in_use(module: Any) -> bool:
    initialised = getattr(module, "is_initialized", None)
    if initialised is not None:  # before anything else: whether a device is there, CUDA's driver is asked
        return bool(initialised())
    in_bad_fork = getattr(module, "_is_in_bad_fork", None)
    return bool(module.is_available()) and not (in_bad_fork is not None and in_bad_fork())
