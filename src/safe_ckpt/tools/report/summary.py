"""The figures of a whole history, and the sentences that open every view of it. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from safe_ckpt import text
from safe_ckpt.ledger.history import History, SaveHistory


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The figures of all saves of a history. An unknown figure is None.

    Attributes:
        unknown: how many have an unknown outcome.
        last: the last committed save that one can resume from.
        spanned_s: from the first save of each run to its last one, all runs together: a time that is known, unlike that
            before the first save and after the last one.
        stall_s: how long saves held training within that time.
        stall_share: ``stall_s`` divided by ``spanned_s``.
        at_risk_s: the most work that a kill at the worst moment would have cost.
        behind: how many saves were committed after the newest that has a copy in the mirror; None without a mirror.
        removed: how many checkpoints retention deleted.
        freed_bytes: what that freed, as far as their sizes were read.
    """

    committed: int
    failed: int
    unknown: int
    interrupted: int
    in_flight: int
    last: SaveHistory | None
    spanned_s: float
    stall_s: float
    stall_share: float | None
    median_stall_s: float | None
    longest_stall_s: float | None
    median_gbps: float | None
    slowest_gbps: float | None
    median_total_s: float | None
    longest_total_s: float | None
    median_at_risk_s: float | None
    at_risk_s: float | None
    behind: int | None
    removed: int
    freed_bytes: int


def total(history: History) -> Totals:
    """The figures of a history."""
    committed = history.of("committed")
    stalls = [save.stall_s for save in history.saves if save.stall_s is not None]
    rates = [save.gbps for save in history.saves if save.gbps is not None]
    totals = [save.total_s for save in committed if save.total_s is not None]
    risks = [save.at_risk_s for save in committed if save.at_risk_s is not None] + _since_last_commit(history)
    known_bytes = sum(removal.size_bytes or 0 for removal in history.removals)
    spanned_s, stall_s = _spanned(history)
    whole = [save for save in committed if not save.weights_only]
    return Totals(
        committed=len(committed),
        failed=len(history.of("failed")),
        unknown=len(history.of("outcome unknown")),
        interrupted=len(history.of("interrupted")),
        in_flight=len(history.of("in flight")),
        last=whole[-1] if whole else None,
        spanned_s=spanned_s,
        stall_s=stall_s,
        stall_share=min(1.0, stall_s / spanned_s) if stalls and spanned_s > 0 else None,
        median_stall_s=_median(stalls),
        longest_stall_s=max(stalls, default=None),
        median_gbps=_median(rates),
        slowest_gbps=min(rates, default=None),
        median_total_s=_median(totals),
        longest_total_s=max(totals, default=None),
        median_at_risk_s=_median(risks),
        at_risk_s=max(risks, default=None),
        behind=_behind(history),
        removed=len(history.removals),
        freed_bytes=known_bytes if history.freed_bytes is None else history.freed_bytes,
    )


def figures_of(save: SaveHistory) -> tuple[str, ...]:
    """The figures of one save: stall, time until it was durable, throughput and size; "" for what is not known."""
    times = (text.duration(save.stall_s), text.duration(save.total_s))
    return (*times, text.rate(save.gbps), text.bytes_text(save.size_bytes))


def why(save: SaveHistory) -> str:
    """The reason why it is not known to be committed."""
    return save.error or "its run ended before the save did"


def verdict(totals: Totals) -> str:
    """The first sentence."""
    if not totals.committed + totals.failed + totals.unknown + totals.interrupted + totals.in_flight:
        return "No saves recorded."
    failed = f"{totals.failed} failed" if totals.failed else "none failed"
    unknown = f", {totals.unknown} with an unknown outcome" if totals.unknown else ""
    return f"{text.counted(totals.committed, 'save')} committed, {failed}{unknown}."


def sentences(totals: Totals, now: float) -> list[str]:
    """The sentences after it: the age of the last commit at ``now`` (seconds since the epoch), and the cost of saving."""
    lines = []
    if (last := totals.last) is not None:
        which = f"step {last.step}" if last.step is not None else last.name
        lines.append(f"Last committed: {which}, {text.age(max(0.0, now - last.ended))} ago.")
    if totals.behind is not None:
        late = f"is {text.counted(totals.behind, 'save')} behind" if totals.behind else "has a copy of it"
        lines.append(f"The mirror {late}.")
    if totals.stall_share is not None:
        lines.append(f"Stalls took {text.percent(totals.stall_share)} of the time.")
    return lines


def _behind(history: History) -> int | None:
    if history.mirror is None:
        return None
    paths = [save.path for save in history.of("committed") if not save.weights_only]
    copied = history.mirror.path
    return paths[::-1].index(copied) if copied in paths else len(paths)


def _spanned(history: History) -> tuple[float, float]:
    by_run: dict[int, list[SaveHistory]] = {}
    for save in history.saves:
        if not save.weights_only:
            by_run.setdefault(save.run, []).append(save)
    spans = [max(0.0, saves[-1].begun - saves[0].begun) for saves in by_run.values()]
    # The last stall of a run lies behind its span.
    return sum(spans), sum(save.stall_s or 0.0 for saves in by_run.values() for save in saves[:-1])


def _since_last_commit(history: History) -> list[float]:
    """Per run the work that was at risk when it ended, where more was recorded after its last commit."""
    latest = {save.run: save for save in history.saves if not save.weights_only}
    done = {save.run: save for save in history.of("committed") if not save.weights_only}
    risks = []
    for run in history.runs:
        if run.number in latest and latest[run.number] is not done.get(run.number):
            begun = done[run.number].begun if run.number in done else run.begun
            risks.append(max(0.0, run.ended - begun))
    return risks


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
