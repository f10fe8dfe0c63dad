"""Saves as spans and numbers of OpenTelemetry, through its API alone: the program chooses the SDK that exports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_ckpt import events
from safe_ckpt._version import __version__
from safe_ckpt.errors import ConfigError
from safe_ckpt.hooks.save_record import Save, SaveHook

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
except ImportError as _error:
    _missing: ImportError | None = _error
else:
    _missing = None

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

_SCOPE = "safe_ckpt"


class OpenTelemetryHook(SaveHook):
    """A span ``safe_ckpt.save`` for every save, made when it is over, with ``snapshot``, ``write`` and ``commit`` below it.

    Besides a span ``safe_ckpt.resume``, and with the global meter: ``safe_ckpt.saves``, ``safe_ckpt.bytes``,
    ``safe_ckpt.respawns``, ``safe_ckpt.quarantined``, ``safe_ckpt.save.duration`` and ``safe_ckpt.save.stall``.

    Args:
        tracer_provider: makes the spans; None for the global one, also if that is set later.
        meter_provider: the same for numbers.

    Raises:
        ConfigError: ``opentelemetry-api`` is not installed.
    """

    def __init__(
        self, tracer_provider: trace.TracerProvider | None = None, meter_provider: metrics.MeterProvider | None = None
    ) -> None:
        if _missing is not None:
            message = "needs opentelemetry-api: pip install opentelemetry-api"
            raise ConfigError(key="opentelemetry", message=message) from _missing
        super().__init__()
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
        self._outcomes = meter.create_counter("safe_ckpt.saves", "{save}", "Saves that are over, by outcome")
        self._bytes = meter.create_counter("safe_ckpt.bytes", "By", "Bytes of committed checkpoints, of all ranks")
        self._respawns = meter.create_counter("safe_ckpt.respawns", "{process}", "Writer processes that were replaced")
        self._quarantined = meter.create_counter("safe_ckpt.quarantined", "{checkpoint}", "Damaged ones, moved away")
        self._unhealthy = meter.create_counter("safe_ckpt.unhealthy", "{checkpoint}", "Committed ones with bad numbers")
        self._duration = meter.create_histogram("safe_ckpt.save.duration", "s", "From the call of save to its outcome")
        self._stall = meter.create_histogram("safe_ckpt.save.stall", "s", "How long a save held the training")

    def on_save(self, save: Save) -> None:
        """Count it and make its spans."""
        self._count(save)
        self._trace(save)

    def on_event(self, event: events.Event) -> None:
        """Count a replaced writer and a quarantine; make a span of a resume."""
        if isinstance(event, events.Respawned):
            self._respawns.add(1)
        elif isinstance(event, events.Quarantined):
            self._quarantined.add(1)
        elif isinstance(event, events.Unhealthy) and event.rank == 0:
            self._unhealthy.add(1)
        elif isinstance(event, events.Resumed):
            facts: dict[str, AttributeValue] = {"path": event.path, "step": event.step, "rejected": event.rejected}
            self._span("safe_ckpt.resume", event.at - event.seconds, event.at, facts)

    def _count(self, save: Save) -> None:
        outcome: dict[str, AttributeValue] = {"outcome": save.outcome.kind}
        self._outcomes.add(1, outcome)
        self._duration.record(save.outcome.seconds, outcome)
        if isinstance(save.outcome, events.Committed):
            self._bytes.add(save.outcome.size_bytes)
        if save.snapshotted is not None:
            self._stall.record(save.snapshotted.stall_s, {"mode": save.snapshotted.mode})

    def _trace(self, save: Save) -> None:
        outcome, snapshotted, written = save.outcome, save.snapshotted, save.written
        facts: dict[str, AttributeValue] = {"name": outcome.name, "step": outcome.step, "rank": outcome.rank}
        problem = None
        if isinstance(outcome, events.Committed):
            facts |= {"path": outcome.path, "size_bytes": outcome.size_bytes, "weights_only": outcome.weights_only}
        else:
            facts |= {"phase": outcome.phase, "missing_ranks": outcome.missing}
            problem = outcome.error
        # A root: the background thread is within nothing of the program's.
        parent = self._span("safe_ckpt.save", outcome.at - outcome.seconds, outcome.at, facts, problem=problem)
        if snapshotted is not None:
            facts = {"mode": snapshotted.mode, "size_bytes": snapshotted.size_bytes}
            self._span("safe_ckpt.snapshot", snapshotted.at - snapshotted.stall_s, snapshotted.at, facts, parent)
        if written is not None:
            facts = {"size_bytes": written.size_bytes}
            self._span("safe_ckpt.write", written.at - written.seconds, written.at, facts, parent)
            if isinstance(outcome, events.Committed):
                self._span("safe_ckpt.commit", written.at, outcome.at, {}, parent)

    def _span(
        self,
        name: str,
        begun_at: float,
        ended_at: float,
        facts: dict[str, AttributeValue],
        parent: trace.Span | None = None,
        *,
        problem: str | None = None,
    ) -> trace.Span:
        context = Context() if parent is None else trace.set_span_in_context(parent, Context())
        attributes = {f"safe_ckpt.{key}": value for key, value in facts.items()}
        begun_ns = round(begun_at * 1e9)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=begun_ns)
        if problem is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, problem))
        span.end(max(begun_ns, round(ended_at * 1e9)))
        return span
