"""What saving costs a training loop, in a fresh process: one way to save, one line of JSON.

Training goes on until each save is durable. ``lost_s`` is what the loop lost by a save: the call, the gate before the
optimizer, and what the first step and the others meanwhile took longer than undisturbed ones. What the last save wrote is
loaded back and compared, bit for bit; a wrong answer ends with an error instead of figures.

    python benchmarks/loop.py --way "safe_ckpt eager" --mebibytes 128
"""

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends
from decoding import decoded
from disk import faulted_memory, rounded_to_pages, write_direct
from memory import Watermarks
from training import KINDS, Step, Training, make

SETTLE_S = 6.0  # a peer that starts a process of its own has it running by then, as in any real run
UNDISTURBED = 4
BUFFER = 64 << 20


@dataclass
class Save:
    """One save as it was measured."""

    call_s: float
    durable_s: float
    steps: list[Step]
    direct_s: float = 0.0

    def to_json(self, undisturbed_s: float) -> dict[str, Any]:
        gate_s = sum(step.gate_s for step in self.steps)
        first_s, *others_s = [step.total_s - step.gate_s - undisturbed_s for step in self.steps]
        return {
            "call_s": self.call_s,
            "gate_s": gate_s,
            "first_step_s": first_s,
            "other_steps_s": sum(others_s),
            "lost_s": self.call_s + gate_s + first_s + sum(others_s),
            "durable_s": self.durable_s,
            "direct_s": self.direct_s,
            "steps_s": [step.total_s for step in self.steps],
        }


class Watch(threading.Thread):
    """Waits until a save is durable, and looks at the clock then."""

    def __init__(self, backend: backends.Backend) -> None:
        super().__init__(daemon=True)
        self._backend = backend
        self.at = 0.0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._backend.finish()
        except BaseException as error:  # for the thread that trains
            self.error = error
        self.at = time.perf_counter()


class Loop:
    """Training with one backend."""

    def __init__(self, training: Training, backend: backends.Backend) -> None:
        self.training = training
        self.backend = backend
        self.marks = Watermarks()
        self.undisturbed: list[list[float]] = []
        self.direct: list[float] = []
        self._buffer = faulted_memory(BUFFER)

    def go_undisturbed(self) -> None:
        self.undisturbed.append([self.training.step(self.backend.gate).total_s for _ in range(UNDISTURBED)])

    def write_direct(self, folder: Path) -> None:
        """What the disk itself takes for as many bytes just now: on a virtual one that changes from minute to minute."""
        path = folder / "direct.bin"
        begun = time.perf_counter()
        write_direct(path, self._buffer, rounded_to_pages(self.training.state_bytes))
        self.direct.append(time.perf_counter() - begun)
        path.unlink()

    def undisturbed_s(self, number: int) -> float:
        """The median step right before and right after a save: what else the machine does changes with time."""
        return statistics.median(self.undisturbed[number] + self.undisturbed[number + 1])

    def prepare(self) -> dict[str, Any]:
        begun = time.perf_counter()
        self.backend.prepare()
        call_s = time.perf_counter() - begun
        steps = []
        while time.perf_counter() - begun < SETTLE_S:
            steps.append(self.training.step(self.backend.gate).total_s)
        undisturbed_s = statistics.median(steps[len(steps) // 2 :])
        return {"call_s": call_s, "stolen_s": sum(steps) - len(steps) * undisturbed_s, "steps_s": steps}

    def save(self, number: int) -> Save:
        begun = time.perf_counter()
        self.backend.save(number)
        call_s = time.perf_counter() - begun
        watch = Watch(self.backend)
        steps: list[Step] = []
        while watch.is_alive() or not steps:
            steps.append(self.training.step(self.backend.gate))
            self.marks.look()
        if watch.error is not None:
            raise watch.error
        return Save(call_s, watch.at - begun, steps)


def measure(way: str, training: Training, saves: int, folder: Path) -> dict[str, Any]:
    backend = backends.make(way)
    loop = Loop(training, backend)
    loop.marks.begin()
    backend.setup(training.model, training.optimizer, folder)
    prepared = loop.prepare()
    loop.go_undisturbed()
    loop.write_direct(folder)
    done = []
    for number in range(saves + 1):
        expected = training.digest() if number == saves else None
        done.append(loop.save(number))
        loop.go_undisturbed()
        loop.write_direct(folder)
        done[-1].direct_s = statistics.mean(loop.direct[-2:])
    memory = loop.marks.to_json()
    training.scramble()
    backend.load(training.model, training.optimizer)
    if training.digest() != expected:
        raise SystemExit(f"{way}: what was loaded is not what was saved")
    backend.close()
    first, *others = [save.to_json(loop.undisturbed_s(number)) for number, save in enumerate(done)]
    return {
        "way": way,
        "state_bytes": training.state_bytes,
        "batch": training.batch,
        "step_s": statistics.median(step_s for block in loop.undisturbed for step_s in block),
        "undisturbed_s": loop.undisturbed,
        "prepare": prepared,
        "first": first,
        "saves": others,
        "memory": memory,
        "equal": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=backends.ENTRIES, required=True)
    parser.add_argument("--mebibytes", type=int, default=768, help="parameters and Adam state together")
    parser.add_argument("--training", choices=KINDS, default="compute-bound")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes of a DataLoader that decode what each step gets"
    )
    parser.add_argument("--batch", type=int, default=0, help="rows per step; 0 chooses")
    parser.add_argument("--saves", type=int, default=3, help="saves after the first one")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
    try:
        training = make(options.training, options.mebibytes, options.batch)
        if options.workers:
            decoded(training, options.workers)
        print(json.dumps(measure(options.way, training, options.saves, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":  # peers that spawn a process import this file again
    main()
