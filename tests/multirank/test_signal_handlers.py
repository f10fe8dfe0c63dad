"""What a signal handler of the user's raises while its rank waits for the others."""

import signal
import time

import pytest
import torch

from kit.limits import QUICK
from kit.patience import wait_until
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.errors import CoordinationError

KINDS = {
    "OSError": OSError,
    "TimeoutError": TimeoutError,
    "ConnectionError": ConnectionResetError,
    "DistStoreError": torch.distributed.DistStoreError,
}


def _interrupted(rank, folder, waiting, kind):
    def handler(number, frame):
        (folder / "raised").touch()
        raise KINDS[kind]("the user's own")

    signal.signal(signal.SIGALRM, handler)
    config = CheckpointConfig(timeouts=QUICK)
    said, state = "", {"w": torch.zeros(3)}
    with Checkpointer(folder / "run", config) as ckpt:
        ckpt.save(1, state).result()
        if rank == waiting:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            wait_until((folder / "raised").exists, 30, "the handler has raised")
        begun = time.monotonic()
        try:
            ckpt.save(2, state).result()
        except Exception as error:
            said = "".join(f"{type(one).__name__}: {one} " for one in (error, error.__cause__) if one is not None)
            if rank == waiting:
                return said, isinstance(error, CoordinationError), time.monotonic() - begun
        try:
            ckpt.save(3, state).result()
        except Exception as error:
            return said + " THEN " + str(error), None, None
    return said, None, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waiting", [0, 1])
def test_what_a_signal_handler_raises_is_told_as_that(tmp_path, waiting, kind):
    """An OSError in the middle of a wait is no lost rank, and no wait that took as long as it may."""
    found = values(spawn_ranks(_interrupted, 2, tmp_path, waiting, kind, timeout_s=60))
    said, coordination, _ = found[waiting]
    assert "the user's own" in said, said
    assert not coordination
    assert "lost ranks" not in said
