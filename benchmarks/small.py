"""What saving costs a model that trains in milliseconds: Lightning's ModelCheckpoint and ours take turns, in one process.

Two things are measured: 50 short fits with one save each, as in the tests of a project, and a fit that saves after every step.
``call_ms`` is what the callback's hook takes on the thread that trains, with steps that are longer than the background needs
and with steps that take no time; ``background_ms`` is from the return of the call to the commit; ``fsync_ms`` is the part of
it that the disk took to confirm. Stock calls no fsync.

    python benchmarks/small.py --quick
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from safe_ckpt.events import Committed, Event, Snapshotted
from safe_ckpt.lightning import SafeCheckpointCallback


class Module(pl.LightningModule):
    """A thousand parameters; a step takes ``pause_s`` and next to nothing."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        self.pause_s = pause_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Fsyncs:
    """Adds up what fsync takes in this process."""

    def __init__(self) -> None:
        self.seconds, self.count, self._real, self._lock = 0.0, 0, os.fsync, threading.Lock()
        os.fsync = self._timed

    def _timed(self, fd: int) -> None:
        begun = time.perf_counter()
        self._real(fd)
        with self._lock:
            self.seconds += time.perf_counter() - begun
            self.count += 1


def fit(callbacks: list[Any], folder: Path, steps: int, pause_s: float = 0.0) -> tuple[float, float]:
    """One fit in a fresh Trainer. Returns the seconds it took, and those of a processor."""
    loader = DataLoader(TensorDataset(torch.randn(4 * steps, 16)), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=callbacks,
    )  # fmt: skip
    module = Module(pause_s)
    begun, busy = time.perf_counter(), time.process_time()
    trainer.fit(module, loader)
    return time.perf_counter() - begun, time.process_time() - busy


def timed_hook(kind: type, calls: list[float]) -> type:
    """The callback, and how long its hook after each step takes."""

    class Timed(kind):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            begun = time.perf_counter()
            super().on_train_batch_end(*args, **kwargs)
            calls.append(time.perf_counter() - begun)

    return Timed


def short_fits(folder: Path, fits: int) -> dict[str, float]:
    """Fits with one save each, in turns. On a busy machine the time of the processor says more than that of the clock."""
    took: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
    kinds = {"stock": pl.callbacks.ModelCheckpoint, "ours": SafeCheckpointCallback}
    for number in range(-2, fits):
        for name, kind in kinds.items():
            seconds = fit([kind(folder / f"{name}{number}")], folder, 10)
            if number >= 0:
                took[name].append(seconds)
    found: dict[str, float] = {"fits": fits}
    for what, column in (("clock", 0), ("cpu", 1)):
        medians = {name: statistics.median(each[column] for each in seconds) for name, seconds in took.items()}
        least = {name: min(each[column] for each in seconds) for name, seconds in took.items()}
        found |= {f"{name}_{what}_ms": round(1000 * median, 2) for name, median in medians.items()}
        found[f"{what}_ratio"] = round(medians["ours"] / medians["stock"], 3)
        found[f"least_{what}_ratio"] = round(least["ours"] / least["stock"], 3)
    return found


def every_step(folder: Path, rounds: int, pause_s: float) -> dict[str, float]:
    """A save after each of 20 steps; stock and ours take turns."""
    calls: dict[str, list[float]] = {"stock": [], "ours": []}
    events: list[Event] = []
    fsyncs, spent, count = Fsyncs(), 0.0, 0
    for number in range(rounds):
        for name, kind in (("stock", pl.callbacks.ModelCheckpoint), ("ours", SafeCheckpointCallback)):
            hooks: dict[str, Callable[[Event], None] | Any] = {"hooks": [events.append]} if name == "ours" else {}
            found: list[float] = []
            callback = timed_hook(kind, found)(folder / f"{name}{number}", every_n_train_steps=1, **hooks)
            before, fsyncs.count = fsyncs.seconds, 0
            fit([callback], folder, 20, pause_s)
            calls[name] += found[2:]
            if name == "ours":
                spent, count = spent + fsyncs.seconds - before, count + fsyncs.count
    os.fsync = fsyncs._real
    stalls = {event.step: event.stall_s for event in events if isinstance(event, Snapshotted)}
    behind = [event.seconds - stalls[event.step] for event in events if isinstance(event, Committed)]
    medians = {name: statistics.median(found) for name, found in calls.items()}
    return {
        "pause_ms": 1000 * pause_s,
        **{f"{name}_call_ms": round(1000 * median, 2) for name, median in medians.items()},
        "ratio": round(medians["ours"] / medians["stock"], 2),
        "background_ms": round(1000 * statistics.median(behind), 2),
        "fsync_ms": round(1000 * spent / len(behind), 2),
        "fsyncs": round(count / len(behind), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="see that it works: 5 fits, 1 round")
    parser.add_argument("--directory", type=Path, help="on which disk; the default is that of temporary files")
    options = parser.parse_args()
    if options.quick:
        options.fits, options.rounds = 5, 1
    warnings.simplefilter("ignore")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("lightning")]:
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = {
            "short_fits": short_fits(Path(folder), options.fits),
            "every_step": [every_step(Path(folder, f"{pause}"), options.rounds, pause) for pause in (0.03, 0.0)],
            "load": os.getloadavg()[0],
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
