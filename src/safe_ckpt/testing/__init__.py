"""For tests of training loops: several real ranks, storage that goes wrong at a chosen moment, and power cuts.

Nothing is mocked: ranks are processes that can be slowed, stopped and killed, a fault happens in the n-th file operation that
the job makes, and a power cut leaves the files as a disk may leave them.

- ``spawn_ranks`` runs a function on several ranks of a gloo process group.
- ``FaultyStorage`` kills, stops, slows or fails a job at its n-th file operation; needs a C compiler.
- ``small_disk`` is a file system that gets full; needs root.
- ``read_trace`` and ``crash_states`` turn what ``FaultyStorage`` recorded into what a power cut may leave behind.
"""

from safe_ckpt.testing.faults import FaultyStorage, small_disk
from safe_ckpt.testing.power_cut import CrashState, FileOperation, crash_states, read_trace
from safe_ckpt.testing.ranks import Outcome, free_port, spawn_ranks, values

__all__ = [
    "CrashState",
    "FaultyStorage",
    "FileOperation",
    "Outcome",
    "crash_states",
    "free_port",
    "read_trace",
    "small_disk",
    "spawn_ranks",
    "values",
]
