"""Histories of a Trainer in this process: saves that fail, stops, signals, resumes; beside one that goes through.

What the limit and the best model leave on the disk is also said by a few lines that know nothing of the Trainer.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import PrinterCallback, TrainerCallback

from kit.limits import QUICK
from programs_of import here as starts
from programs_of import trainers
from programs_of.draw import Draw
from programs_of.here import HereInProcess, StoppedError
from programs_of.runner import Verdict
from programs_of.trainers_limits import Limits
from safe_ckpt import CheckpointConfig

_CONFIG = CheckpointConfig(
    timeouts=QUICK, on_failure="warn", max_consecutive_failures=100, save_on_signals=("SIGTERM",)
)


class TrainedHere:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Through, and stopped up to three times."""
        one = choose(draw)
        transformers.logging.set_verbosity_error()
        with warnings.catch_warnings(), _listened() as said:
            warnings.simplefilter("ignore")
            whole = Start(one, folder / "whole", ("", 0))
            whole.run(said)
            limits, number, due, copies, signalled = Limits(one), 0, 0, set[Path](), False
            for number, stop in enumerate([*one.stops, ("", 0)]):
                start = Start(one, folder / "stopped", stop)
                start.run(said)
                begun, signalled = start.begun, signalled or start.signalled
                if begun != due:
                    return Verdict(came_to="differs", wrong=f"place: begun at step {begun} where {due} was committed")
                limits.add(begun, start.started.said)
                if wrong := limits.events(whole.started, start.started, begun):
                    return Verdict(came_to="differs", wrong=f"{wrong[0]} (start {number})")
                due = start.newest()
                if one.copies and due in start.there():
                    copies.add(start.copy_of(due))
                if start.is_over:
                    break
            wrong = [
                one
                for one in limits.results(whole.started, start.started)
                # A signal makes one checkpoint more; which ones stay is said by ``kept``.
                if not whole.lacks_its_best(one) and not (signalled and one.startswith("result: kept "))
            ]
            wrong += start.kept()
            wrong += [f"copy: {one.name}, which the user made, is gone" for one in copies if not one.exists()]
        came_to = "as limits.md says" if limits.used else "equal, resumed" if number else "equal"
        return Verdict(came_to="differs" if wrong else came_to, wrong=f"{wrong[0]} (start {number})" if wrong else "")


def choose(draw: Draw) -> SimpleNamespace:
    """As a program of Transformers, with what this adds to it, and without what takes long or is a limit."""
    one = trainers._choose(draw)
    one.model = "llama" if one.model == "llama" else "net"
    one.data = one.data if one.data in ("map", "draws") else "map"
    one.is_stream, one.workers, one.stay, one.noise = False, 0, False, False
    one.sampling = "random" if one.sampling == "group_by_length" else one.sampling
    one.by, one.callback, one.early = "steps", "state" if one.callback else "", False
    one.limit = draw.among("limit of these", None, 1, 1, 2, 3)
    one.logging, one.log_steps = "steps", min(one.log_steps, 2)
    one.copies = draw.flag("copies one")
    one.stops = []
    for n in range(draw.among("stops", 1, 2, 2, 0)):
        what = draw.among(f"stop {n}", "SIGTERM", "step_end", "batch", "log", "evaluate")
        one.stops.append((what, draw.number(f"at {n}", 1, 8)))
    full = {draw.among(f"full disk at {n}", 0, 0, *range(1, 9)) for n in range(2)}
    one.failing = frozenset(full - {number for what, number in one.stops if what == "SIGTERM"})
    return one


@contextlib.contextmanager
def _listened() -> Iterator[list[str]]:
    """What is logged, and shown to nobody."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ours, listener = logging.getLogger("safe_ckpt"), Listener()
    before, ours.propagate = ours.propagate, False
    ours.addHandler(listener)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield said
    finally:
        signal.signal(signal.SIGTERM, handler)
        ours.removeHandler(listener)
        ours.propagate = before


class Signals(TrainerCallback):
    """SIGTERM within a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            signal.raise_signal(signal.SIGTERM)


class Start:
    """One start, in a folder where it may go on.

    Attributes:
        is_over: whether it came to its end.
        begun: at which step.
        started: what it told, as ``processes`` has it.
        signalled: whether a signal stopped it.
    """

    def __init__(self, one: SimpleNamespace, folder: Path, stop: tuple[str, int]) -> None:
        self._one, self._folder, self._stop = one, folder, stop
        self.is_over, self.begun, self.signalled = False, 0, False
        self.started: Any = None

    def run(self, said: list[str]) -> None:
        """Make it all, and train."""
        one = self._one
        there = self.there()
        here = HereInProcess(self._folder, self._stop)
        starts.seed(77 if there else 5)
        said.clear()
        trainer = trainers._trainer(one, here)
        trainer.checkpoint_config = _CONFIG
        trainer.remove_callback(PrinterCallback)
        if self._stop[0] == "SIGTERM":
            trainer.add_callback(Signals(self._stop[1]))

        def is_full() -> bool:
            return trainer.state.global_step in one.failing

        with starts.full_disk(is_full), contextlib.suppress(StoppedError):
            trainers.go_on(trainer)
            steps = trainer.args.max_steps
            self.is_over = trainer.state.global_step >= steps
            trainers._tell_end(trainer, here)
            here.results["kept"] = [name for name in here.results["kept"] if not name.endswith("-keep")]
        self.signalled = trainer.stopped_by_signal
        if self.signalled:  # what follows ends this start, and is none of training
            last = max(at for at, (_, event) in enumerate(here.events) if event.startswith("on_step_end"))
            del here.events[last + 1 :]
        self.begun = here.notes.get("begins", [0])[0]
        self.started = here.started("\n".join(said))
        self._best, self._steps = trainer.state.best_global_step, trainer.state.global_step
        self._best_path = trainer.state.best_model_checkpoint

    def there(self) -> list[int]:
        """The steps of the checkpoints."""
        names = [one.name.partition("-")[2] for one in self._folder.glob("checkpoint-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def copy_of(self, step: int) -> Path:
        """Made by the user, who wants to keep that one."""
        copy = self._folder / f"checkpoint-{step}-keep"
        shutil.copytree(self._folder / f"checkpoint-{step}", copy, dirs_exist_ok=True)
        return copy

    def newest(self) -> int:
        """The step from which the next start has to go on."""
        if self._stop[0] == "SIGTERM" and self._stop[1] > self.begun and not self.is_over:
            return self._stop[1]
        return max(self.there(), default=0)

    def lacks_its_best(self, text: str) -> bool:
        """The save of the best step failed: a run that goes through names it all the same, a resumed one does not."""
        return self._best in self._one.failing and text.startswith("result: state: best is")

    def kept(self) -> list[str]:
        """What is wrong with what is left: the newest is there, the best is, and no more than the limit allows."""
        one, there = self._one, self.there()
        due = [step for step in self._saved() if step not in one.failing]
        if one.best and self._best and (self._best in due or one.saving == "best") and self._best not in one.failing:
            name = Path(self._best_path or "").name
            if name != f"checkpoint-{self._best}":
                return [f"best: {name or None}, and the best step is {self._best}"]
        if due and (not there or there[-1] != due[-1]):
            return [f"kept: {there}, and the newest that was saved is {due[-1]}"]
        spared = self._spared()
        if spared & set(due) and not spared <= set(there):
            return [f"kept: {there} without the best, {spared}"]
        spared &= set(there)
        if one.limit and len(set(there) - spared) > max(1, one.limit - len(spared & set(there[:-1]))):
            return [f"kept: {there}, with a limit of {one.limit} and {spared} as the best"]
        return []

    def _spared(self) -> set[int]:
        """The best step. A scheduler that follows a metric has one, too, which need not be saved: the path says which was."""
        if self._one.best:
            return {self._best} if self._best else set()
        return {int(self._best_path.rpartition("-")[2])} if self._best_path else set()

    def _saved(self) -> list[int]:
        """The steps at which a save is due, where that is easily said."""
        if self._one.saving != "steps":
            return []
        return [step for step in range(1, self._steps + 1) if step % self._one.save_steps == 0 or step == 8]
