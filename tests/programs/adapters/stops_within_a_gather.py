"""Trains two ranks in FOLDER with full checkpoints; rank 1 stops itself within the third gather. Rank 0 says what it raises."""

import os
import signal
import sys
import time
from pathlib import Path

from lightning_fsdp2 import fit

from safe_ckpt.core.sharding import gather_transport
from safe_ckpt.errors import SafeCheckpointError

rank = int(os.environ.get("LOCAL_RANK", "0"))
real, calls = gather_transport.to_rank_0, []


def stop(*args, **more):
    calls.append(1)
    if rank == 1 and len(calls) > 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args, **more)


if __name__ == "__main__":
    gather_transport.to_rank_0 = stop
    begun = time.monotonic()
    try:
        fit(Path(sys.argv[1]), "full", 9)
    except SafeCheckpointError as error:
        print("NAMED", type(error).__name__, getattr(error, "ranks", ()), time.monotonic() - begun, flush=True)
        os._exit(0)
