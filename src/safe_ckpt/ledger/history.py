"""The history of a directory: its runs, and the outcome of every save. Pure: events in, frozen facts out.

Rank 0 records a save; of other ranks' events only quarantines and replaced writers count. All times are seconds since the
epoch, of the clock of the machine that recorded them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from safe_ckpt.ledger.event_log import Recorded, Recording

Outcome = Literal["committed", "failed", "outcome unknown", "in flight", "interrupted"]
UNCOMMITTED: tuple[Outcome, ...] = ("failed", "outcome unknown", "interrupted")
"""Outcomes of saves that are over and not known to be committed."""


@dataclass(frozen=True, kw_only=True)
class SaveHistory:
    """One save. What was not recorded is None.

    Attributes:
        name: the checkpoint's name.
        step: the training step.
        run: the number of its run, from 1.
        outcome: "interrupted" means that its run ended before it did, "outcome unknown" that it may be committed: the next
            resume sees.
        begun: when ``save`` was called, as far as known.
        ended: when its outcome was recorded, or what was recorded of it last.
        stall_s: how long the call held training.
        written_bytes: what rank 0 wrote.
        write_s: how long rank 0 wrote.
        total_s: from the call to the end.
        size_bytes: the whole checkpoint.
        at_risk_s: of a committed one: the most work that a kill just before its commit would have cost, counted from the
            call of the last committed save before it, or from the resume. None for the first save of a run that did not
            resume: when its work began is not recorded.
        kept_bytes: of a committed one: all checkpoints on the disk in that moment, as far as the events tell.
        path: where it was committed.
        weights_only: it holds a model's weights alone: nothing to resume from.
        error: why it failed, or why its outcome is unknown.
        phase: in which phase it failed.
        healthy: whether no bad numbers were found in it.
        optimizer_steps: those that torch's optimizers had made in this process when it was asked for.
    """

    name: str
    step: int | None
    run: int
    outcome: Outcome
    begun: float
    ended: float
    stall_s: float | None = None
    written_bytes: int | None = None
    write_s: float | None = None
    total_s: float | None = None
    size_bytes: int | None = None
    at_risk_s: float | None = None
    kept_bytes: int | None = None
    path: str = ""
    weights_only: bool = False
    error: str = ""
    phase: str = ""
    healthy: bool = True
    optimizer_steps: int | None = None

    @property
    def gbps(self) -> float | None:
        """Rank 0's throughput in 10**9 bytes per second."""
        return self.written_bytes / self.write_s / 1e9 if self.written_bytes and self.write_s else None


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Another event worth reading: a resume, a quarantine, a new writer process, a signal."""

    at: float
    run: int
    kind: str
    text: str
    step: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A checkpoint that retention deleted; its size if its commit was read."""

    at: float
    path: str
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MirrorHistory:
    """The copies of committed checkpoints.

    Attributes:
        path: of the last one that was copied; "" for none.
        error: why the last try failed; "" where it did not.
    """

    path: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """One run: from the start of a process (or its resume) to the last thing that it recorded.

    Attributes:
        opened: when its directory was taken, or its first event.
        steps_before: the steps of its process's optimizers by then; None where nobody counted.
        sign_s: a sign of life was due this often once optimizers stepped; None where there are none, or nobody says.
        sign: the last moment for which the steps are known, and those.
        resumed: what it went on from, and when it had it; None where it recorded none.
        over: whether it recorded its end; ``failed``: by an exception.
    """

    number: int
    begun: float
    ended: float
    opened: float = 0.0
    steps_before: int | None = None
    sign_s: float | None = None
    sign: tuple[float, int] | None = None
    resumed: tuple[float, str] | None = None
    over: bool = False
    failed: bool = False
    host: str = ""
    pid: int | None = None
    world_size: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time that it lasted, going by its records."""
        return max(0.0, self.ended - self.begun)


@dataclass(frozen=True, kw_only=True)
class History:
    """The history of a directory, oldest first.

    Attributes:
        mirror: what became of copies; None where there are none.
        freed_bytes: what the removals freed, where that was recorded.
        events: how many were read; ``skipped`` and ``earlier`` as in ``Recording``.
    """

    runs: tuple[RunHistory, ...] = ()
    saves: tuple[SaveHistory, ...] = ()
    notices: tuple[Notice, ...] = ()
    removals: tuple[Removal, ...] = ()
    mirror: MirrorHistory | None = None
    freed_bytes: int | None = None
    events: int = 0
    skipped: int = 0
    earlier: bool = False

    def of(self, outcome: Outcome) -> tuple[SaveHistory, ...]:
        """The saves with this outcome."""
        return tuple(save for save in self.saves if save.outcome == outcome)


def build_history(recording: Recording) -> History:
    """The history of what was recorded."""
    return _Builder(recording).history()


class _Builder:
    """Receives one event after the other, oldest first. Ignores unknown kinds, and saves of other ranks."""

    def __init__(self, recording: Recording) -> None:
        self._runs: list[RunHistory] = []
        self._saves: list[SaveHistory] = []
        self._notices: list[Notice] = []
        self._removals: list[Removal] = []
        self._mirror: MirrorHistory | None = None
        self._open: dict[tuple[str, int | None], SaveHistory] = {}
        self._disk = Disk()
        self._safe_since: float | None = None  # work before this moment is on the disk
        self._freed_bytes: int | None = None
        self._announced = False  # the run recorded when it began
        self._saving = False  # the run has come to its first save
        self._recording = recording
        for event in recording.events:
            take = getattr(self, f"_on_{event.kind}", None)
            if take is not None and (event.rank == 0 or event.kind in ("quarantined", "respawned")):
                self._receive(event, take)

    def _receive(self, event: Recorded, take: Callable[[Recorded], None]) -> None:
        again = event.kind == "resumed" and self._saving and not self._announced
        if event.kind == "run" or not self._runs or again:
            self._begin(event)
        take(event)
        run = self._runs[-1]
        self._runs[-1] = replace(run, begun=min(run.begun, event.at), ended=max(run.ended, event.at))

    def history(self) -> History:
        """The history that these events tell."""
        return History(
            runs=tuple(self._runs),
            saves=(*self._saves, *self._open.values()),
            notices=tuple(self._notices),
            removals=tuple(self._removals),
            mirror=self._mirror,
            freed_bytes=self._freed_bytes,
            events=len(self._recording.events),
            skipped=self._recording.skipped,
            earlier=self._recording.earlier,
        )

    def _begin(self, event: Recorded) -> None:
        self._saves += [replace(save, outcome="interrupted") for save in self._open.values()]
        self._open.clear()
        # The records of a save come at its end; a run that did not say when it began did so no later than its first call.
        begun = event.at - (event.number("seconds") or 0.0)
        self._runs.append(RunHistory(number=len(self._runs) + 1, begun=begun, ended=event.at, opened=event.at))
        self._safe_since = None
        self._announced = event.kind == "run"
        self._saving = False

    def _on_run(self, event: Recorded) -> None:
        host, pid, world_size = event.text("host"), event.count("pid"), event.count("world_size")
        versions, made = event.texts("versions"), event.count("optimizer_steps")
        began, run = event.number("began"), self._runs[-1]
        before = self._runs[-2] if len(self._runs) > 1 else None
        again = before is not None and (before.host, before.pid) == (host, pid) and (began or 0.0) < before.ended
        self._runs[-1] = replace(
            run,
            host=host,
            pid=pid,
            world_size=world_size,
            versions=versions,
            # A process may open a directory more than once: it began one run.
            begun=run.begun if began is None or again else min(run.begun, began),
            steps_before=None if made is None else made if again else 0,
            sign_s=event.number("sign_s"),
            sign=None if made is None else (event.at, made),
        )

    def _on_alive(self, event: Recorded) -> None:
        self._count(event.at, event.count("optimizer_steps"))

    def _on_end(self, event: Recorded) -> None:
        self._count(event.at, event.count("optimizer_steps"))
        self._runs[-1] = replace(self._runs[-1], over=True, failed=event.facts.get("in_order") is False)

    def _count(self, at: float, made: int | None) -> None:
        """The optimizers of the run had made so many steps by then."""
        if made is not None and made >= 0:
            self._runs[-1] = replace(self._runs[-1], sign=(at, made))

    def _opened(self, event: Recorded) -> SaveHistory:
        self._saving = True
        name, step = event.text("name"), event.count("step")
        known = self._open.pop((name, step), None)
        if known is not None:
            return replace(known, ended=event.at)
        number = len(self._runs)
        return SaveHistory(name=name, step=step, run=number, outcome="in flight", begun=event.at, ended=event.at)

    def _go_on(self, event: Recorded, **facts: float | None) -> None:
        """Add ``facts`` to the save of the event, which is still in flight."""
        save = self._opened(event)
        self._open[save.name, save.step] = replace(save, **facts)  # type: ignore[arg-type]

    def _on_agreed(self, event: Recorded) -> None:
        begun, made = event.at - (event.number("seconds") or 0.0), event.count("optimizer_steps")
        self._go_on(event, begun=begun, optimizer_steps=made)
        sign = self._runs[-1].sign
        if sign is None or (
            made is not None and made >= sign[1]
        ):  # it is told late, and a sign may have come meanwhile
            self._count(begun, made)

    def _on_snapshotted(self, event: Recorded) -> None:
        self._go_on(event, stall_s=event.number("stall_s"))

    def _on_written(self, event: Recorded) -> None:
        self._go_on(event, written_bytes=event.count("size_bytes"), write_s=event.number("seconds"))

    def _on_committed(self, event: Recorded) -> None:
        path, size_bytes = event.text("path"), event.count("size_bytes")
        save = replace(self._finished(event, "committed"), path=path, size_bytes=size_bytes)
        if event.facts.get("weights_only") is True:
            self._saves.append(replace(save, weights_only=True))
            return
        self._disk.put(path, size_bytes or 0)
        at_risk_s = None if self._safe_since is None else max(0.0, save.ended - self._safe_since)
        self._saves.append(replace(save, at_risk_s=at_risk_s, kept_bytes=self._disk.kept_bytes))
        self._safe_since = save.begun

    def _on_failed(self, event: Recorded) -> None:
        unknown = event.facts.get("outcome_unknown") is True
        save = self._finished(event, "outcome unknown" if unknown else "failed")
        self._saves.append(replace(save, error=event.text("error") or "no reason recorded", phase=event.text("phase")))

    def _on_removed(self, event: Recorded) -> None:
        path = event.text("path")
        self._removals.append(Removal(at=event.at, path=path, size_bytes=self._disk.take(path)))

    def _on_retained(self, event: Recorded) -> None:
        kept = event.sequence("kept")
        self._disk.keep_only(kept, max(event.count("kept_count") or 0, len(kept)))
        if (freed_bytes := event.count("freed_bytes")) is not None:
            self._freed_bytes = (self._freed_bytes or 0) + freed_bytes

    def _notice(self, event: Recorded, text: str, step: int | None = None) -> None:
        number, seconds = len(self._runs), event.number("seconds")
        self._notices.append(Notice(at=event.at, run=number, kind=event.kind, text=text, step=step, seconds=seconds))

    def _on_resumed(self, event: Recorded) -> None:
        passed_over = event.count("rejected") or 0
        beside = f"; {passed_over} passed over as unusable" if passed_over else ""
        self._notice(event, f"{event.text('path')}{beside}", event.count("step"))
        self._safe_since = event.at
        self._runs[-1] = replace(self._runs[-1], resumed=(event.at, event.text("path")))

    def _on_quarantined(self, event: Recorded) -> None:
        self._disk.take(event.text("path"))
        self._notice(event, f"{event.text('path')}: {event.text('reason')}")

    def _on_unhealthy(self, event: Recorded) -> None:
        marked, name, path = event.facts.get("marked") is True, event.text("name"), event.text("path")
        counts = "unhealthy" if marked else "counts like any other"
        for place, save in enumerate(self._saves):
            if marked and save.run == len(self._runs) and (save.name == name or save.path == path):
                self._saves[place] = replace(save, healthy=False)
        self._notice(event, f"{event.text('path')} ({counts}): {event.text('what')}", event.count("step"))

    def _on_mirrored(self, event: Recorded) -> None:
        path, error, before = event.text("path"), event.text("error"), self._mirror or MirrorHistory()
        self._mirror = replace(before, error=error) if error else MirrorHistory(path=path)
        if error and not before.error:  # each save tries again
            self._notice(event, f"{path} has no copy in {event.text('url')}: {error}")

    def _on_fetched(self, event: Recorded) -> None:
        self._notice(event, f"{event.text('path')} was fetched from {event.text('url')}")

    def _on_respawned(self, event: Recorded) -> None:
        self._notice(event, f"the writer process was replaced on rank {event.rank}: {event.text('ended')}")

    def _on_stoprequested(self, event: Recorded) -> None:
        self._notice(event, f"{event.text('signal') or 'a signal'} asked all ranks to save and stop")

    def _finished(self, event: Recorded, outcome: Outcome) -> SaveHistory:
        save, total_s = self._opened(event), event.number("seconds")
        begun = min(save.begun, event.at) if total_s is None else event.at - total_s
        run = self._runs[-1]
        self._runs[-1] = replace(run, begun=min(run.begun, begun))
        return replace(save, outcome=outcome, begun=begun, ended=event.at, total_s=total_s)


class Disk:
    """The path and size of every checkpoint on the disk, as far as the events report them.

    Attributes:
        kept_bytes: the size of all that is there.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._sizes: dict[str, int] = {}
        self._newest = ""

    def put(self, path: str, size_bytes: int) -> None:
        """A checkpoint appeared, or was replaced."""
        self.take(path)
        self._sizes[path] = size_bytes
        self._newest = path
        self.kept_bytes += size_bytes

    def take(self, path: str) -> int | None:
        """A checkpoint was deleted or moved; returns its size if it was known."""
        size_bytes = self._sizes.pop(path, None)
        self.kept_bytes -= size_bytes or 0
        return size_bytes

    def keep_only(self, names: Sequence[str], count: int) -> None:
        """Forget those that are no longer there: a job that was killed may have deleted some without recording it.

        Args:
            names: of the newest of them, or of all, oldest first.
            count: of all that are there. Where that is more than there are names, those that were committed last of the
                others are taken to be there.
        """
        folder, newest = posixpath.split(self._newest)
        if newest in names:
            kept = {posixpath.join(folder, name) for name in names}
            others = [path for path in self._sizes if posixpath.dirname(path) == folder and path not in kept]
            for path in others[: max(0, len(others) - (count - len(names)))]:
                self.take(path)
