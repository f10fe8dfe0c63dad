"""Reports of a save to an Accelerator's trackers.

W&B, Comet, DVCLive, SwanLab and Trackio have one step for all that is logged. It is the user's: W&B drops what comes with a
smaller one. So they get none of ours, and what they are told joins the user's next row where that can be had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

_STEP_OF_EACH = ("aim", "clearml", "mlflow", "tensorboard")
"""These keep a step for each value that is logged."""


def sinks(accelerator: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Return the trackers that take numbers now: see ``safe_ckpt.adapters.tracking.Sinks``."""
    own = accelerator.trackers if accelerator.is_main_process else []
    return [(f"the tracker {one.name}", functools.partial(_log, one)) for one in own]


def _log(tracker: Any, values: Mapping[str, Any], *, step: int) -> None:
    if tracker.name in _STEP_OF_EACH:
        tracker.log(values, step=step)
        return
    values = {**values, "ckpt/step": step}
    if tracker.name == "dvclive":  # its ``log`` ends the user's step
        for name, value in values.items():
            tracker.tracker.log_metric(name, value)
    elif tracker.name == "wandb":
        tracker.log(values, commit=False)
    else:
        tracker.log(values)
