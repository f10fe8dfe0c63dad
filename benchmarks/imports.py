"""What importing safe_ckpt adds to ``import torch``, in fresh interpreters that take turns.

``import safe_ckpt`` loads next to nothing until a name is used, so the first use of ``Checkpointer`` is counted too.

It is measured without the garbage collector, and with it. Right after ``import torch`` the next full collection is nearly
due and takes longer than what is measured: it falls into whatever is imported next, or into the user's first objects.

python benchmarks/imports.py
"""

import argparse
import json
import statistics
import subprocess
import sys

PLAIN = "import time, gc; gc.{collector}(); a = time.perf_counter(); import torch; print(time.perf_counter() - a)"
OURS = (
    "import time, gc; gc.{collector}(); a = time.perf_counter(); import torch; b = time.perf_counter(); import safe_ckpt; "
    "c = time.perf_counter(); safe_ckpt.Checkpointer; d = time.perf_counter(); print(d - a, c - b, d - b)"
)


def timed(program: str, collector: str = "disable") -> list[float]:
    command = [sys.executable, "-c", program.format(collector=collector)]
    return [float(x) for x in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    timed(OURS)  # byte code and page cache
    runs = [(*timed(PLAIN), *timed(OURS)) for _ in range(options.rounds)]
    plain, both, bare, used = (list(column) for column in zip(*runs, strict=True))
    collected = [timed(OURS, "enable")[2] for _ in range(options.rounds)]
    print(
        json.dumps(
            {
                "torch_s": plain,
                "torch_and_safe_ckpt_s": both,
                "import_safe_ckpt_s": bare,
                "import_and_first_use_s": used,
                "with_garbage_collector_s": collected,
                "added_with_garbage_collector_s": statistics.median(collected),
                "difference_of_medians_s": statistics.median(both) - statistics.median(plain),
                "added_s": statistics.median(used),  # the difference has the noise of two imports of torch
            }
        )
    )


if __name__ == "__main__":
    main()
