"""Loading from cold cache: ``Checkpointer.resume``, which verifies every byte, against loads that verify nothing.

Each load runs in a fresh process, after the files were dropped from the page cache; it ends when model and optimizer have
their state and every page of it is in memory. What was loaded is compared with what was saved.

On a virtual machine the first touch of memory that the host has taken back can take seconds per GiB, whoever asks for it.
So it is measured twice: on memory as the machine gives it, and right after as much has been touched and freed again.

    python benchmarks/resume.py --mebibytes 128
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import runner
import safetensors.torch
import torch
from disk import evict, first_touch_seconds
from training import Training, make

from safe_ckpt import Checkpointer

OURS = "safe_ckpt, verified"
TENSORS = ("exp_avg", "exp_avg_sq", "step")


def write_all(training: Training, folder: Path) -> None:
    with Checkpointer(folder / "ours") as ckpt:
        ckpt.save(1, {"model": training.model, "optimizer": training.optimizer})
    optimizer = training.optimizer.state_dict()
    torch.save({"model": training.model.state_dict(), "optimizer": optimizer}, folder / "state.pt")
    flat = {f"{i}.{name}": state[name] for i, state in optimizer["state"].items() for name in TENSORS}
    safetensors.torch.save_file(training.model.state_dict(), folder / "model.safetensors")
    safetensors.torch.save_file(flat, folder / "optimizer.safetensors")


def load_ours(training: Training, folder: Path) -> float:
    """Returns what opening and closing took, which is not part of loading."""
    opening = time.perf_counter()
    with Checkpointer(folder / "ours") as ckpt:
        begun = time.perf_counter()
        ckpt.resume({"model": training.model, "optimizer": training.optimizer})
        done = time.perf_counter()
    return begun - opening + time.perf_counter() - done


def load_torch(training: Training, folder: Path, *, mapped: bool = False) -> None:
    state = torch.load(folder / "state.pt", weights_only=True, mmap=mapped)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def load_mapped(training: Training, folder: Path) -> None:
    load_torch(training, folder, mapped=True)


def load_safetensors(training: Training, folder: Path) -> None:
    training.model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in safetensors.torch.load_file(folder / "optimizer.safetensors").items():
        index, name = key.split(".")
        state.setdefault(int(index), {})[name] = tensor
    groups = training.optimizer.state_dict()["param_groups"]
    training.optimizer.load_state_dict({"state": state, "param_groups": groups})


WAYS: dict[str, Callable[[Training, Path], float | None]] = {
    OURS: load_ours,
    "torch.load": load_torch,
    "torch.load, mmap": load_mapped,
    "safetensors.load_file": load_safetensors,
}


BACKED = ", memory touched before"
BACKED_X_STATE = 3  # what was read in the page cache, a copy of it, and the state


def measure(way: str, mebibytes: int, folder: Path, *, backed: bool) -> dict[str, Any]:
    training = make("compute-bound", mebibytes, batch=8)
    torch.set_num_threads(os.cpu_count() or 1)
    expected = training.digest()
    groups = [dict(group) for group in training.optimizer.param_groups]
    training.scramble()
    for group, old in zip(training.optimizer.param_groups, groups, strict=True):
        group["lr"] = old["lr"]  # not in the safetensors file
    touched_s = first_touch_seconds(BACKED_X_STATE * training.state_bytes) if backed else None
    begun = time.perf_counter()
    around_s = WAYS[way](training, folder)
    for tensor in training.tensors():
        tensor.view(-1)[::1024].sum()  # one element per page: a mapped file that nobody has read is no state yet
    total_s = time.perf_counter() - begun
    if training.digest() != expected:
        raise SystemExit(f"{way}: what was loaded is not what was saved")
    return {
        "load_s": total_s - (around_s or 0.0),
        "open_and_close_s": around_s,
        # What is still a mapped file is copied page by page when the optimizer writes to it.
        "first_step_s": training.step().total_s,
        "touched_before_s": touched_s,
        "state_bytes": training.state_bytes,
    }


def compare(mebibytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    written = runner.run("resume.py", "--write", folder, "--mebibytes", mebibytes, timeout_s=300)
    if "error" in written:
        return written
    loads: dict[str, list[dict[str, Any]]] = {}
    jobs = [(way, backed) for way in WAYS for backed in (False, True)]
    for _ in range(rounds):
        for way, backed in random.sample(jobs, len(jobs)):
            evict(path for path in folder.rglob("*") if path.is_file())
            arguments = ["--load", way, "--from", folder, "--mebibytes", mebibytes]
            run = runner.run("resume.py", *arguments, *(["--backed"] if backed else []), timeout_s=300)
            loads.setdefault(f"{way}{BACKED if backed else ''}", []).append(run)
    errors = {way: runs[0]["error"] for way, runs in loads.items() if "error" in runs[0]}
    measured = {way: [run for run in runs if "error" not in run] for way, runs in loads.items() if way not in errors}
    medians = {way: statistics.median(run["load_s"] for run in runs) for way, runs in measured.items()}
    stepped = {
        way: statistics.median(run["load_s"] + run["first_step_s"] for run in runs) for way, runs in measured.items()
    }
    return {
        "loads": loads,
        "median_s": medians,
        "median_with_first_step_s": stepped,
        "ratio": ratio(medians, ""),
        "ratio_backed": ratio(medians, BACKED),
        "ratio_with_first_step": ratio(stepped, BACKED),
        "errors": errors,
    }


def ratio(medians: Mapping[str, float], memory: str) -> float | None:
    """Ours against the fastest of the others, on the same kind of memory."""
    found = {way: medians[way + memory] for way in WAYS if way + memory in medians}
    ours = found.pop(OURS, None)
    return ours / min(found.values()) if ours and found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--backed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--from", type=Path, dest="source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_all(make("compute-bound", options.mebibytes, batch=8), options.write)
        print("{}")
    elif options.load:
        print(json.dumps(measure(options.load, options.mebibytes, options.source, backed=options.backed)))
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
        try:
            print(json.dumps(compare(options.mebibytes, options.rounds, folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
