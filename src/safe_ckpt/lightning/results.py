"""What was logged in an epoch that is under way, and the states of its torchmetrics: Lightning's own checkpoint has none of it.

A scheduler that follows a training metric, ``monitor=`` and EarlyStopping ask for it at the end of the epoch, or right after
the batch at which a checkpoint was saved. Each rank keeps its own, as it was before ranks are synchronized.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchmetrics import Metric

from safe_ckpt.adapters import Patch

logger = logging.getLogger(__name__)
_SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_MOST_BYTES = 4 << 20  # of one rank: it goes to rank 0 with every save, while training waits


def gather(trainer: Any) -> dict[str, Any]:
    """What this rank has logged in this epoch, as data. Every rank calls this: at the end of an epoch ranks synchronize."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    shown = {name: {key: _copied(value) for key, value in getattr(connector, name).items()} for name in _SHOWN}
    logged = {key: _logged(one) for key, one in loop._results.items() if not one.has_reset}
    # Those of a validation that is over are about to be reset.
    over = [one.value for one in loop.val_loop._results.values() if not one.is_tensor]
    states, left_out, room = {}, [], _MOST_BYTES
    for name, metric in _metrics(trainer):
        state = _state(metric) if metric._update_count and not any(metric is one for one in over) else {}
        size = _bytes(list(state.values()))
        if size is None or size > room:
            left_out.append(name)
        elif state:
            states[name] = {"state": _copied(state), "updates": metric._update_count}
            room -= size
    return {"shown": shown, "logged": logged, "metrics": states, "left_out": left_out}


def _metrics(trainer: Any) -> list[tuple[str, Metric]]:
    return [(name, one) for name, one in trainer.lightning_module.named_modules() if isinstance(one, Metric)]


def _logged(result: Any) -> dict[str, Any]:
    fields = {field.name: getattr(result.meta, field.name) for field in dataclasses.fields(result.meta)}
    sync = fields.pop("_sync")
    meta = {**fields, "reduce_fx": result.meta.reduce_fx.__name__}
    found = {"meta": meta, "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only}}
    return {
        **found,
        "state": _copied(_state(result)),
        "updates": result._update_count,
        "step": _copied(result._forward_cache),
    }


def _state(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _copied(value: Any, device: Any = "cpu") -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(one, device) for key, one in value.items()}
    return [_copied(one, device) for one in value] if isinstance(value, list) else value


def _bytes(value: Any) -> int | None:
    """How large it is; None if it is anything but tensors, numbers, and lists of them."""
    if isinstance(value, list):
        sizes = [_bytes(one) for one in value]
        return None if None in sizes else sum(one for one in sizes if one is not None)
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return 8 if isinstance(value, int | float) else None


def put_back(trainer: Any, saved: Mapping[str, Any], undo: Patch, *, over: bool) -> None:
    """At ``on_train_start``.

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
    connector._first_loop_iter = (
        False  # else the first value that is logged would reset what its hook has logged before
    )
    if saved["left_out"] and trainer.is_global_zero:
        names = ", ".join(saved["left_out"])
        message = (
            "resuming within an epoch: the states of %s are no plain data or too large, were not saved and begin anew"
        )
        logger.warning(message, names)
    results = trainer.fit_loop.epoch_loop._results
    for key, one in saved["logged"].items():
        if (made := _made(trainer, one, type(results))) is not None:
            results[key] = made.to(device)
    _go_on_with(results, dict(saved["logged"]), undo)


def do_without(trainer: Any, undo: Patch) -> None:
    """The checkpoint has none. Until this epoch has ended it is no error to ask for a metric that nobody knows."""
    lenient = Patch()
    for one in (*trainer.lr_scheduler_configs, *trainer.early_stopping_callbacks):
        lenient.put(one, {"strict": False})
    for saving in trainer.checkpoint_callbacks:
        if getattr(saving, "monitor", None) is not None:
            lenient.put_methods(saving, {"_save_topk_checkpoint": _if_known(saving)})

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


def _if_known(saving: Any) -> Callable[[Any, Mapping[str, Any]], None]:
    save = saving._save_topk_checkpoint

    def save_if_known(trainer: Any, monitor_candidates: Mapping[str, Any]) -> None:
        if saving.monitor in monitor_candidates:
            save(trainer, monitor_candidates)

    return save_if_known


def _made(trainer: Any, saved: Mapping[str, Any], kind: type[Any]) -> Any:
    """As if it had been logged. None where the metric that was logged is not there any more."""
    module = sys.modules[kind.__module__]
    known = {field.name for field in dataclasses.fields(module._Metadata)}
    meta = module._Metadata(**{name: value for name, value in saved["meta"].items() if name in known})
    meta.sync = module._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = module._ResultMetric(meta, is_tensor=bool(saved["state"]))
    if not result.is_tensor:
        result.value = dict(_metrics(trainer)).get(meta.metric_attribute)
        if result.value is None:
            return None
    _fill(result, saved)
    result._forward_cache = saved["step"]
    return result


def _fill(metric: Any, saved: Mapping[str, Any]) -> None:
    """Nothing is done if this metric is now another one."""
    if metric._defaults.keys() != saved["state"].keys():
        return
    for name, value in saved["state"].items():
        here = getattr(metric, name)
        setattr(metric, name, _copied(value, here.device if isinstance(here, torch.Tensor) else metric.device))
    metric._update_count, metric._computed = saved["updates"], None


def _go_on_with(results: Any, waiting: dict[str, Any], undo: Patch) -> None:
    """The first ``log`` of each makes it anew, for it says how: with a process group, or otherwise than before the resume."""
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
