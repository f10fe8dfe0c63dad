"""What ``torch.get_device_module("late")`` returns: the names that torch and its users look for in ``torch.cuda``."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Late(types.ModuleType):
    """The accelerator, and what the tests ask of it.

    Args:
        library: the built one.
    """

    Stream, Event = torch.Stream, torch.Event

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__("torch.late")
        self._library = library
        library.late_run.restype = library.late_waiting.restype = ctypes.c_uint64

    # What the tests ask.

    def behave(
        self,
        *,
        seed: int = 0,
        chance_percent: int = 0,
        pageable_is_late: bool = False,
        refuses_registration: bool = False,
        wait_us: int = 0,
    ) -> None:
        """Set how it behaves from now on.

        Args:
            seed: of the scheduler.
            chance_percent: at each call, of one step of some stream; 0: nothing is done before somebody waits for it.
            pageable_is_late: asynchronous copies to pageable memory do not wait, which torch allows; else they do, as CUDA's.
            refuses_registration: of host memory by address.
            wait_us: each wait takes at least so long, in which other threads go on.
        """
        late, refuses = ctypes.c_bool(pageable_is_late), ctypes.c_bool(refuses_registration)
        self._library.late_set(ctypes.c_uint64(seed), chance_percent, late, refuses, wait_us)

    def fail(self, *, allocations: int = -1, operations: int = -1, copies: int = -1) -> None:
        """Let one call fail when so many have gone well; -1: none.

        Args:
            allocations: out of memory.
            operations: of those that are queued: the error shows at a later call, and at all after that.
            copies: to pinned host memory: the call itself fails.
        """
        self._library.late_fail(*map(ctypes.c_int64, (allocations, operations, copies)))

    def waiting(self) -> int:
        """How many operations are queued and not done."""
        return int(self._library.late_waiting())

    def operations(self) -> int:
        """How many were done since the process began."""
        return int(self._library.late_run())

    def forget_error(self) -> None:
        """Go on after the error of an operation, as no real device does."""
        self._library.late_forget_error()

    # What torch and its users ask.

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(self._library.late_devices())

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: torch.device | int) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: torch.device | int) -> torch.accelerator.device_index:
        return torch.accelerator.device_index(_index(device))

    def current_stream(self, device: torch.device | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    def synchronize(self, device: torch.device | int | None = None) -> None:
        torch.accelerator.synchronize(device)

    def get_amp_supported_dtype(self) -> Sequence[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _generator(self, device: torch.device | int | str) -> torch.Generator:
        self._library.late_give_default(True)
        try:
            return torch.Generator(torch.device("late", _index(device)))
        finally:
            self._library.late_give_default(False)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self._generator(index) for index in range(self.device_count()))

    def get_rng_state(self, device: torch.device | int | str = "late") -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | int | str = "late") -> None:
        self._generator(device).set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, states: Sequence[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._generator(index).manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        self._generator("late").manual_seed(seed)

    # Host memory by address, in the words of CUDA's runtime.

    def cudart(self) -> Late:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        return int(self._library.late_register(ctypes.c_uint64(address), ctypes.c_uint64(size)))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return int(self._library.late_unregister(ctypes.c_uint64(address)))


def _index(device: torch.device | int | str) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
