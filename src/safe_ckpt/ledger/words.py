"""The ledger in sentences. Pure."""

from __future__ import annotations

from collections.abc import Callable

from safe_ckpt.ledger.account import Account, Between, Loss
from safe_ckpt.text import bytes_text, counted, duration, grouped, percent


def summed_up(told: Account) -> list[str]:
    """The sentences that a reader wants first: what was kept, what crashes and saves cost, and how often to save."""
    lines = []
    if told.goodput is not None:
        kept = _span(told.goodput, percent)
        lines.append(f"Goodput {kept}: the part of {_span(told.wall_s, duration)} whose steps were kept.")
    if told.losses:
        lost_s = _total([loss.lost_s for loss in told.losses])
        steps = [loss.lost_steps for loss in told.losses if loss.lost_steps is not None]
        counted_all = len(steps) == len(told.losses)
        more = f", {_span(_total(steps), _steps)}" if counted_all else ""
        lines.append(f"{counted(len(told.losses), 'interruption')} cost {_span(lost_s, duration)} of training{more}.")
    if told.cost_s is not None:
        held = f" and hold {bytes_text(told.kept_bytes)}" if told.kept_bytes is not None else ""
        lines.append(
            f"A save holds training for {duration(told.cost_s)} at the mean, {duration(told.stall_s)} in all. "
            f"The checkpoints took {bytes_text(told.written_bytes)}{held}."
        )
    if told.best_s is not None and told.best_share is not None and told.between_s is not None:
        now = ""
        if told.every_s is not None and told.share is not None:
            now = f"; you save every {_seconds(told.every_s)}: {percent(told.share)} lost"
        lines.append(
            f"With an interruption every {duration(told.between_s)}, a save every {_seconds(told.best_s)} is best "
            f"({percent(told.best_share)} lost){now}."
        )
    return lines


def of_loss(loss: Loss) -> str:
    """The cost of the end of one run."""
    how = "killed" if loss.killed else "ended with work that was not saved"
    facts = [f"{_span(loss.lost_s, duration)} of training lost"]
    if loss.lost_steps is not None:
        facts.append(f"{_span(loss.lost_steps, _steps)} lost")
    if loss.since_commit_s is not None:
        facts.append(f"{_span(loss.since_commit_s, duration)} after the last commit")
    if loss.resume_s is not None:
        facts.append(f"resumed after {_span(loss.resume_s, duration)}")
    return f"run {loss.run} {how}: {', '.join(facts)}"


def cells(loss: Loss) -> tuple[str, ...]:
    """The same as the cells of a table: the run, how it ended, and the figures."""

    def cell(span: Between | None, say: Callable[[float], str]) -> str:
        return "" if span is None else _span(span, say, "{} to {}")

    times = (cell(one, duration) for one in (loss.since_commit_s, loss.resume_s))
    how = "killed" if loss.killed else "ended"
    return str(loss.run), how, cell(loss.lost_s, duration), cell(loss.lost_steps, _steps), *times


def _total(spans: list[Between]) -> Between:
    return Between(least=sum(one.least for one in spans), most=sum(one.most for one in spans))


def _span(span: Between, say: Callable[[float], str], words: str = "between {} and {}") -> str:
    least, most = say(span.least), say(span.most)
    if least == most:
        return least
    number, _, unit = least.partition(" ")
    return words.format(number if unit == most.partition(" ")[2] else least, most)


def _steps(count: float) -> str:
    return counted(round(count), "step")


def _seconds(seconds: float) -> str:
    return f"{grouped(round(seconds))} s" if seconds >= 10 else duration(seconds)
