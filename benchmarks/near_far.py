"""Near and far: what a far directory costs a save, one without an answer too; and how soon a killed job makes its next step.

Ratios of one run. Three questions:

    python benchmarks/near_far.py calls --mebibytes 128
    python benchmarks/near_far.py frozen --seconds 600 --mebibytes 16
    python benchmarks/near_far.py restarts --mebibytes 2048

``calls``: saves on ``/dev/shm`` in turn, without a mirror, with one in a directory, and with one whose file system is stopped
(bindfs, needs root). ``frozen``: a job whose far end is stopped for so long, and comes back; beside it one without a far end.
``restarts``: a job that saved there, or on a disk, with a mirror behind it, is killed with all its processes; the time from the
kill to the first step of the next one, with the files on the disk in the page cache and not. The start of Python and torch is
in it; what of it is the resume is told besides.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, Timeouts

MEMORY = Path("/dev/shm")
TENSORS = 16


def made(mebibytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """A state of so many MiB."""
    size = mebibytes * (1 << 20) // 4 // TENSORS
    return {"model": {f"t{number}": torch.full((size,), float(number)) for number in range(TENSORS)}}


@contextlib.contextmanager
def stopped(folder: Path) -> Iterator[Path]:
    """A file system that gives no answer once ``stop`` was sent to its server."""
    (folder / "behind").mkdir()
    (folder / "stopped").mkdir()
    server = subprocess.Popen(["bindfs", "-f", folder / "behind", folder / "stopped"])
    try:
        while not os.path.ismount(folder / "stopped"):
            time.sleep(0.01)
        yield folder / "stopped"
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", folder / "stopped"], check=True)
        server.wait(30)


def calls(mebibytes: int, rounds: int, disk: Path) -> dict[str, float]:
    """Seconds of ``save()`` and until it is committed: medians by way."""
    state = made(mebibytes)
    with contextlib.ExitStack() as stack:
        near = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        far = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk)))
        dead = stack.enter_context(stopped(far))
        quick = Timeouts(shutdown_s=2.0)
        ways = {}
        for name, url in (("none", None), ("far", far / "run"), ("stopped", dead / "run")):
            mirror = Mirror() if url is None else Mirror(url=str(url), keep_last=1)
            config = CheckpointConfig(mirror=mirror, timeouts=quick, retention=Retention(keep_last=1))
            ways[name] = stack.enter_context(Checkpointer(near / name, config))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for step in range(rounds + 1):
            for name, ckpt in ways.items():
                for tensor in state["model"].values():
                    tensor.add_(1)  # what did not change would be shared
                begun = time.perf_counter()
                handle = ckpt.save(step, state)
                called = time.perf_counter()
                handle.result()
                if step:
                    found[name].append((called - begun, time.perf_counter() - begun))
            if not step:
                subprocess.run(["pkill", "-STOP", "-f", f"bindfs.*{far}"], check=True)
        subprocess.run(["pkill", "-CONT", "-f", f"bindfs.*{far}"], check=True)
    medians = {}
    for name, rows in found.items():
        medians[f"{name}: call_s"] = statistics.median(row[0] for row in rows)
        medians[f"{name}: committed_s"] = statistics.median(row[1] for row in rows)
    for name in ("far", "stopped"):
        for figure in ("call_s", "committed_s"):
            medians[f"{name} / none, {figure}"] = medians[f"{name}: {figure}"] / medians[f"none: {figure}"]
    return medians


def frozen(mebibytes: int, seconds: float, disk: Path) -> dict[str, float]:
    """Saves near while the far end is stopped for ``seconds``: how many fail, what a call takes, when the newest is far."""
    state, errors, far_since = made(mebibytes), 0, 0.0
    with contextlib.ExitStack() as stack:
        near = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        dead = stack.enter_context(stopped(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk)))))
        mirror = Mirror(url=str(dead / "run"), keep_last=1)
        ways = {
            name: stack.enter_context(
                Checkpointer(near / name, CheckpointConfig(mirror=config, retention=Retention(keep_last=2)))
            )
            for name, config in (("none", Mirror()), ("frozen", mirror))
        }
        ways["frozen"].save(0, state)
        ways["frozen"].wait(mirrored=True)
        subprocess.run(["pkill", "-STOP", "-f", f"bindfs.*{dead}"], check=True)
        calls_s: dict[str, list[float]] = {name: [] for name in ways}
        begun, step = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            step += 1
            for name, ckpt in ways.items():
                state["model"]["t0"].add_(1)
                called = time.perf_counter()
                handle = ckpt.save(step, state)
                calls_s[name].append(time.perf_counter() - called)
                try:
                    handle.result()
                except OSError:
                    errors += 1
            time.sleep(0.5)
        subprocess.run(["pkill", "-CONT", "-f", f"bindfs.*{dead}"], check=True)
        back = time.monotonic()
        ways["frozen"].wait(mirrored=True)
        far_since = time.monotonic() - back
        newest = max(int(path.name[-8:]) for path in (near / "frozen").glob("step-*"))
    medians = {
        name: statistics.median(values[1:]) for name, values in calls_s.items()
    }  # the first ones make their buffers
    return {
        "saves": step,
        "failed": errors,
        "steps lost": step - newest,
        "none: call_s": medians["none"],
        "frozen: call_s": medians["frozen"],
        "frozen / none, call_s": medians["frozen"] / medians["none"],
        "the newest is far, seconds after it came back": far_since,
    }


def job(folder: Path, mebibytes: int, far: Path) -> None:
    """Resume, say that the first step is made, save, have it copied, and wait to be killed."""
    state = made(mebibytes)
    config = CheckpointConfig(mirror=Mirror(url=str(far), keep_last=1), retention=Retention(keep_last=1))
    begun = time.monotonic()
    with Checkpointer(folder, config) as ckpt:
        info = ckpt.resume(state)
        resumed = time.monotonic() - begun
        for tensor in state["model"].values():
            tensor.add_(1)
        print("stepped", time.time(), resumed, flush=True)
        if info is None:
            ckpt.save(0, state)
            ckpt.wait(mirrored=True)
        print("saved", flush=True)
        time.sleep(3600)


def restarts(mebibytes: int, rounds: int, disk: Path) -> dict[str, float]:
    """Seconds from the kill of a job to the first step of the next one: medians by where its checkpoint is."""
    command = [sys.executable, __file__, "job", "--mebibytes", str(mebibytes)]
    found: dict[str, list[tuple[float, float]]] = {"memory": [], "disk, cached": [], "disk, cold": []}
    with tempfile.TemporaryDirectory(dir=MEMORY) as near, tempfile.TemporaryDirectory(dir=disk) as slow:
        for _ in range(rounds):
            for name, top in (("memory", near), ("disk, cached", slow), ("disk, cold", slow)):
                folder, far = Path(top) / "run", Path(slow) / "far"
                for old in (folder, far):
                    shutil.rmtree(old, ignore_errors=True)
                begin = [*command, "--folder", str(folder), "--far", str(far)]
                first = subprocess.Popen(begin, stdout=subprocess.PIPE, text=True, start_new_session=True)
                wait_for(first, "saved")
                if name == "disk, cold":
                    forget(folder)
                killed = time.time()
                kill(first)
                again = subprocess.Popen(begin, stdout=subprocess.PIPE, text=True, start_new_session=True)
                stepped, resumed = wait_for(again, "stepped").split()
                found[name].append((float(stepped) - killed, float(resumed)))
                wait_for(again, "saved")
                kill(again)
                print(name, *found[name][-1], file=sys.stderr, flush=True)
    medians = {}
    for name, rows in found.items():
        medians[f"{name}: s"] = statistics.median(row[0] for row in rows)
        medians[f"{name}: of it the resume"] = statistics.median(row[1] for row in rows)
    for name in ("disk, cached", "disk, cold"):
        medians[f"{name} / memory"] = medians[f"{name}: s"] / medians["memory: s"]
        medians[f"{name} / memory, the resume"] = (
            medians[f"{name}: of it the resume"] / medians["memory: of it the resume"]
        )
    return medians


def kill(job: "subprocess.Popen[str]") -> None:
    """SIGKILL to all processes of a job."""
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def wait_for(job: "subprocess.Popen[str]", word: str) -> str:
    """Read until a line begins with ``word``. Returns the rest of it."""
    for line in job.stdout or ():
        first, _, rest = line.strip().partition(" ")
        if first == word:
            return rest
    raise RuntimeError(f"the job ended with status {job.wait()} before it said {word!r}")


def forget(folder: Path) -> None:
    """Have the kernel drop what it has cached of the files."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("calls", "frozen", "restarts", "job"))
    parser.add_argument("--seconds", type=float, default=600, help="of frozen")
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="on the disk")
    parser.add_argument("--far", type=Path, default=Path("runs/far"), help="of a job")
    options = parser.parse_args()
    if options.question == "job":
        job(options.folder, options.mebibytes, options.far)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.absolute()
    if options.question == "frozen":
        found = frozen(options.mebibytes, options.seconds, folder)
    else:
        found = (calls if options.question == "calls" else restarts)(options.mebibytes, options.rounds, folder)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
