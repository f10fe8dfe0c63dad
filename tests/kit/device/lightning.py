"""What Lightning needs to train on the late accelerator: its ``Accelerator``, and a DDP strategy for it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy

_COUNT = 3


class LateAccelerator(Accelerator):
    """For ``SingleDeviceStrategy(device, accelerator=LateAccelerator())``, or ``LateDDP``."""

    def setup_device(self, device: torch.device) -> None:
        """Stand on the device, as a CUDAAccelerator does."""
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        """There is no cache to clear."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """As they are."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The first ones."""
        return [torch.device("late", number) for number in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """All."""
        return _COUNT

    @staticmethod
    def is_available() -> bool:
        """Always: ``device.load()`` has been called."""
        return True

    @staticmethod
    def name() -> str:
        """Lightning's word for it."""
        return "late"


class LateDDP(DDPStrategy):
    """DDP over the group of the late devices.

    Args:
        devices: one for each rank.
        backend: of the process group; None: what Lightning takes for the device.
    """

    def __init__(self, devices: list[torch.device], backend: str | None) -> None:
        super().__init__(accelerator=LateAccelerator(), parallel_devices=devices, process_group_backend=backend)

    def determine_ddp_device_ids(self) -> None:
        """None: with ids Lightning would make a stream of CUDA for DDP (``DDPStrategy._setup_model``)."""
