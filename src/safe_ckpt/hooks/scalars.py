"""Numbers for experiment trackers. Only the thread that trains may call those, so the background keeps numbers for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from safe_ckpt import events
from safe_ckpt.hooks.save_record import Save, SaveHook

_MOST = 64  # exports, of which no numbers are taken, must not accumulate


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The numbers of one save.

    Attributes:
        name: of the checkpoint.
        step: the training step.
        values: ``ckpt/failures`` and ``ckpt/respawns`` count since the start of the run. Of a committed one also
            ``ckpt/seconds`` from the call to the commit, ``ckpt/bytes`` of all ranks, and as this rank saw it
            ``ckpt/stall_s``, how long the call held the training, and ``ckpt/write_gbps``, in 10^9 bytes per second.
    """

    name: str
    step: int
    values: dict[str, float]


class ScalarsHook(SaveHook):
    """Takes events on any thread; returns numbers, save by save."""

    def __init__(self) -> None:
        super().__init__()
        self._done: deque[Scalars] = deque(maxlen=_MOST)
        self._failures = 0
        self._respawns = 0

    def on_event(self, event: events.Event) -> None:
        """Count."""
        if isinstance(event, events.Respawned):
            with self._lock:
                self._respawns += 1

    def on_save(self, save: Save) -> None:
        """Keep its numbers."""
        if not save.only_renamed:
            with self._lock:
                self._keep(save)

    def _keep(self, save: Save) -> None:
        values: dict[str, float] = {}
        if isinstance(save.outcome, events.Committed):
            values = {"ckpt/seconds": save.outcome.seconds, "ckpt/bytes": float(save.outcome.size_bytes)}
            if save.snapshotted is not None:
                values["ckpt/stall_s"] = save.snapshotted.stall_s
            if save.bytes_per_s is not None:
                values["ckpt/write_gbps"] = save.bytes_per_s / 1e9
        else:
            self._failures += 1
        values |= {"ckpt/failures": float(self._failures), "ckpt/respawns": float(self._respawns)}
        self._done.append(Scalars(name=save.outcome.name, step=save.outcome.step, values=values))

    def take(self, name: str) -> Scalars | None:
        """The numbers of the last save of this name, once; None where there are none, or no longer."""
        with self._lock:
            named = [scalars for scalars in self._done if scalars.name == name]
            others = [scalars for scalars in self._done if scalars.name != name]
            self._done = deque(others, maxlen=_MOST)
        return named[-1] if named else None
