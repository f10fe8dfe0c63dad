"""What no way to save can beat: a warm copy of the state in memory, and a write of as many bytes past the page cache.

Besides, what fresh memory of that size costs; the ways that write through the page cache pay for that.

python benchmarks/reference.py --mebibytes 128
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from disk import faulted_memory, first_touch_seconds, rounded_to_pages, sync_file, write_direct
from training import copy_seconds, make


def direct_write_seconds(folder: Path, size: int, *, times: int) -> list[float]:
    """Every time to a new file, as checkpoints are."""
    memory = faulted_memory(rounded_to_pages(size))
    taken = []
    for number in range(times):
        path = folder / f"raw-{number}"
        begun = time.perf_counter()
        write_direct(path, memory)
        sync_file(path)
        taken.append(time.perf_counter() - begun)
    memory.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=768)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--calibrate", action="store_true", help="also print the batch that loops should use")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    training = make("compute-bound", options.mebibytes, 0 if options.calibrate else 8)
    copies = copy_seconds(list(training.tensors()), times=options.times + 1)[1:]
    fresh = [first_touch_seconds(training.state_bytes) for _ in range(options.times)]
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
    try:
        writes = direct_write_seconds(folder, training.state_bytes, times=options.times)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        json.dumps(
            {
                "state_bytes": training.state_bytes,
                "batch": training.batch,
                "memcpy_s": copies,
                "first_touch_s": fresh,
                "direct_write_s": writes,
            }
        )
    )


if __name__ == "__main__":
    main()
