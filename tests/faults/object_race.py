"""Many processes that want one directory in an object store at the same moment. Imports little: each process does it anew."""

import multiprocessing
import os
from collections import Counter

from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home.objects import lock as object_lock
from safe_ckpt.core.home.objects.home import ObjectHome
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import DirectoryInUseError

PROCESSES = 16
LEASE_S = 6.0  # on a busy machine a process may not come to a sign of life for seconds


def _want(url, options, elsewhere, meet, outcomes, rounds):
    """Ask for the directory at the same moment as the others, again and again. Who has it commits one checkpoint."""
    if elsewhere:  # as if the others were on other hosts: nobody can see whether a process is alive
        object_lock.fate_of_process = lambda _: "unknown"
    place = open_place(url, StorageOptions(options=options))
    for left in reversed(range(rounds)):
        root = ObjectHome(place, lease_s=LEASE_S if elsewhere else 30.0)
        meet.wait(120)
        outcomes.put(_try(root, elsewhere))
        meet.wait(120)  # who has it lives until all have asked
        if left:  # in the last round it dies as it is, and the next ones find its head
            root.close()
        meet.wait(120)
    os._exit(0)


def _try(root, elsewhere):
    """What came of it."""
    try:
        root.open(patience_s=None if elsewhere else 0.0)
        manifest = Manifest(name="step-00000001", sequence=root.next_sequence(), step=1, world_size=1)
        folder = root.place(manifest.name, manifest.op_id)
        root.announce(folder, manifest.sequence)
        root.commit(folder, manifest.to_bytes())
    except DirectoryInUseError as error:
        return "refused" if "took" not in str(error) else f"it lost it: {error}"
    except Exception as error:
        return repr(error)
    return "owner"


def races(url, options, rounds, *, elsewhere):
    """So many races. Returns how many there were of each outcome."""
    context = multiprocessing.get_context("spawn")
    meet, outcomes = (
        context.Barrier(PROCESSES),
        context.SimpleQueue(),
    )  # a Queue's thread may come too late for os._exit
    arguments = (url, options, elsewhere, meet, outcomes, rounds)
    processes = [context.Process(target=_want, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    told = Counter(outcomes.get() for _ in range(rounds * PROCESSES))
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    if codes != [0] * PROCESSES:
        raise AssertionError(codes)
    return told
