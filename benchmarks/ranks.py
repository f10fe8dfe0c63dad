"""Several real ranks, with the kit of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kit.ranks import spawn_ranks, values

__all__ = ["spawn_ranks", "values"]
