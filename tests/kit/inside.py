"""What tests reach of the package's inside, by name: where the package changes there, this is what has to follow."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import replace

from kit.patience import wait_until
from safe_ckpt.core.coordination import coordinator as coordinators
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.home import lease
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.home.objects import lock as object_lock
from safe_ckpt.core.resuming import candidate
from safe_ckpt.core.saving import one_save
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.staging.worker_thread import Background, Refused
from safe_ckpt.core.storage import direct_io, durable
from safe_ckpt.extensions import unchanged
from safe_ckpt.extensions.mirror import mirror


def engine_of(job):
    """What saves for a ``Checkpointer``, or for the handle of an adapter."""
    return job.saver.engine if hasattr(job, "saver") else job._engine


def writer_of(job):
    """What looks after the writer process of a ``Checkpointer`` or a handle: ``pid`` is that of the process."""
    return engine_of(job)._pipeline.writer


def home_of(ckpt):
    """The directory of a ``Checkpointer``, as its saves see it."""
    return ckpt._home


def waits_for_mirror(ckpt):
    """Whether an upload of a ``Checkpointer`` is under way, or has failed and will be tried again."""
    found = [one.mirror for one in engine_of(ckpt).extensions if one.name == "mirror"]
    return any(one is not None and one._known() for one in found)


def upload_at_once(patch):
    """A mirror uploads on the thread that asks for it, which goes on when that is done or has failed."""

    class AtOnce(Background):
        def put(self, item):
            if self._ended:
                raise Refused(self._name)
            self._work(item)

    patch.setattr(mirror, "Background", AtOnce)


def sessions():
    """How many sessions of ranks this process has open, those of a single one included."""
    return len(coordinators._open)


def store_keys(job):
    """How many keys the store of the ranks has; of a ``Checkpointer``, a handle or a coordinator."""
    coordinator = job if isinstance(job, Coordinator) else engine_of(job).coordinator
    return coordinator._calls.call(lambda store: store._store.num_keys(), phase="test")


def store_port(coordinator):
    """The port at which rank 0 hosts the store."""
    return coordinator._connect._port


def lock_in(folder, lease_s=60.0, subject=None):
    """The lock of a directory whose lock file lies in ``folder``, taken and given back as a job does it."""
    return JobLock(folder, subject=subject or folder, lease_s=lease_s)


def lock_of(home):
    """The lock of a ``FileHome``, open or not."""
    return home._lock


def ownership(home):
    """What holds an object store's prefix for an ``ObjectHome`` that is open: ``head`` is what it last read or wrote."""
    return home._owner


def fall_silent(home):
    """No more signs of life of an ``ObjectHome``, as if its process were stopped."""
    home._owner._stop.set()


def judge_owners(patch, fate):
    """Every owner of a prefix is taken to be "alive", "dead" or "unknown", whatever its process is."""
    patch.setattr(object_lock, "fate_of_process", lambda _: fate)


def put_owners_elsewhere(patch):
    """Every owner of a prefix looks like one on another host: only its signs of life count."""
    judge_owners(patch, "unknown")
    patch.setattr(lease, "own_lease", lambda **facts: replace(own_lease(**facts), pid=1))


def exchange_no_names(patch):
    """As a file system whose kernel cannot exchange two names."""
    patch.setattr(durable, "exchange", lambda *_: False)


def forget_refusals_of_direct_io(patch):
    """As a new process, which has not yet learned where files cannot be written with O_DIRECT."""
    patch.setattr(direct_io, "_without_direct", {})


def copy_all_tensors(patch):
    """No tensor lies in host memory in its order, as on a GPU: all is copied, and the writer looks what is unchanged."""
    patch.setattr(unchanged, "lies_as_written", lambda _: False)


def copy_after(patch, event, *, thread=None, seconds=30):
    """Copies that are made beside training begin when ``event`` is set, or those alone that the thread of a name makes."""
    copying = StagingCopy.run_deferred

    def run_deferred(self):
        if thread in (None, threading.current_thread().name):
            event.wait(seconds)
        copying(self)

    patch.setattr(StagingCopy, "run_deferred", run_deferred)


def before_pieces(patch, action):
    """Call ``action`` on each thread that copies, before each piece, with how many are left that another thread may take."""
    copying = StagingCopy._copy_piece

    def copy_piece(self, piece):
        action(len(self._pieces))
        copying(self, piece)

    patch.setattr(StagingCopy, "_copy_piece", copy_piece)


def once_compared(action):
    """Call ``action`` once: when this rank has first compared which save it sees with which rank 0 sees."""
    real = candidate._op_id

    def op_id(path):
        candidate._op_id = real
        seen = real(path)
        action()
        return seen

    candidate._op_id = op_id


def verdict_on_hosts(answers):
    """What rank 0 makes of what each rank has read of one manifest in a store: ``op_id`` and ``host``, by rank."""
    return candidate._grouped(answers)


def once_written(action):
    """Call ``action`` with what this rank reports, once: when its next save is written, before it is committed.

    What it returns is reported instead, unless that is None.
    """
    real = one_save.write

    def write(turn):
        one_save.write = real
        report = real(turn)
        changed = action(report)
        return report if changed is None else changed

    one_save.write = write


@contextlib.contextmanager
def save_in_flight():
    """The next save is written, and not committed until the event that this gives is set, or this thread waits for a save."""
    free, here = threading.Event(), threading.get_ident()

    def waits():
        frame = sys._current_frames().get(here)
        while frame is not None and frame.f_code is not OpenSave._await.__code__:
            frame = frame.f_back
        return frame is not None

    once_written(lambda _: wait_until(lambda: free.is_set() or waits(), 60, "the end of the wait") and None)
    try:
        yield free
    finally:
        free.set()


__all__ = [
    "before_pieces",
    "copy_after",
    "copy_all_tensors",
    "engine_of",
    "exchange_no_names",
    "fall_silent",
    "forget_refusals_of_direct_io",
    "home_of",
    "judge_owners",
    "lock_in",
    "lock_of",
    "once_compared",
    "once_written",
    "ownership",
    "put_owners_elsewhere",
    "save_in_flight",
    "store_keys",
    "store_port",
    "upload_at_once",
    "verdict_on_hosts",
    "waits_for_mirror",
    "writer_of",
]
