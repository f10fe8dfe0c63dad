"""What safe_ckpt does on this machine's GPU: one command, at most 20 minutes, a table. What ``make gpu-check`` runs.

It has **never been run on a GPU**: where it was written there is none. Each check is a process of its own with a time limit.
What is not installed, or needs what this machine has not, is skipped by name. Without a GPU it says so and exits with 0.
``--device cpu`` shows only that the script itself works: its figures mean nothing.

    make gpu-check
    python benchmarks/gpu/check.py --only "gate: overlapped" --only "kill and resume: DDP"
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

HERE = Path(__file__).resolve().parent
OVERALL_S = 1200
PEERS = ("torch", "lightning", "accelerate", "deepspeed", "torch_checkpointing")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table.

    Attributes:
        name: of the row.
        script: beside this file.
        arguments: for it.
        needs: packages that must be there.
        gpu_alone: it means nothing, or cannot run, without a GPU.
        limit_s: for its process.
    """

    name: str
    script: str
    arguments: Sequence[str]
    needs: Sequence[str] = ()
    gpu_alone: bool = False
    limit_s: float = 180


def _checks() -> list[Check]:
    copies = [
        Check(name=f"copies: {how}", script="measures.py", arguments=["copies", how], gpu_alone=True)
        for how in ("pinned", "unpinned")
    ]
    gates = [
        Check(name=f"gate: {how}", script="measures.py", arguments=["gate", how])
        for how in ("eager", "overlapped", "overlapped, unpinned", "overlapped, side stream")
    ]
    ways = {
        "safe_ckpt eager": (),
        "safe_ckpt overlapped": (),
        "torch_checkpointing": ("torch_checkpointing",),
        "torch_checkpointing prewarmed": ("torch_checkpointing",),
        "DCP async_save thread": (),
        "DCP async_save process, async staging": (),
    }
    stalls = [
        Check(name=f"stall: {way}", script="measures.py", arguments=["stall", way], needs=needs)
        for way, needs in ways.items()
    ]
    kills = [
        Check(
            name=f"kill and resume: {kind}",
            script="programs.py",
            arguments=["--kind", kind],
            needs=needs,
            gpu_alone=kind == "Lightning FSDPStrategy",
            limit_s=300,
        )
        for kind, needs in {
            "plain": (),
            "plain, overlapped": (),
            "DDP": (),
            "FSDP2": (),
            "Lightning": ("lightning",),
            "Lightning FSDPStrategy": ("lightning",),
            "Accelerate": ("accelerate",),
            "DeepSpeed ZeRO-2": ("deepspeed",),
        }.items()
    ]
    return [*copies, *gates, *kills, Check(name="left behind", script="measures.py", arguments=["left"]), *stalls]


def verdict(check: Check, options: argparse.Namespace, folder: Path, left_s: float) -> tuple[str, str]:
    """Run a check; how it went in a word, and its figures or the reason."""
    absent = [name for name in check.needs if util.find_spec(name) is None]
    if absent:
        return "skipped", f"{', '.join(absent)} is not installed"
    if check.gpu_alone and options.device == "cpu":
        return "skipped", "needs a GPU"
    if left_s < 5:
        return "skipped", f"{OVERALL_S} s are over"
    limit_s = min(check.limit_s, left_s)
    own = ["--device", options.device, "--mebibytes", str(options.mebibytes), "--folder", str(folder)]
    command = [sys.executable, str(HERE / check.script), *check.arguments, *own]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return "FAILED", f"not done after {limit_s:.0f} s"
    if done.returncode:
        (options.out / f"{check.name}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        last = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        return "FAILED", last[:160]
    return "passed", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def device_name(device: str) -> str | None:
    """What the GPU is called; None where there is none."""
    import torch

    if device == "cpu":
        return "cpu, on which the figures mean nothing"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mebibytes", type=int, default=2048, help="parameters and Adam state together")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-check"), help="on the disk that is measured")
    options = parser.parse_args()
    name = device_name(options.device)
    if name is None:
        print("no GPU")
        return
    checks = [check for check in _checks() if not options.only or check.name in options.only]
    if not checks:
        parser.error(f"expected one of {', '.join(check.name for check in _checks())}")
    options.out = options.folder.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {peer: metadata.version(peer) for peer in PEERS if util.find_spec(peer) is not None}
    print(f"{name}; {versions}; {options.mebibytes} MiB; {time.strftime('%Y-%m-%d')}", flush=True)
    begun, rows = time.monotonic(), []
    for check in checks:
        folder = Path(tempfile.mkdtemp(dir=options.out))
        at = time.monotonic()
        try:
            state, text = verdict(check, options, folder, OVERALL_S - (at - begun))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows.append({"check": check.name, "state": state, "text": text, "seconds": round(time.monotonic() - at, 1)})
        print(f"{check.name:46} {state:8} {rows[-1]['seconds']:6.1f} s  {text}", flush=True)
    (options.out / "table.json").write_text(json.dumps({"device": name, "versions": versions, "rows": rows}, indent=1))
    failed = [row["check"] for row in rows if row["state"] == "FAILED"]
    print(f"{len(failed)} of {len(rows)} failed{': ' if failed else ''}{', '.join(failed)}; {options.out}/table.json")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
