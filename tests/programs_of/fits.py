"""Histories of Lightning's callback in this process: saves that fail, a second callback, stops and signals, resumes.

The reference is the stock ModelCheckpoint in a run that goes through, which writes nothing: a save that fails is one that it
never made. Files, their steps, links, paths and scores at the end are the same; behind each resume every hook sees the same.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kit.limits import QUICK
from programs_of import here as starts
from programs_of import lightning_, lightning_parts
from programs_of.draw import Draw
from programs_of.here import HereInProcess, StoppedError
from programs_of.runner import Verdict
from safe_ckpt import CheckpointConfig
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.lightning import SafeCheckpointCallback

_CONFIG = CheckpointConfig(
    timeouts=QUICK, save_on_signals=("SIGTERM",), on_failure="warn", max_consecutive_failures=100
)
_ATTRIBUTES = (
    "best_k_models", "best_model_path", "best_model_score", "kth_best_model_path", "kth_value", "last_model_path",
)  # fmt: skip
_INNER = ("_last_global_step_saved", "_last_checkpoint_saved")
_STOPPED = "stopped.ckpt"
_OTHER = "other-{step}"


class Fits:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Through, and stopped up to three times."""
        one = choose(draw)
        with warnings.catch_warnings(), _signals_reach_us(), starts.quiet():
            warnings.simplefilter("ignore")
            whole = Start(one, folder / "whole", draw.seed)
            try:
                whole.run()
            except (MisconfigurationException, ValueError):
                return Verdict(came_to="Lightning refuses it")
            number, due = 0, 0
            for number, stop in enumerate([*one.stops, ("", 0)]):
                start = Start(one, folder / "ours", 77 if due else draw.seed, stop, ours=True)
                try:
                    start.run()
                except NoValidCheckpointError as error:
                    if due or "holds weights only" not in str(error):
                        raise
                    return Verdict(came_to="refused: only weights are there")
                if wrong := start.compared(whole, due):
                    return Verdict(came_to="differs", wrong=f"{wrong} (start {number})")
                due = start.newest()
                if start.is_over:
                    break
        wrong = start.ends(whole)
        came_to = "equal, resumed" if number else "equal"
        return Verdict(came_to="differs" if wrong else came_to, wrong=wrong and f"{wrong} (start {number})")


def choose(draw: Draw) -> SimpleNamespace:
    """As a program of Lightning, with what this adds to it, and without what takes long or is not exact in stock either."""
    one = lightning_.choose(draw)
    one.workers, one.limits, one.on_exception = 0, {k: v for k, v in one.limits.items() if k != "max_time"}, False
    one.loader = "one" if one.loader == "max_size_cycle" else one.loader
    if draw.flag("trains at least", of=4):
        one.limits["min_steps"] = 6
    one.accumulate = 1 if one.norm or one.check else min(one.accumulate, 2)
    one.callback = "counts" if one.callback else ""
    one.epochs = min(one.epochs, 3)
    one.scores = draw.flag("scores go up and down")
    if one.scores:
        one.monitor, one.filename = "score", draw.among("named", "{epoch}-{step}-{score:.2f}", "{step}")
        one.top, one.trigger = draw.number("best", 1, 3), {"every_n_train_steps": draw.number("every", 1, 3)}
    if one.monitor is None:
        one.mode = "min"
    one.second = draw.among(
        "another callback", "", "weights", "weights", "whole", "weights elsewhere", "whole elsewhere"
    )
    one.second_every, one.second_last = draw.number("another one's every", 1, 3), draw.flag("another one comes last")
    one.stops = []
    for n in range(draw.among("stops", 1, 2, 2, 0)):
        what = draw.among(f"stop {n}", "SIGTERM", "SIGTERM", "step", "hook")
        number = draw.number(f"at {n}", 1, 14)
        one.stops.append((what, 4 * number if what == "hook" else number))
    if any(what == "SIGTERM" for what, _ in one.stops):
        one.accumulate = 1  # gradients that are not applied yet are in no checkpoint
    full = {draw.among(f"full disk at {n}", 0, *range(1, 13)) for n in range(3)}
    one.failing = frozenset(
        full - {step for what, number in one.stops if what == "SIGTERM" for step in (number, number + 1)}
    )
    return one


@contextlib.contextmanager
def _signals_reach_us() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stock(pl.callbacks.ModelCheckpoint):
    """What the stock callback decides, and which files there would be; nothing is written.

    Attributes:
        files: path -> step of its state.
        links: path -> what it points to.
    """

    def __init__(self, failing: frozenset[int], **given: Any) -> None:
        super().__init__(**given)
        self.failing, self._asked = failing, False
        self.files: dict[str, int] = {}
        self.links: dict[str, str] = {}

    def _generate_state_key(self, **given: Any) -> str:
        return f"ModelCheckpoint{given!r}"

    def _whole_hook(self, name: str, trainer: Any, *given: Any) -> None:
        names = (*_ATTRIBUTES, "current_score", *_INNER, "files", "links")
        kept = copy.deepcopy({key: self.__dict__[key] for key in names if key in self.__dict__})
        self._asked = False
        getattr(super(), name)(trainer, *given)
        if self._asked and trainer.global_step in self.failing:
            self.__dict__.update(kept)

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self._whole_hook("on_train_batch_end", trainer, *given)

    def on_train_epoch_end(self, trainer: Any, *given: Any) -> None:
        self._whole_hook("on_train_epoch_end", trainer, *given)

    def on_validation_end(self, trainer: Any, *given: Any) -> None:
        self._whole_hook("on_validation_end", trainer, *given)

    def on_train_end(self, trainer: Any, *given: Any) -> None:
        self._whole_hook("on_train_end", trainer, *given)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self._asked = True
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath
        self.files[str(filepath)] = trainer.global_step
        self.links.pop(str(filepath), None)

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        self.links[linkpath] = os.path.basename(filepath)
        self.files.pop(linkpath, None)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        self.files.pop(filepath, None)
        self.links.pop(filepath, None)

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        return str(filepath) in {*self.files, *self.links}


class Stop:
    """Of a start, at an optimizer step: a signal within its batch. Takes the place of ``lightning_parts.Stop``."""

    what, done = "", False

    def __init__(self, stop: tuple[str, int]) -> None:
        self._stop = stop

    def __deepcopy__(self, _: Any) -> Stop:
        return self

    def meets(self, *kinds: str, at: int = -1) -> None:
        """Of the module; only what says the step counts."""
        what, number = self._stop
        if at != number - 1 or what not in kinds or self.done:
            return
        self.done = True
        if what == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        else:
            raise StoppedError(what)


class Module(lightning_parts.Module):
    """Has a score that goes up and down."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = self.global_step  # manual optimization makes one
        found = super().training_step(batch, batch_idx)
        self.log("score", float(zlib.crc32(b"%d" % step) % 1000))
        self.stop.meets("SIGTERM", at=step)
        return found

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.stop.meets("step", at=self.global_step)
        return super().on_train_batch_start(batch, batch_idx)


class Start:
    """One run of the program: of the reference, or of ours in a folder where it may go on.

    Attributes:
        is_over: whether it came to its end.
    """

    def __init__(
        self, one: SimpleNamespace, folder: Path, seed: int, stop: tuple[str, int] = ("", 0), *, ours: bool = False
    ) -> None:
        self._one, self._folder, self._seed, self._ours, self._stop = one, folder, seed, ours, stop
        self.here = HereInProcess(folder, stop)
        self.is_over, self._signalled, self._went_on = False, False, 0
        self.callbacks: list[Any] = []

    def run(self) -> None:
        """Make it all, and train."""
        one, stop = self._one, Stop(self._stop)
        starts.seed(self._seed)
        module = Module(one, stop)
        self.callbacks = self._made()
        witness = lightning_parts.Witness(self.here, stop)
        trainer = lightning_._trainer(one, [witness, *lightning_parts.callbacks(one), *self.callbacks])
        train, validation = lightning_parts.loaders(one, False)

        def is_full() -> bool:
            return trainer.global_step in one.failing

        with starts.full_disk(is_full), contextlib.suppress(StoppedError):
            trainer.fit(module, train, validation)
            self.is_over, self._signalled = not stop.done, stop.done
        self.here.result("ended at", [trainer.current_epoch, trainer.global_step])
        self.here.result("weights", lightning_parts.digest(module.state_dict()))

    def _made(self) -> list[Any]:
        """The callbacks, ours or stock's."""
        one, folder = self._one, self._folder
        first = {
            "dirpath": folder / "a", "save_top_k": one.top, "save_last": one.last, "monitor": one.monitor, "mode": one.mode,
            "filename": one.filename, "save_on_train_epoch_end": one.at_epoch_end, **one.trigger,
        }  # fmt: skip
        second = {
            "dirpath": folder / ("b" if "elsewhere" in one.second else "a"), "filename": _OTHER, "mode": "max",
            "save_weights_only": "weights" in one.second, "every_n_train_steps": one.second_every,
            "enable_version_counter": False,
        }  # fmt: skip
        given = [first, second] if one.second_last else [second, first]
        given = given if one.second else [first]
        if not self._ours:
            return [Stock(one.failing, **each) for each in given]
        auto: dict[str, Any] = {"config": _CONFIG, "resume": "auto"}
        return [SafeCheckpointCallback(**each, **(auto if each is first else {"config": _CONFIG})) for each in given]

    def newest(self) -> int:
        """The step from which the next start has to go on."""
        if self._signalled:
            return self._at_the_signal()
        steps = [0]
        for file in (self._folder / "a").glob("*.ckpt"):
            found = torch.load(file, weights_only=False)
            if "optimizer_states" in found:
                steps.append(found["global_step"])
        return max(steps)

    def _at_the_signal(self) -> int:
        """Behind its batch, which makes a step of each optimizer."""
        return self._stop[1] - 1 + max(1, self._one.manual)

    def compared(self, whole: Start, due: int) -> str:
        """What differs behind the place that it went on from."""
        begun = self._went_on = self.here.notes.get("begun", [0])[0]
        if begun != due:
            return f"place: begun at step {begun}, where {due} was committed"
        ended = self.here.results["ended at"][1]
        if self._signalled and ended != self._at_the_signal():
            return f"signal: in the batch of step {self._at_the_signal()}, and training went on to {ended}"
        return starts.first_difference(whole.here.events, self.here.events, begun)

    def ends(self, whole: Start) -> str:
        """What differs at the end."""
        for number, (theirs, ours) in enumerate(zip(whole.callbacks, self.callbacks, strict=True)):
            if self._went_on and theirs.filename == _OTHER:
                continue  # what it saved behind the first one's last save, its state there does not know
            for name in _ATTRIBUTES:
                expected, found = (_plain(getattr(one, name, None)) for one in (theirs, ours))
                if expected != found:
                    return f"{name}: {found} instead of {expected}, of callback {number}"
        files = {name: step for one in whole.callbacks for name, step in _plain(one.files).items()}
        links = {name: to for one in whole.callbacks for name, to in _plain(one.links).items()}
        expected, found = (files, links), _on_disk(self._folder)
        if self._went_on:
            found = {name: step for name, step in found[0].items() if name in files or "other-" not in name}, found[1]
        if expected != found:
            return f"files: {found} instead of {expected}"
        for name, value in whole.here.results.items():
            if self.here.results[name] != value:
                return f"{name}: {self.here.results[name]} instead of {value}"
        return ""


def _plain(value: Any) -> Any:
    """Paths without what comes before the callback's own folder."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, str | Path):
        return "/".join(Path(value).parts[-2:])
    return float(value) if isinstance(value, torch.Tensor) else value


def _on_disk(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    files, links = {}, {}
    for file in sorted(folder.glob("?/*.ckpt")):
        if file.is_symlink():
            links[_plain(file)] = os.readlink(file)
        elif file.name != _STOPPED:
            files[_plain(file)] = torch.load(file, weights_only=False)["global_step"]
    return files, links
