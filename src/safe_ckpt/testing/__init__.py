"""For tests of training loops: several real ranks of a gloo process group, which can be slowed, stopped and killed."""

from safe_ckpt.testing.ranks import Outcome, free_port, spawn_ranks, values

__all__ = ["Outcome", "free_port", "spawn_ranks", "values"]
