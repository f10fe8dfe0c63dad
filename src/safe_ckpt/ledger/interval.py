"""How often to save. Pure arithmetic on seconds.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974; J. T.
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (3),
2006. Both take crashes to come at random, at one rate, and know what a save costs.
"""

from __future__ import annotations

import math


def young(cost_s: float, between_s: float) -> float:
    """Young's interval: the training between two saves, where a save costs ``cost_s`` and a crash comes every ``between_s``."""
    return math.sqrt(2 * cost_s * between_s)


def daly(cost_s: float, between_s: float) -> float:
    """Daly's interval: Young's, corrected for saves that are not short beside the time between crashes (his equation 37)."""
    if cost_s >= 2 * between_s:
        return between_s
    part = cost_s / (2 * between_s)
    return max(0.0, young(cost_s, between_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s)


def share_lost(every_s: float, cost_s: float, between_s: float) -> float:
    """The share of the time that saves and repeated work take, restarts aside: Daly's complete model (his equation 20)."""
    if every_s <= 0 or between_s <= 0:
        return 1.0
    exponent = (every_s + cost_s) / between_s
    return 1.0 if exponent > 500 else max(0.0, 1 - every_s / (between_s * math.expm1(exponent)))


def advised(cost_s: float, trained_s: float, crashes: int, *, least_s: float, most_s: float, usual_s: float) -> float:
    """The interval for a run of which little is known yet, between bounds.

    Args:
        cost_s: what a save costs.
        trained_s: how long was trained so far.
        crashes: how many crashes there were in it.
        least_s: no more often than this.
        most_s: no less often than this.
        usual_s: one crash in this time is taken to have happened before: with few of their own it decides.
    """
    between_s = (trained_s + usual_s) / (crashes + 1)
    return min(max(daly(cost_s, between_s), least_s), max(least_s, most_s))
