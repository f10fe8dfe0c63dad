"""Random Trainers of Lightning: killed, broken off by an exception or a signal, and started again."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning import pytorch as pl

from kit.limits import QUICK
from programs_of import lightning_parts as parts
from programs_of import processes
from programs_of.draw import Draw
from programs_of.processes import Kill
from programs_of.runner import Verdict
from programs_of.start import Here
from safe_ckpt import CheckpointConfig
from safe_ckpt.lightning import SafeCheckpointCallback

FIXED = (2, 3, 8)
"""Seeds that run in a few seconds each."""
_TWICE = "will change them twice"  # of docs/limits.md; what a module that is evaluated says follows from its buffers
_STALE = "They are in no checkpoint: here that step changes nothing"
_ENDED = "EarlyStopping ended the run that saved this"
_WIDER_FROM = 300
"""The first seed that draws what was added later."""
_RAISED = ("raises", "raises in validation", "interrupted", "SIGTERM")


class Lightning:
    """See the module.

    Args:
        stock: with a ModelCheckpoint, and ``ckpt_path`` the newest file, in the place of ours.
    """

    def __init__(self, stock: bool = False) -> None:
        self._stock = stock

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, stopped once or twice, and started again."""
        stops = _stops(draw)
        one = choose(draw)

        def started(name: str, **more: Any) -> processes.Started:
            return processes.start("lightning_", draw, folder, name, stock=self._stock, **more)

        whole = started("whole", out="whole")
        if whole.error:
            return _failed(whole)
        wrong: list[str] = []
        twice, stale, met, begun = False, False, 0, list[int]()
        for number, stop in enumerate([*stops, None]):
            newest = _newest(folder / "stopped")
            how: dict[str, Any] = {"kill": stop}
            if stop is not None and stop.what in _RAISED:
                how = {"more": {"stop": {"what": stop.what, "number": stop.number}}}
            last = started(f"start-{number}", out="stopped", number=number, **how)
            if last.error:
                return _failed(last)
            if _ENDED in last.said:  # it has steps that the whole run has not
                return processes.verdict_of(wrong, came_to="went on behind its stop")
            twice |= _TWICE in last.said
            stale |= _STALE in last.said
            met += last.killed or bool(last.notes("met"))
            begun += last.notes("begun")[: number and 1]
            wrong += [f"{text} (start {number})" for text in _of_a_start(whole, last, newest)]
        extra = any(stop.what in _RAISED for stop in stops) and one.on_exception
        wrong += _ends(whole, last, extra)
        # The difference of the buffers comes first, and hides that of the step.
        lacks = _accumulates(one) and (twice or any(text.startswith("calls:") for text in wrong))
        came_to = "equal" if any(begun) else "equal from the beginning" if met else "equal, not stopped"
        return processes.verdict_of(
            wrong, came_to, limits=lambda text: lacks or stale or (twice and _is_of_buffers(text))
        )


def _failed(one: processes.Started) -> Verdict:
    refused = "MisconfigurationException", "val_check_interval", "You have set `accumulate_grad_batches` and"
    if any(words in one.error for words in refused):
        return Verdict(came_to="Lightning refuses it")
    return processes.failed(one)


def _of_a_start(whole: processes.Started, one: processes.Started, newest: int) -> list[str]:
    found = processes.differences(whole.lines, one.lines)
    begun = one.notes("begun")
    if begun and begun[0] < newest:
        found.append(f"place: resumed at step {begun[0]} where {newest} was committed")
    return found + (_events_that_differ(whole, one, begun[0]) if begun else [])


def _events_that_differ(whole: processes.Started, one: processes.Started, position: int) -> list[str]:
    ours, theirs = (lines.events(0, position) for lines in (whole, one))
    for number, (expected, found) in enumerate(zip(ours, theirs, strict=False)):
        if expected != found:
            kind = "event" if expected.split()[0] != found.split()[0] else "what a hook sees"
            return [f"{kind}: {found} instead of {expected}, {number} behind step {position}"]
    if not one.killed and one.results() and len(ours) != len(theirs):
        more = (ours[len(theirs) :] or theirs[len(ours) :])[0]
        return [f"events: {len(theirs)} instead of {len(ours)} behind step {position}: {more}"]
    return []


def _ends(whole: processes.Started, last: processes.Started, extra: bool) -> list[str]:
    """An exception's own checkpoint is kept as any file that nobody deletes."""
    nothing_done = not last.lines.get(0)  # all was done before
    found = processes.results_that_differ(
        whole,
        last,
        but=lambda name: (nothing_done and "metrics" in name) or (extra and ("file" in name or "last" in name)),
    )
    return [text for text in found if not (extra and _is_only_renamed(text))]


def _is_only_renamed(text: str) -> bool:
    """Where a file's name was taken it gets a number behind it."""
    ours, _, theirs = re.sub(r"-v\d+(?=\.ckpt)", "", text.partition(" is ")[2]).partition(" instead of ")
    return ours == theirs


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint that has a name."""
    found = [torch.load(one, weights_only=False)["global_step"] for one in folder.glob("*.ckpt") if one.exists()]
    return max(found, default=0)


def _is_of_buffers(text: str) -> bool:
    return text.startswith("buffers:") or "val_loss" in text or "running_mean" in text


def _accumulates(one: SimpleNamespace) -> bool:
    """Saved within an accumulated step: gradients that are not yet applied are in no checkpoint, and all else follows."""
    return bool(one.accumulate > 1 or one.callback == "schedules accumulation")


def _stops(draw: Draw) -> list[Kill]:
    found = []
    for n in range(draw.number("stops", 1, 2)):
        what = draw.among(f"stop {n}", "step", "batch", "hook", "hook", "rename", "remove", *_RAISED)
        most = {"step": 14, "hook": 90, "raises in validation": 7}.get(what, 18)
        number = draw.among(f"at {n}", *range(1, 91))
        found.append(Kill(what=what, number=1 + number % most))
    return found


def choose(draw: Draw) -> SimpleNamespace:
    """The choices of both sides."""
    one = SimpleNamespace(
        **_of_the_module(draw), **_of_the_data(draw), **_of_the_trainer(draw), **_of_the_callback(draw), **_wider(draw)
    )
    if one.metric and one.monitor:
        one.monitor = "measured"
    if one.callback == "schedules accumulation" or one.manual:
        one.accumulate = 1
    if one.manual and one.callback in ("schedules accumulation", "averages"):
        one.callback = ""
    if one.manual:
        one.limits = {name: value for name, value in one.limits.items() if name != "gradient_clip_val"}
    if one.validation in ("empty", "none"):  # nobody logs it then
        one.monitor = "train_loss" if one.monitor == "val_loss" else one.monitor
        one.schedule = "plateau of train" if one.schedule == "plateau" else one.schedule
        one.filename = None
    one.loss = "val_loss/dataloader_idx_0" if one.validation == "two" else "val_loss"
    one.monitor = one.loss if one.monitor == "val_loss" else one.monitor
    return one


def _of_the_module(draw: Draw) -> dict[str, Any]:
    return {
        "optimizer": draw.among("optimizer", "SGD", "AdamW", "Adagrad"),
        "schedule": draw.among("schedule", "", "step of epochs", "step of steps", "plateau", "plateau of train"),
        "every_schedule": draw.among("every schedule", 1, 1, 2),
        "manual": draw.among("manual", 0, 0, 0, 1, 2),
        "norm": draw.flag("norm", of=4),
        "noise": draw.flag("noise"),
    }


def _of_the_data(draw: Draw) -> dict[str, Any]:
    return {
        "rows": draw.among("rows", 12, 18, 11),  # batches of 3; a batch norm takes no batch of 1
        "loader": draw.among("loader", "one", "one", "one", "max_size_cycle", "min_size", "max_size"),
        "validation": draw.among("validation", "one", "one", "two", "empty", "none"),
        "workers": draw.among("workers", 0, 0, 0, 0, 2),
        "shuffle": draw.flag("shuffle"),
    }


def _of_the_trainer(draw: Draw) -> dict[str, Any]:
    return {
        "epochs": draw.among("epochs", 3, 2, 4),
        "steps": draw.among("max_steps", -1, -1, -1, 7),
        "accumulate": draw.among("accumulate", 1, 1, 2, 3),
        "check": draw.among(
            "val_check_interval",
            {},
            {},
            {"val_check_interval": 0.5},
            {"val_check_interval": 2},
            {"val_check_interval": 3, "check_val_every_n_epoch": None},
            {"check_val_every_n_epoch": 2},
        ),
        "limits": draw.among(
            "limits",
            {},
            {},
            {},
            {"limit_train_batches": 3},
            {"limit_train_batches": 0.5},
            {"limit_val_batches": 1},
            {"num_sanity_val_steps": 0},
            {"max_time": "00:01:00:00"},
            {"gradient_clip_val": 0.1},
            {"overfit_batches": 2},
        ),
        "early": draw.among("left by -1", 0, 0, 0, 0, 2, 3),
        "callback": draw.among("callback", "", "", "counts", "stops early", "schedules accumulation", "averages"),
        "again": draw.among("within", "", "", "", "validates before", "tests behind"),
        "log_every": draw.among("log every", 1, 3),
    }


def _of_the_callback(draw: Draw) -> dict[str, Any]:
    monitor = draw.among("monitor", None, None, "val_loss", "train_loss", "train_loss_epoch", "train_loss_step")
    return {
        "monitor": monitor,
        "mode": draw.among("mode", "min", "max"),
        "trigger": draw.among(
            "trigger",
            {},
            {"every_n_train_steps": 2},
            {"every_n_train_steps": 1},
            {"every_n_train_steps": 3},
            {"every_n_epochs": 2},
            {"train_time_interval": timedelta(0)},
        ),
        "top": draw.among("save_top_k", 1, -1, *([2, 3] if monitor else [])),
        "at_epoch_end": draw.among("save_on_train_epoch_end", None, None, True, False),
        "filename": draw.among("filename", None, None, "{epoch}-{step}-{val_loss:.4f}", "model"),
        "last": draw.among("save_last", None, True, "link"),
        "on_exception": draw.flag("on exception", of=4),
    }


def _wider(draw: Draw) -> dict[str, Any]:
    """What came later: earlier seeds keep their meaning."""
    if draw.seed < _WIDER_FROM:
        return {"fits": 1, "between": "", "reload": 0, "metric": False, "second": False, "hooks_draw": False}
    fits = draw.among("fits", 1, 1, 2)
    return {
        "fits": fits,
        "between": draw.among("between fits", "", "tests", "validates") if fits == 2 else "",
        "reload": draw.among("reload every", 0, 0, 1, 2),
        "metric": draw.flag("torchmetric", of=3),
        "second": draw.flag("second ModelCheckpoint", of=3),
        "hooks_draw": draw.flag("hooks draw", of=3),
    }


def start(draw: Draw, here: Here) -> None:
    """The program."""
    stops = _stops(draw)
    one = choose(draw)
    stop = parts.Stop(here)
    module = parts.Module(one, stop)
    ours = _callback(one, here, any(kill.what == "SIGTERM" for kill in stops))
    trainer = _trainer(one, [parts.Witness(here, stop), *parts.callbacks(one), ours, *_second(one, here)])
    train, validation = parts.loaders(one, here.stock)
    given: dict[str, Any] = {"train_dataloaders": train, "val_dataloaders": validation}
    if one.reload:
        given = {"datamodule": parts.Data(one, here.stock)}
    try:
        if one.again == "validates before" and validation is not None:
            trainer.validate(module, validation, verbose=False)
        trainer.fit(module, **given, ckpt_path=_newest_of_stock(here) if here.stock else None)
        if one.fits == 2 and not stop.done:
            _fit_again(one, here, trainer, module, given)
    except (parts.Planned, KeyboardInterrupt, SystemExit):
        return
    if trainer.received_sigterm or (stop.done and stop.what == "SIGTERM"):
        return
    _tell_the_end(here, trainer, module, ours)
    if one.again == "tests behind":
        here.result("tested", trainer.test(module, parts.loaders(one, here.stock)[1] or [], verbose=False))


def _fit_again(one: SimpleNamespace, here: Here, trainer: Any, module: Any, given: dict[str, Any]) -> None:
    if one.between:
        look = trainer.test if one.between == "tests" else trainer.validate
        look(module, parts.loaders(one, here.stock)[1] or [], verbose=False)
    trainer.fit_loop.max_epochs += 1
    if one.steps > 0:
        trainer.fit_loop.epoch_loop.max_steps += 3
    trainer.fit(module, **given)


def _newest_of_stock(here: Here) -> Path | None:
    """What a user of stock Lightning would give to ``fit``."""
    files = [one for one in here.out.glob("*.ckpt") if one.is_file()]
    return max(files, key=lambda one: one.stat().st_mtime_ns, default=None)


def _second(one: SimpleNamespace, here: Here) -> list[Any]:
    """A stock ModelCheckpoint with a folder of its own."""
    if not one.second:
        return []
    return [pl.callbacks.ModelCheckpoint(here.out / "second", every_n_train_steps=5, save_top_k=-1)]


def _callback(one: SimpleNamespace, here: Here, signals: bool) -> Any:
    given = {"dirpath": here.out, "save_top_k": one.top, "save_last": one.last, "save_on_exception": one.on_exception}
    given |= {
        "monitor": one.monitor,
        "mode": one.mode,
        "filename": one.filename,
        "save_on_train_epoch_end": one.at_epoch_end,
    }
    given |= one.trigger
    if here.stock:
        return pl.callbacks.ModelCheckpoint(**given)
    config = CheckpointConfig(timeouts=QUICK, save_on_signals=("SIGTERM",) if signals else ())
    return SafeCheckpointCallback(**given, config=config, resume="auto")


def _trainer(one: SimpleNamespace, callbacks: list[Any]) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=one.epochs, max_steps=one.steps, accelerator="cpu", devices=1, callbacks=callbacks,
        logger=parts.Log(), log_every_n_steps=one.log_every, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=one.accumulate, reload_dataloaders_every_n_epochs=one.reload, **one.check, **one.limits,
    )  # fmt: skip


def _tell_the_end(here: Here, trainer: Any, module: Any, ours: Any) -> None:
    def name(path: Any) -> str:
        return Path(path).name if path else ""

    def plain(value: Any) -> Any:
        return float(value) if value is not None else None

    here.result("best", name(ours.best_model_path))
    here.result("best score", plain(ours.best_model_score))
    here.result("last", name(ours.last_model_path))
    here.result("best k", sorted((name(path), plain(score)) for path, score in ours.best_k_models.items()))
    here.result("epoch", trainer.current_epoch)
    here.result("step", trainer.global_step)
    here.result("metrics", parts.numbers(trainer.callback_metrics))
    here.result("logged metrics", parts.numbers(trainer.logged_metrics))
    here.result("weights", parts.digest(module.state_dict()))
    for file in sorted(here.out.glob("*.ckpt")):
        if not re.match("stopped", file.name):
            here.result(f"file {file.name}", parts.digest_of_file(file))
    here.result("files", sorted(file.name for file in here.out.glob("*") if not file.name.startswith((".", "stopped"))))
