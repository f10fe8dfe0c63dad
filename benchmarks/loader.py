"""What resumable() costs a loader, and what it costs to find a place: in one run, beside the loader itself.

python benchmarks/loader.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset

from safe_ckpt.data import resumable


class Trivial(Dataset):
    """Costs nothing to read: what is measured is the loader."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def pace(loader: DataLoader, batches: int) -> float:
    """Batches a second."""
    given = iter(loader)
    next(given)
    begun = time.perf_counter()
    for _ in range(batches):
        next(given)
    return batches / (time.perf_counter() - begun)


def finding(size: int, kind: dict) -> tuple[float, float, int]:
    """Seconds to the first batch of an epoch, and to the one behind the middle after a resume; bytes of the state."""
    loader = resumable(DataLoader(Trivial(size), batch_size=1, collate_fn=list, **kind))
    begun = time.perf_counter()
    given = iter(loader)
    next(given)
    first_s = time.perf_counter() - begun
    state = {**loader.state_dict(), "batches": size // 2}
    again = resumable(DataLoader(Trivial(size), batch_size=1, collate_fn=list, **kind))
    again.load_state_dict(state)
    begun = time.perf_counter()
    next(iter(again))
    return first_s, time.perf_counter() - begun, len(json.dumps(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=40_000)
    parser.add_argument("--size", type=int, default=20_000_000, help="of the data set in which a place is looked for")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| Loader | stock, batches/s | resumable() / stock |\n|---|---|---|")
    for name, kind in {"in order": {}, "shuffle": {"shuffle": True}}.items():
        ratios, paces = [], []
        for number in range(options.rounds):
            stock = DataLoader(Trivial(4 * options.batches + 8), batch_size=4, collate_fn=list, **kind)
            pair = [
                stock,
                resumable(DataLoader(Trivial(4 * options.batches + 8), batch_size=4, collate_fn=list, **kind)),
            ]
            found = {}
            for loader in pair if number % 2 else reversed(pair):
                found[loader is stock] = pace(loader, options.batches)
            paces.append(found[True])
            ratios.append(found[False] / found[True])
        print(f"| {name} | {statistics.median(paces):,.0f} | {statistics.median(ratios):.3f} |")
    print("\n| Order | first batch of an epoch, s | first batch at the place, s | state, bytes |\n|---|---|---|---|")
    for name, kind in {"in order": {}, "shuffle": {"shuffle": True}}.items():
        first_s, place_s, size = finding(options.size, kind)
        print(f"| {name}, place {options.size // 2:,} | {first_s:.3f} | {place_s:.3f} | {size} |")


if __name__ == "__main__":
    main()
