"""Numbers in a file for node_exporter's textfile collector."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from pathlib import Path

from safe_ckpt import events
from safe_ckpt.errors import ConfigError
from safe_ckpt.hooks.save_record import Save, SaveHook

logger = logging.getLogger(__name__)
_HELP = {  # what ends in _total is a counter, the others are gauges
    "last_committed_step": "Training step of the newest committed checkpoint.",
    "last_committed_timestamp_seconds": "When it was committed, since the epoch.",
    "last_save_seconds": "From the call of save to the commit, of the last one.",
    "last_stall_seconds": "How long the last save held the training on rank 0.",
    "last_write_bytes_per_second": "How fast rank 0 wrote its part of the last one.",
    "saves_committed_total": "Checkpoints committed since the run began.",
    "saves_failed_total": "Saves that failed since the run began.",
    "bytes_written_total": "Bytes of committed checkpoints, of all ranks.",
    "respawns_total": "Writer processes of rank 0 that died or stalled.",
    "quarantined_total": "Damaged checkpoints that were moved away.",
    "unhealthy_total": "Committed checkpoints with numbers that are NaN or infinite.",
}
_COUNTED = {
    events.Respawned: "respawns_total",
    events.Quarantined: "quarantined_total",
    events.Unhealthy: "unhealthy_total",
}
_KEPT = ("last_committed_step", "last_committed_timestamp_seconds")
_LARGEST_BYTES = 1 << 20


class PrometheusHook(SaveHook):
    """Keeps a file up to date. It is replaced in one step, so that a scrape never sees half of it.

    Counters begin at 0 with every run. The step and the time of the last commit are taken over from the file that is there, so
    that they are not lost when a restarted run fails before its first commit. Every line is labelled ``run`` with the file's
    name without ``.prom``: the collector refuses two files in its directory with the same samples. While writing fails, the
    log has one warning.

    Args:
        path: the file, in an existing directory; ends in ``.prom``.

    Raises:
        ConfigError: there is no such directory, or it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))
        folder = self._path.parent
        if self._path.suffix != ".prom":
            raise ConfigError(key="prometheus_textfile", message=f"{path}: only files that end in .prom are collected")
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            message = f"{folder}: is no directory that this process may write to; make it, or name another one"
            raise ConfigError(key="prometheus_textfile", message=message)
        self._label = self._path.stem.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        super().__init__()
        self._values: dict[str, float] = dict.fromkeys((name for name in _HELP if name.endswith("_total")), 0)
        self._values.update(_last_commit(self._path, self._label))
        self._refused = False

    def on_event(self, event: events.Event) -> None:
        """Count; write when one of the numbers changed."""
        counter = _COUNTED.get(type(event))
        if counter is not None:
            with self._lock:
                self._values[counter] += 1
                self._write()

    def on_save(self, save: Save) -> None:
        """Count and write."""
        if not save.only_renamed:
            with self._lock:
                self._count(save)
                self._write()

    def _count(self, save: Save) -> None:
        values, outcome = self._values, save.outcome
        if isinstance(outcome, events.Failed):
            values["saves_failed_total"] += 1
            return
        values["saves_committed_total"] += 1
        values["bytes_written_total"] += outcome.size_bytes
        if outcome.weights_only:
            return  # no training can resume from it
        values["last_committed_step"] = outcome.step
        values["last_committed_timestamp_seconds"] = outcome.at
        values["last_save_seconds"] = outcome.seconds
        if save.snapshotted is not None:
            values["last_stall_seconds"] = save.snapshotted.stall_s
        if save.bytes_per_s is not None:
            values["last_write_bytes_per_second"] = save.bytes_per_s

    def _write(self) -> None:
        # Not ending in .prom, or it would be collected; always the same, so that killed jobs leave one at most.
        beside = self._path.with_name(f".{self._path.name}.tmp")
        try:
            beside.write_text(self._text(), encoding="utf-8")
            os.replace(beside, self._path)
            self._refused = False
        except OSError as error:
            if not self._refused:
                logger.warning("%s: not brought up to date: %s", self._path, error)
            self._refused = True

    def _text(self) -> str:
        lines = []
        for name, meaning in _HELP.items():
            if name in self._values:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP safe_ckpt_{name} {meaning}", f"# TYPE safe_ckpt_{name} {kind}"]
                lines.append(f'safe_ckpt_{name}{{run="{self._label}"}} {self._values[name]!r}')
        return "\n".join(lines) + "\n"


def _last_commit(path: Path, label: str) -> dict[str, float]:
    """The numbers that an earlier run of this label left in the file; none if it cannot be read: observing fails no save."""
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            text = file.read(_LARGEST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        logger.warning("%s: what an earlier run left there is not read: %s", path, error)
        return {}
    kept: dict[str, float] = {}
    for name in _KEPT:
        line = rf'^safe_ckpt_{name}\{{run="{re.escape(label)}"\}} ([0-9.eE+-]+)$'
        for number in re.findall(line, text, re.MULTILINE):
            with contextlib.suppress(ValueError, OverflowError):
                kept[name] = int(number) if name == "last_committed_step" else float(number)
    return {name: value for name, value in kept.items() if math.isfinite(value)}
