"""What burns cores beside training in life: worker processes of a DataLoader that decompress and convert what a step gets."""

import statistics
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from training import Training

SIDE = 512
LENGTH = 1 << 20
UNDISTURBED = 3
CORES = 1.0  # so much of their time the workers use, all together


class Images(Dataset[torch.Tensor]):
    """Compressed images; a sample is ``count`` of them, decoded, scaled and averaged."""

    def __init__(self, count: int) -> None:
        noise = np.random.default_rng(0).integers(0, 32, (SIDE, SIDE, 3), dtype=np.uint8)
        self._data = zlib.compress(noise.tobytes())
        self.count = count

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        total = np.zeros((SIDE, SIDE, 3), dtype=np.float32)
        for _ in range(self.count):
            image = np.frombuffer(zlib.decompress(self._data), dtype=np.uint8).reshape(SIDE, SIDE, 3)
            total += (image[:, ::-1].astype(np.float32) / 255 - 0.5) / 0.25
        return torch.from_numpy(total / self.count)


def decoded(training: Training, workers: int) -> None:
    """From now on every step of ``training`` begins with a sample that took about one step's time of a core to decode."""
    step_s = statistics.median(training.step().total_s for _ in range(UNDISTURBED))
    begun = time.perf_counter()
    Images(UNDISTURBED)[0]
    count = max(1, round(CORES * step_s * UNDISTURBED / (time.perf_counter() - begun)))
    samples: Iterator[Any] = iter(DataLoader(Images(count), batch_size=1, num_workers=workers))
    work = training.work

    def work_with_data() -> None:
        next(samples)
        work()

    training.work = work_with_data
