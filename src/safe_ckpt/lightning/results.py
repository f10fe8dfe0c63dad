"""Values logged in an epoch that is under way, and the states of its torchmetrics: Lightning's own checkpoint has none of them.

A scheduler that follows a training metric, ``monitor=`` and EarlyStopping ask for it at the end of the epoch, or right after
the batch at which a checkpoint was saved. Each rank keeps its own, as it was before ranks are synchronized.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric

from safe_ckpt.adapters import Patch

logger = logging.getLogger(__name__)
_SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_MOST_BYTES = 4 << 20  # of one rank: it goes to rank 0 with every save, while training waits


def gather(trainer: Any, device: Any = "cpu") -> dict[str, Any]:
    """Return what this rank has logged in this epoch, as data. Every rank calls this: at the end of an epoch ranks synchronize.

    Args:
        trainer: in ``fit``.
        device: where the copies are to lie. None for where the values are, which waits for no device.
    """
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    shown = {name: {key: _copied(value, device) for key, value in getattr(connector, name).items()} for name in _SHOWN}
    logged = {key: _logged(one, device) for key, one in loop._results.items() if not one.has_reset}
    # Those of a validation that is over are about to be reset.
    over = [one.value for one in loop.val_loop._results.values() if not one.is_tensor and not one.has_reset]
    states, left_out, room = {}, [], _MOST_BYTES
    for name, metric in _metrics(trainer):
        if not metric._update_count or any(metric is one for one in over):
            continue
        size = _bytes([getattr(metric, one) for one in metric._defaults])
        if size > room:
            left_out.append(name)
        else:
            states[name], room = _state(metric, device), room - int(size)
    return {"shown": shown, "logged": logged, "metrics": states, "left_out": left_out}


def _metrics(trainer: Any) -> list[tuple[str, Metric]]:
    return [(name, one) for name, one in trainer.lightning_module.named_modules() if isinstance(one, Metric)]


def _logged(result: Any, device: Any) -> dict[str, Any]:
    meta = {field.name: getattr(result.meta, field.name) for field in dataclasses.fields(result.meta)}
    sync = meta.pop("_sync")
    meta["reduce_fx"] = result.meta.reduce_fx.__name__
    how = {"meta": meta, "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only}}
    return {**how, **_state(result, device), "step": _copied(result._forward_cache, device)}


def _state(metric: Metric, device: Any) -> dict[str, Any]:
    return {
        "state": {one: _copied(getattr(metric, one), device) for one in metric._defaults},
        "updates": metric._update_count,
    }


def _copied(value: Any, device: Any = "cpu") -> Any:
    return apply_to_collection(value, torch.Tensor, lambda one: one.detach().to(device, copy=True))


def _bytes(value: Any) -> float:
    """How large it is; without end if it is anything but tensors, numbers, and lists of them."""
    if isinstance(value, list):
        return sum(map(_bytes, value))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return 8 if isinstance(value, int | float) else float("inf")


def put_logged_back(trainer: Any, saved: Mapping[str, Any], undo: Patch, *, over: bool) -> None:
    """Put back, at ``on_train_start``, what was logged.

    Args:
        trainer: in ``fit``.
        saved: what ``gather`` has found on this rank.
        undo: until ``fit`` ends.
        over: whether the epoch has ended, so that the next one begins with none of it.
    """
    connector, device = trainer._logger_connector, trainer.strategy.root_device
    for name, values in saved["shown"].items():
        getattr(connector, f"_{name}").update(_copied(values, device))
    ended = {one["meta"]["metric_attribute"] for one in saved["logged"].values()} if over else set()
    for name, metric in _metrics(trainer):
        if name in saved["metrics"] and name not in ended:
            _fill(metric, saved["metrics"][name])
    if over:
        return
    # Else the first value that is logged would reset what its hook has logged before.
    connector._first_loop_iter = False
    if saved["left_out"] and trainer.is_global_zero:
        message = "resuming within an epoch: %s, no plain data or too large, was not saved and begins anew"
        logger.warning(message, ", ".join(saved["left_out"]))
    results = trainer.fit_loop.epoch_loop._results
    for key, one in saved["logged"].items():
        made = _made(trainer, one, type(results)).to(device)
        if made.value is not None:
            results[key] = made
    _go_on_with(results, saved["logged"], undo)


def do_without(trainer: Any, undo: Patch) -> None:
    """Go on without what was logged. Until this epoch has ended it is no error to ask for a metric that nobody knows."""
    lenient = Patch()
    for one in (*trainer.lr_scheduler_configs, *trainer.early_stopping_callbacks):
        lenient.put(one, {"strict": False})
    for saving in trainer.checkpoint_callbacks:
        if getattr(saving, "monitor", None) is not None:
            lenient.put_methods(saving, {"_save_topk_checkpoint": functools.partial(_save_if_known, saving)})

    def end(on_advance_end: Callable[[], None]) -> None:
        on_advance_end()
        lenient.give_back()

    undo.also(lenient.give_back)
    undo.once(trainer.fit_loop, "on_advance_end", end)
    if trainer.is_global_zero:
        logger.warning(
            "resuming within an epoch, and the checkpoint does not have what was logged in it: stock Lightning, an earlier "
            "version of safe_ckpt or another number of ranks saved it. The means of this epoch are those of the rest of it. "
            "Schedulers, EarlyStopping and monitor= get those, or pass over them where there are none"
        )


def _save_if_known(saving: Any, trainer: Any, monitor_candidates: Mapping[str, Any]) -> None:
    if saving.monitor in monitor_candidates:
        type(saving)._save_topk_checkpoint(saving, trainer, monitor_candidates)


def _made(trainer: Any, saved: Mapping[str, Any], kind: type[Any]) -> Any:
    """Make a result as if it had been logged. Its value is None where the metric that was logged is not there any more."""
    module = sys.modules[kind.__module__]
    known = {field.name for field in dataclasses.fields(module._Metadata)}
    meta = module._Metadata(**{name: value for name, value in saved["meta"].items() if name in known})
    meta.sync = module._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = module._ResultMetric(meta, is_tensor=bool(saved["state"]))
    if not result.is_tensor:
        result.value = dict(_metrics(trainer)).get(meta.metric_attribute)
    _fill(result, saved)
    result._forward_cache = saved["step"]
    return result


def _fill(metric: Any, saved: Mapping[str, Any]) -> None:
    """Give a metric its saved state; nothing is done if it is now another one."""
    if metric._defaults.keys() != saved["state"].keys():
        return
    for name, value in saved["state"].items():
        here = getattr(metric, name)
        setattr(metric, name, _copied(value, here.device if isinstance(here, torch.Tensor) else metric.device))
    metric._update_count, metric._computed = saved["updates"], None


def _go_on_with(results: Any, waiting: dict[str, Any], undo: Patch) -> None:
    """Have the first ``log`` of each make it anew, for it says how: with a process group, or otherwise than before."""
    log, update = results.log, results.update_metrics

    def make_anew(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        if f"{fx}.{name}" in waiting:
            results.pop(f"{fx}.{name}", None)
        log(fx, name, *args, **kwargs)

    def go_on(key: str, *args: Any, **kwargs: Any) -> None:
        saved = waiting.pop(key, None)
        if saved is not None and saved["meta"]["reduce_fx"] == results[key].meta.reduce_fx.__name__:
            _fill(results[key], saved)
        update(key, *args, **kwargs)

    def end(reset: Any, *args: Any, **kwargs: Any) -> None:
        waiting.clear()  # the epoch is over
        reset(*args, **kwargs)

    undo.put_methods(results, {"log": make_anew, "update_metrics": go_on})
    undo.once(results, "reset", end)
