"""The driver's side: which settings of a run are refused, and a list of reported checkpoints that Ray can read again."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ray.train import RunConfig

from safe_ckpt.adapters.extras import durable, presence
from safe_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""The name under which Ray keeps its list, in the folder of the run."""


class SafeRunConfig(RunConfig):
    """Ray's ``RunConfig`` for a run whose workers use ``RayCheckpointer``. Made in the driver, with the same arguments.

    Give ``name`` and ``storage_path``: a driver that starts again with both goes on with the run. Ray refuses to start a run
    whose list of reported checkpoints names one that is not there any more, or is torn because its controller was killed.
    This takes out of the list what is not there. A list that cannot be read is moved aside; a resume looks into the folder.

    Raises:
        ConfigError: the storage is in an object store, or Ray is to delete checkpoints (``num_to_keep``).

    Example:
        ```python
        trainer = TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=SafeRunConfig(name="exp", storage_path="/shared/runs", failure_config=FailureConfig(max_failures=3)),
        )
        ```
    """

    def __post_init__(self) -> None:
        """Look at the settings, and at what an earlier driver left."""
        super().__post_init__()
        folder = _folder_of(self.storage_path, self.storage_filesystem)
        if self.checkpoint_config.num_to_keep is not None:
            message = (
                "Ray deletes by its own list, in which a step that was saved again is there twice. "
                "Leave it out, and give RayCheckpointer a Retention"
            )
            raise ConfigError(key="CheckpointConfig.num_to_keep", message=message)
        mend(folder / self.name)


def _folder_of(storage_path: str, filesystem: object) -> Path:
    parts = urlsplit(storage_path)
    if filesystem is not None or parts.scheme not in ("", "file"):
        message = (
            f"{storage_path} is no path of a file system that all workers share. "
            "Give one, and the address of the object store to RayCheckpointer as mirror.url of its settings"
        )
        raise ConfigError(key="RunConfig.storage_path", message=message)
    return Path(unquote(parts.path)) if parts.scheme else Path(storage_path)


def mend(run: Path) -> None:
    """Take out of Ray's list of a run the checkpoints that are not there any more.

    Args:
        run: the folder of the run; without a list nothing is done.
    """
    snapshot = run / SNAPSHOT
    try:
        text = snapshot.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    try:
        listed = json.loads(text)
        mended = what_is_there(listed, run)
    except (ValueError, KeyError, TypeError, AttributeError):  # torn, or of a release that writes another form
        aside = snapshot.with_name(f"{SNAPSHOT}.unreadable-{time.time_ns()}")
        snapshot.rename(aside)
        logger.warning(
            "Ray's list of checkpoints could not be read: it is %s now, and a resume looks for itself", aside
        )
        return
    if mended != listed:
        logger.info("taken out of %s: checkpoints that are not there any more", snapshot)
        staged = snapshot.with_name(f"{SNAPSHOT}.mended")
        durable.write_durably(staged, json.dumps(mended).encode())
        durable.publish_file(staged, snapshot)


def what_is_there(listed: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Ray's list of a run with the checkpoints that exist, each of them once, where it was reported last.

    Args:
        listed: as Ray writes it.
        run: the folder of the run.
    """
    results, indices = listed["checkpoint_results"], listed["checkpoint_report_indices"]
    last = {one["checkpoint_dir_name"]: number for number, one in enumerate(results)}
    kept = [number for name, number in last.items() if presence.is_there(presence.inside(run, name))]
    kept.sort()
    there = [results[number] for number in kept]
    names = {one["checkpoint_dir_name"] for one in there}
    latest = listed["latest_checkpoint_result"]
    if latest is not None and latest["checkpoint_dir_name"] not in names:
        newest = max(kept, key=lambda number: int(indices[number]), default=None)
        latest = results[newest] if newest is not None else None
    awaited = zip(listed["pending_training_results"], listed["pending_validation_specs"], strict=True)
    pending = [(one, spec) for one, spec in awaited if one["checkpoint_dir_name"] in names]
    return {
        **listed,
        "checkpoint_results": there,
        "checkpoint_report_indices": [indices[number] for number in kept],
        "latest_checkpoint_result": latest,
        "pending_training_results": [one for one, _ in pending],
        "pending_validation_specs": [spec for _, spec in pending],
    }
