"""Two ranks of one job that is killed as one: what a program of ``kills.killed`` begins with."""

import ctypes
import os
import signal

from kit.ranks import free_port

_PR_SET_PDEATHSIG = 1


def fork():
    """Become rank 0, and make rank 1, which dies with it. Returns this process's rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    parent = os.getpid()
    rank = 0 if os.fork() else 1
    if rank:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before this was said
            os._exit(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    return rank


def tell(rank, text):
    """A line to the test, from rank 0."""
    if rank == 0:
        os.write(1, f"{text}\n".encode())
