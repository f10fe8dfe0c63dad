"""What the audit's hooks cost a script: the time of a step with them over that without, measured in turns.

python benchmarks/audit_cost.py                # weights and moments of 9.9 MiB, about 10 ms a step
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import safe_ckpt.tools.audit

HOOK = Path(safe_ckpt.tools.audit.__file__).with_name("hook")
WIDTH = 328  # of 8 layers, in float32 with two moments: every byte of it is digested
LOOP = """
import sys, time, torch
steps, pause, width = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
begun, worked = time.perf_counter(), time.process_time()
for batch in torch.randn(steps, 4, width):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(pause)
print((time.perf_counter() - begun) / steps, (time.process_time() - worked) / steps)
"""


def seconds_a_step(steps: int, pause: float, *, audited: bool) -> tuple[float, float]:
    """Of a process of its own: as a clock has it, and of the processor, which other jobs of the machine disturb less."""
    with tempfile.TemporaryDirectory() as records:
        more = {"PYTHONPATH": str(HOOK), "SAFE_CKPT_AUDIT": records, "SAFE_CKPT_AUDIT_STOP": "0"} if audited else {}
        command = [sys.executable, "-c", LOOP, str(steps), str(pause), str(WIDTH)]
        ended = subprocess.run(command, env={**os.environ, **more}, check=True, capture_output=True, text=True)
        told = sum(file.read_bytes().count(b"\n") for file in Path(records).iterdir())
    if told != (steps if audited else 0):
        raise SystemExit(f"{told} lines of {steps} steps")
    clock, processor = map(float, ended.stdout.split())
    return clock, processor


def main() -> None:
    """Print each round, and the median of their ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-ms", type=float, default=6.0, help="in which a step does nothing")
    options = parser.parse_args()
    ratios = []
    for _ in range(options.rounds):
        plain, audited = (seconds_a_step(options.steps, options.pause_ms / 1e3, audited=one) for one in (False, True))
        ratios.append(audited[0] / plain[0])
        print(
            f"plain {plain[0] * 1e3:.1f} ms, audited {audited[0] * 1e3:.1f} ms a step: {ratios[-1]:.2f} x;"
            f" of the processor {plain[1] * 1e3:.1f} and {audited[1] * 1e3:.1f} ms",
            flush=True,
        )
    print(f"median of {options.rounds}: {statistics.median(ratios):.2f} x")


if __name__ == "__main__":
    main()
