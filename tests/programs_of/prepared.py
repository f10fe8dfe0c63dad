"""Histories of an Accelerator in this process: saves that fail, stops, another Accelerator or a load in the same one.

A run that goes through, whose disk is never full, says what each step sees; a model of a few lines says which checkpoints
are kept.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from kit.limits import QUICK
from programs_of import accelerate_
from programs_of import here as starts
from programs_of.draw import Draw
from programs_of.here import HereInProcess, StoppedError
from programs_of.runner import Verdict
from safe_ckpt import CheckpointConfig
from safe_ckpt.accelerate import register
from safe_ckpt.errors import SafeCheckpointError

_CONFIG = CheckpointConfig(timeouts=QUICK, on_failure="warn", max_consecutive_failures=100)


class Prepared:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Through, and stopped up to three times."""
        one = choose(draw)
        os.symlink(folder, f"{folder}-link")
        with warnings.catch_warnings(), _alone(), starts.quiet():
            warnings.simplefilter("ignore")
            try:
                return self._run(one, draw.seed, folder)
            finally:
                os.unlink(f"{folder}-link")

    def _run(self, one: SimpleNamespace, seed: int, folder: Path) -> Verdict:
        whole = HereInProcess(folder / "whole")
        starts.seed(seed)
        with starts.full_disk(lambda: False):
            script = Script(one, whole)
            script.train()
            script.end()
        kept = Kept(one)
        script, number = None, 0  # type: ignore[assignment]
        for number, (stop, how) in enumerate([*one.stops, (("", 0), "anew")]):
            where = f"{folder}-link" if how == "by a link" else str(folder)
            here = HereInProcess(Path(where, "ours"), stop)
            wrong, script = _start(one, seed, here, kept, script, how)
            if wrong := wrong or starts.first_difference(whole.events, here.events, here.notes["begins"][0]):
                return Verdict(came_to="differs", wrong=f"{wrong} (start {number})")
        found = sorted(path.name for path in kept.folder(folder / "ours").iterdir() if path.name[0] not in "._")
        wrong = "" if found == kept.names() else f"kept: {found} instead of {kept.names()}"
        wrong = wrong or _ends(whole.results, here.results)
        return Verdict(came_to="differs" if wrong else "equal, resumed" if number else "equal", wrong=wrong)


def _ends(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Where the program is, and the files of each checkpoint that both have."""
    if found["at"] != expected["at"]:
        return f"end: {found['at']} instead of {expected['at']}"
    theirs, ours = (_by_checkpoint(one["kept"]) for one in (expected, found))
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            return f"files: {sorted(ours[name])} instead of {sorted(theirs[name])} in {name}"
    return ""


def _by_checkpoint(names: list[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        found.setdefault(folder, set()).add(file)
    return found


def choose(draw: Draw) -> SimpleNamespace:
    """As a program of Accelerate on one rank, with what this adds to it."""
    one = accelerate_._choose(draw)
    one.ranks, one.workers, one.stay, one.tracker, one.door = 1, 0, False, False, "register"
    one.rows = min(one.rows, 12)
    if one.accumulation == "not at the end":
        one.accumulation = "accumulate"
    if one.names != "automatic":
        one.limit = draw.among("limit of names of their own", None, 1)
    one.stops = []
    for n in range(draw.among("stops", 1, 2, 3, 0)):
        what = draw.among(f"stop {n}", "batch", "saved", "save", "evaluated")
        how = draw.among(f"start {n}", "anew", "by a link", "goes back")
        if one.data == "placed" and how == "goes back":  # what a stream keeps beside its place: docs/data.md
            how = "anew"
        one.stops.append(((what, draw.number(f"at {n}", 1, 8)), how))
    one.failing = frozenset(draw.among(f"full disk at {n}", 0, *range(1, 13)) for n in range(2))
    one.leaves = draw.flag("a stopped one is not closed") and one.names == "automatic"
    return one


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Nothing of another Accelerator is left before or after."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Kept:
    """Which checkpoints there are, as docs/start/accelerate.md says it.

    Attributes:
        steps: name -> optimizer steps at the save.
    """

    def __init__(self, one: SimpleNamespace) -> None:
        self._one, self._number = one, 0
        self.steps: dict[str, int] = {}

    def folder(self, out: Path) -> Path:
        """Where they lie."""
        return out / "checkpoints" if self._one.names == "automatic" else out

    def goes_on(self) -> None:
        """From the newest: the numbers go on behind it."""
        if self._one.names == "automatic":
            self._number = int(list(self.steps)[-1].partition("_")[2]) + 1 if self.steps else 0

    def saved(self, steps: int, *, fails: bool) -> None:
        """One more, or not."""
        name = {"own": f"state_{steps}", "same": "state_0"}.get(self._one.names, f"checkpoint_{self._number}")
        self._number += 1  # also of one that fails
        if fails:
            return
        self.steps.pop(name, None)
        self.steps[name] = steps
        if self._one.names == "automatic" and self._one.limit:
            self.steps = dict(list(self.steps.items())[-self._one.limit :])

    def newest(self) -> int:
        """How many steps were done at the last one; 0 where there is none."""
        return list(self.steps.values())[-1] if self.steps else 0

    def names(self) -> list[str]:
        """In the order of a listing."""
        return sorted(self.steps)


class Script(accelerate_.Program):
    """Tells each step; its disk may be full."""

    kept: Kept | None = None

    def _register(self) -> Any:
        return register(self.accelerator, _CONFIG)

    def step(self, batch: Any, *, boundary: bool) -> None:
        super().step(batch, boundary=boundary)
        weights = [float(one.detach().double().sum()) for net in self.nets for one in net.parameters()]
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.here.event(
            self.at.steps, f"step {self.at.batches} {batch.tolist()} {weights} {rates} {boundary} {starts.drawn()}"
        )

    def is_full(self) -> bool:
        return self.kept is not None and self.at.steps in self.one.failing

    def save(self) -> None:
        try:
            super().save()
        except SafeCheckpointError:  # of one that is waited for
            if not self.is_full():
                raise
        except StoppedError as stopped:
            if str(stopped) == "saved" and self.kept is not None:
                self.kept.saved(self.at.steps, fails=self.is_full())
            raise
        if self.kept is not None:
            self.kept.saved(self.at.steps, fails=self.is_full())


def _start(
    one: SimpleNamespace, seed: int, here: HereInProcess, kept: Kept, script: Script | None, how: str
) -> tuple[str, Any]:
    """One start; returns what is wrong with its place, and the script where it was stopped."""
    due = kept.newest()
    if script is None or how != "goes back" or script.handle.closed or not due:
        if script is not None and not one.leaves:
            script.handle.remove()
        _forget()
        starts.seed(77 if due else seed)
        script = None
    at: list[Script] = [] if script is None else [script]
    with starts.full_disk(lambda: bool(at) and at[0].is_full()), contextlib.suppress(StoppedError):
        if script is None:
            script = Script(one, here)
            at.append(script)
        here.out = script.here.out  # spelled as it was
        script.here, script.kept = here, kept
        script.resume()
        kept.goes_on()
        if script.at.steps != due:
            return f"place: begun at step {script.at.steps}, where {due} was committed", script
        script.train()
        script.end()
    return "", script
