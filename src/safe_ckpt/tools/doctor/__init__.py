"""``safe-ckpt doctor``: whether this directory, this machine and these ranks are fit for safe checkpoints.

Each check is a small function from an ``Examined`` directory to ``Finding`` records; ``checks.py`` lists them, ``runner.py``
runs them under a deadline, ``ranks.py`` compares ranks. Everything is written into one private folder, which is removed
at the end; no lock is taken and no existing file is touched. Without ranks nothing here imports torch.
"""

from __future__ import annotations

from safe_ckpt.tools.doctor.check import Examined, Finding, Options, State, worst
from safe_ckpt.tools.doctor.examination import Report, World, diagnose, world_of

__all__ = ["Examined", "Finding", "Options", "Report", "State", "World", "diagnose", "world_of", "worst"]
