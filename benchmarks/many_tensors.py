"""Many small tensors: the call of ``Checkpointer.save`` against ``torch.save`` of the same dict into nothing.

python benchmarks/many_tensors.py
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from safe_ckpt import Checkpointer


class Nowhere(io.RawIOBase):
    """Takes bytes and forgets them."""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return memoryview(data).nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    state = {f"layer.{i}": torch.randn(options.bytes // 4) for i in range(options.tensors)}
    options.folder.mkdir(parents=True, exist_ok=True)
    calls, pickles = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, Checkpointer(folder) as ckpt:
        for number in range(options.rounds + 1):
            begun = time.perf_counter()
            torch.save({"model": state}, Nowhere())
            pickles.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            handle = ckpt.save(number, {"model": state})
            calls.append(time.perf_counter() - begun)
            handle.result(timeout_s=300)
    first_s, calls, pickles = calls[0], calls[1:], pickles[1:]
    print(
        json.dumps(
            {
                "tensors": options.tensors,
                "bytes_each": options.bytes,
                "first_call_s": first_s,
                "call_s": calls,
                "torch_save_s": pickles,
                "ratio": statistics.median(calls) / statistics.median(pickles),
            }
        )
    )


if __name__ == "__main__":
    main()
