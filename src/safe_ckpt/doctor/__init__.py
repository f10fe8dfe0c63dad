"""``safe-ckpt doctor``: does this directory, on this machine and between these ranks, do what safe checkpoints need.

Each check is a small function from an ``Examined`` directory to ``Finding`` records; ``checks.py`` lists them, ``running.py``
runs them under a deadline, ``peers.py`` compares ranks. All that is written goes into one private folder, which is removed
at the end; no lock is taken and nothing that was there is touched. Without ranks nothing here imports torch.
"""

from __future__ import annotations

from safe_ckpt.doctor.examination import Report, diagnose
from safe_ckpt.doctor.examined import Examined, Options
from safe_ckpt.doctor.finding import Finding, State, worst

__all__ = ["Examined", "Finding", "Options", "Report", "State", "diagnose", "worst"]
