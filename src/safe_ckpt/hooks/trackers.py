"""References to committed checkpoints in Weights & Biases and in MLflow: where each is and what it is. Nothing is uploaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from safe_ckpt import events

logger = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_MOST_BYTES = 1 << 28


class _ReferenceHook:
    """Takes commits of checkpoints that training can go on from, on rank 0. What fails is logged, and the next is tried."""

    def __call__(self, event: events.Event) -> None:
        """Take one event."""
        if not isinstance(event, events.Committed) or event.weights_only or event.rank != 0:
            return
        try:
            self.refer(event, facts_of_commit(event))
        except Exception as error:  # a tracker without an answer is no reason to have none of the later ones
            logger.warning(
                "%s has no reference to %s: %s: %s", type(self).__name__, event.path, type(error).__name__, error
            )

    def refer(self, event: events.Committed, facts: dict[str, Any]) -> None:
        raise NotImplementedError


class WandbHook(_ReferenceHook):
    """Logs each committed checkpoint as a reference artifact of type ``checkpoint``, once it is committed.

    Its metadata are the path, the digest of the manifest (which has those of all files), the metrics and the step. One with bad
    numbers has the alias ``unhealthy``. Needs ``wandb``.

    Args:
        run: what ``wandb.init`` returned; None takes the run that is active at a commit, and does nothing without one.
        name: of the artifact; None for ``checkpoint-`` and the run's id.
    """

    def __init__(self, run: Any = None, *, name: str | None = None) -> None:
        self._wandb: Any = import_module("wandb")
        self._run, self._name = run, name

    def refer(self, event: events.Committed, facts: dict[str, Any]) -> None:
        """Log the artifact."""
        run = self._run or self._wandb.run
        if run is None:
            return
        artifact = self._wandb.Artifact(self._name or f"checkpoint-{run.id}", type="checkpoint", metadata=facts)
        path = event.path if "://" in event.path else Path(event.path).absolute().as_uri()
        artifact.add_reference(path, name=event.name, checksum=False)  # neither read nor uploaded
        step = f"step-{event.step}"
        run.log_artifact(artifact, aliases=[step, "unhealthy"] if facts["healthy"] is False else ["latest", step])


class MlflowHook(_ReferenceHook):
    """Logs for each committed checkpoint a small file ``checkpoints/<name>.json`` to a run: path, digest, metrics, health.

    The tag ``safe_ckpt.checkpoint`` is the path of the newest that is healthy. Needs ``mlflow``.

    Args:
        run_id: of the run; None takes the run that is active when this is made.
        client: an ``MlflowClient``; None makes one.

    Raises:
        ValueError: no run was named, and none is active.
    """

    def __init__(self, run_id: str | None = None, *, client: Any = None) -> None:
        mlflow: Any = import_module("mlflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise ValueError("MlflowHook: no run is active; call mlflow.start_run() before, or give run_id")
        self._client = client or mlflow.MlflowClient()
        self._run_id = run_id or active.info.run_id

    def refer(self, event: events.Committed, facts: dict[str, Any]) -> None:
        """Log the file and the tag."""
        self._client.log_dict(self._run_id, facts, f"checkpoints/{event.name}.json")
        if facts["healthy"] is not False:
            self._client.set_tag(self._run_id, "safe_ckpt.checkpoint", event.path)


def facts_of_commit(event: events.Committed) -> dict[str, Any]:
    """The content of a reference: JSON-able. ``digest`` is None where the manifest lies elsewhere (an object store)."""
    facts: dict[str, Any] = {"path": event.path, "step": event.step, "size_bytes": event.size_bytes}
    data, told = b"", {}
    with contextlib.suppress(OSError, ValueError), (Path(event.path) / _MANIFEST).open("rb") as file:
        data = file.read(_MOST_BYTES)
        told = json.loads(data)
    health = told.get("health") if isinstance(told, dict) else None
    return {
        **facts,
        "digest": f"sha256:{hashlib.sha256(data).hexdigest()}" if data else None,
        "metrics": told.get("metrics", {}) if isinstance(told, dict) else {},
        "healthy": health.get("healthy") if isinstance(health, dict) else None,
    }
