"""Time limits of jobs for tests whose subject they are not: short ones, and longer where the machine is slow."""

from __future__ import annotations

from kit.patience import factor
from safe_ckpt import Timeouts

_MOST = 3.0  # what fails when a limit is over waits that long: with more, tests would meet their own limits first


def stretched(seconds: float) -> float:
    """So many seconds of a quiet machine, as a limit of the product on this one."""
    return seconds * min(factor(), _MOST)


def limits(**seconds: float) -> Timeouts:
    """Time limits of a job, each as on a quiet machine; longer here if this one is slow."""
    return Timeouts(**{name: stretched(one) for name, one in seconds.items()})


QUICK = limits(lengthy_s=60, barrier_s=20, writer_stall_s=5, fsync_stall_s=20, peer_stall_s=3, shutdown_s=10)
"""For small states: what hangs or is lost is noticed within seconds."""

PATIENT = limits(lengthy_s=60, barrier_s=30, peer_stall_s=10, shutdown_s=10)
"""For jobs that load the machine: nothing is taken for lost, and a writer has the time that it has by default."""

__all__ = ["PATIENT", "QUICK", "limits", "stretched"]
