"""The cost of crashes and saves for a directory over all its runs: what is known, and "between a and b" for the rest. Pure.

A killed process records no end. It was alive at its last record, and a sign of life that was due later did not come: the crash
lies in between. Training is what lies between a resume and a call of ``save``, without the stalls.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, field

from safe_ckpt.ledger import interval
from safe_ckpt.ledger.history import History, RunHistory, SaveHistory

_LATE = 1.1  # a sign may come so much later than it is due


@dataclass(frozen=True, kw_only=True)
class Between:
    """A figure that lies between two others, which are the same where it is known."""

    least: float
    most: float

    @property
    def known(self) -> bool:
        """Whether it is known."""
        return self.least == self.most

    def less(self, other: float) -> Between:
        """The span, lower by ``other``; not below zero."""
        return Between(least=max(0.0, self.least - other), most=max(0.0, self.most - other))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The cost of the end of one run.

    Attributes:
        run: its number.
        killed: it recorded no end.
        at: when it ended, seconds since the epoch.
        since_commit_s: from its last commit to its end; None where it committed nothing.
        lost_s: the training that was lost.
        lost_steps: the optimizer steps that were lost; None where they were not counted.
        resume_s: from its end until the next run had its checkpoint; None where none did.
    """

    run: int
    killed: bool
    at: Between
    since_commit_s: Between | None
    lost_s: Between
    lost_steps: Between | None
    resume_s: Between | None


@dataclass(frozen=True, kw_only=True)
class Account:
    """The ledger of a directory.

    Attributes:
        losses: one for each run that ended without all of its work saved, or was killed.
        goodput: the share of the time from the first start on whose steps were kept; None where nothing is known of it. What a
            live run has not saved yet does not count on either side.
        kept_s: that time.
        wall_s: from the first start on.
        stall_s: how long saves held training, all together.
        written_bytes: of all commits.
        kept_bytes: of what is on the disk, as far as events tell.
        cost_s: what a save costs training: its mean stall.
        between_s: the mean time between two crashes; None without one.
        every_s: how often is saved, at the median.
        best_s: the interval of Young and Daly with these figures.
        best_share: what would be lost with it, and ``share`` what is lost with ``every_s``.
        is_live: the last run has given a sign of life just now.
    """

    losses: tuple[Loss, ...] = ()
    goodput: Between | None = None
    kept_s: float = 0.0
    wall_s: Between = field(default_factory=lambda: Between(least=0.0, most=0.0))
    stall_s: float = 0.0
    written_bytes: int = 0
    kept_bytes: int | None = None
    cost_s: float | None = None
    between_s: float | None = None
    every_s: float | None = None
    best_s: float | None = None
    best_share: float | None = None
    share: float | None = None
    is_live: bool = False


@dataclass(kw_only=True)
class _Part:
    """A run on the line that leads to the present state, up to a save or to its end."""

    run: RunHistory
    saves: list[SaveHistory]

    def __post_init__(self) -> None:
        run = self.run
        first = min((save.begun for save in self.saves), default=math.inf)
        opened = run.begun if not run.steps_before and run.sign_s is None else run.opened
        self.ready = run.resumed[0] if run.resumed is not None else min(opened, first)
        self.cut: SaveHistory | None = None

    def trained_s(self, until: float) -> float:
        """The training up to a moment."""
        held = sum(save.stall_s or 0.0 for save in self.saves if save.begun < until)
        return max(0.0, until - self.ready - held)

    def kept(self) -> tuple[float, int | None]:
        """The training and the steps up to the save that it was cut at."""
        if self.cut is None:
            return 0.0, 0
        made, before = self.cut.optimizer_steps, self.run.steps_before
        steps = None if made is None or before is None else made - before
        return self.trained_s(self.cut.begun), steps

    @property
    def last(self) -> SaveHistory | None:
        """The last save that a resume takes."""
        return next((save for save in reversed(self.saves) if _counts(save)), None)


def account(history: History, now: float | None = None) -> Account:
    """The ledger of what was recorded.

    Args:
        history: what.
        now: seconds since the epoch: of the last run, whether it is alive; None where that is not asked.
    """
    if not history.runs:
        return Account()
    parts = [_Part(run=run, saves=[one for one in history.saves if one.run == run.number]) for run in history.runs]
    last, line, losses = parts[-1], [], []
    live = not last.run.over and (now is None or now <= last.run.ended + 2 * (last.run.sign_s or 60.0))
    for place, part in enumerate(parts):
        following = parts[place + 1] if place + 1 < len(parts) else None
        line.append(part)
        if following is None and live:
            part.cut = part.last
            break
        end = _end_of(part.run, following.run.begun if following is not None else now)
        before_s, before_steps = _sum(line[:-1])
        work_s = Between(least=before_s + part.trained_s(end.least), most=before_s + part.trained_s(end.most))
        made = _made(part, end)
        line = _resumed(line, following)
        kept_s, kept_steps = _sum(line)
        lost_steps = None
        if made is not None and before_steps is not None and kept_steps is not None:
            lost_steps = Between(least=before_steps + made.least, most=before_steps + made.most).less(kept_steps)
        committed = [one.ended for one in part.saves if _counts(one)]
        resumed = following.run.resumed if following is not None else None
        back = None if resumed is None else Between(least=max(0.0, resumed[0] - end.most), most=resumed[0] - end.least)
        lost_s, killed = work_s.less(kept_s), not part.run.over
        is_lost = lost_s.most > 0 and (lost_steps is None or lost_steps.most > 0)
        if killed or part.run.failed or is_lost:
            loss = Loss(
                run=part.run.number,
                killed=killed,
                at=end,
                since_commit_s=end.less(max(committed)) if committed else None,
                lost_s=lost_s,
                lost_steps=lost_steps,
                resume_s=back,
            )
            losses.append(loss)
    return _summed(history, parts, line, losses, live=live, now=now)


def _counts(save: SaveHistory) -> bool:
    return save.outcome == "committed" and not save.weights_only and save.healthy


def _end_of(run: RunHistory, limit: float | None) -> Between:
    """When a run ended."""
    if run.over:
        return Between(least=run.ended, most=run.ended)
    due = math.inf
    if run.sign_s is not None and run.sign is not None and run.sign[1] > (run.steps_before or 0):
        due = max(run.ended, run.sign[0] + _LATE * run.sign_s)
    latest = min(due, limit if limit is not None else due)
    return Between(least=run.ended, most=max(run.ended, latest if math.isfinite(latest) else run.ended))


def _made(part: _Part, end: Between) -> Between | None:
    """The steps of a run's optimizers up to its end."""
    run = part.run
    if run.sign is None or run.steps_before is None:
        return None
    made, known = run.sign[1] - run.steps_before, [(part.ready, run.steps_before)]
    known += [(one.begun, one.optimizer_steps) for one in part.saves if one.optimizer_steps is not None]
    known = sorted({*known, run.sign})
    pairs = itertools.pairwise(known)
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] - a[0] > 1.0 and b[1] > a[1]]
    if not run.over and not rates and end.most > run.sign[0]:
        return None  # it was killed before its first sign of life
    further = 0 if run.over else math.ceil(max(rates, default=0.0) * max(0.0, end.most - run.sign[0]))
    return Between(least=made, most=made + further)


def _resumed(line: list[_Part], following: _Part | None) -> list[_Part]:
    """The line that is left when the next run goes on from where it did. Where it recorded nothing: from the newest."""
    path = following.run.resumed[1] if following is not None and following.run.resumed is not None else None
    if path is None and following is not None and following.saves:
        return []  # it started afresh
    for place in range(len(line) - 1, -1, -1):
        part = line[place]
        among = [one for one in part.saves if _counts(one) and (path is None or one.path == path)]
        if part.cut is not None:
            among = [one for one in among if one.begun <= part.cut.begun]
        if among:
            part.cut = among[-1]
            return line[: place + 1]
    return []


def _sum(line: list[_Part]) -> tuple[float, int | None]:
    kept = [part.kept() for part in line]
    steps = [one for _, one in kept if one is not None]
    return sum(seconds for seconds, _ in kept), sum(steps) if len(steps) == len(kept) else None


def _summed(
    history: History, parts: list[_Part], line: list[_Part], losses: list[Loss], *, live: bool, now: float | None
) -> Account:
    first, last = parts[0].run, parts[-1]
    kept_s, _ = _sum(line)
    if live:
        until = last.cut.begun if last.cut is not None else last.ready
        end = Between(least=until, most=until)
    else:
        end = _end_of(last.run, now)
    wall_s = end.less(first.begun)
    stalls = [save.stall_s for save in history.saves if save.stall_s is not None]
    cost_s = statistics.fmean(stalls) if stalls else None
    crashes = len(losses)
    between_s = sum(part.run.ended - part.ready for part in parts) / crashes if crashes else None
    gaps = [b.begun - a.begun for part in parts for a, b in itertools.pairwise(part.saves)]
    every_s = statistics.median(gaps) if gaps else None
    committed = history.of("committed")
    held = [save.kept_bytes for save in committed if save.kept_bytes is not None]
    found: dict[str, float] = {}
    if cost_s and between_s and between_s > 0:
        found["best_s"] = interval.daly(cost_s, between_s)
        found["best_share"] = interval.share_lost(found["best_s"], cost_s, between_s)
        if every_s:
            found["share"] = interval.share_lost(max(every_s - cost_s, 1e-9), cost_s, between_s)
    return Account(
        losses=tuple(losses),
        goodput=Between(least=kept_s / wall_s.most, most=min(1.0, kept_s / wall_s.least)) if wall_s.least > 0 else None,
        kept_s=kept_s,
        wall_s=wall_s,
        stall_s=sum(stalls),
        written_bytes=sum(save.size_bytes or 0 for save in committed),
        kept_bytes=held[-1] if held else None,
        cost_s=cost_s,
        between_s=between_s,
        every_s=every_s,
        is_live=live,
        **found,
    )
