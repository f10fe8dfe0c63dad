"""Makes four wrong calls, one of them with FOLDER closed: prints the error of each."""

import sys

from safe_ckpt import Checkpointer, Retention, SafeCheckpointError, Timeouts

ckpt = Checkpointer(sys.argv[1])
ckpt.close()
for call in (
    lambda: Retention(keep_last=0),
    lambda: Timeouts(barrier_s=-1),
    lambda: ckpt.save(1, {}),
    lambda: Checkpointer("/dev/null/x"),
):
    try:
        call()
        print("accepted")
    except SafeCheckpointError as error:
        print(type(error).__name__)
