"""A snapshot: where in the shared buffer each file lies, and the copying of the tensors to their places there.

It is copied at once, or what is known not to change yet on a thread of its own. Where that is faster a second thread helps: one
begins at the front, the other at the back. While it is copied it is marked how far the shared buffer is filled without a gap,
so the writer process follows right behind.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from safe_ckpt.core.cuda import Cuda, DeviceCopies, TensorCopy
from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.formats.manifest import RECORD_NAME
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.overlap import MutationDetector, OverlapPlan
from safe_ckpt.core.staging.progress import FIRST_BYTE
from safe_ckpt.core.storage.direct_io import PAGE
from safe_ckpt.errors import SaveError

_PIECE = 16 << 20  # the writer may begin after so many bytes
_THREADS_FROM = 1 << 20  # below this torch's own copy costs more in dispatch than it gains by its threads
# Giving the interpreter lock away may cost milliseconds until it comes back; so much is copied in a few microseconds, unless it
# lies in a mapped file that has yet to be read.
_LOCKED_BELOW = 32 << 10
_HELP_FROM = 32 << 20  # below this the copy is over before another thread has woken up

# Without the interpreter lock is ``ctypes.memmove``.
_memmove_locked = ctypes.PyDLL(None).memmove
_memmove_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_locked.restype = ctypes.c_void_p


def buffer_bytes(images: Sequence[FilePlan]) -> int:
    """How much of a shared buffer the images take."""
    return FIRST_BYTE + sum(_rounded(image.length) for image in images)


def lay_out(
    images: Sequence[FilePlan],
    buffer: SharedBuffer,
    folder: str,
    manifest: Mapping[str, Any],
    *,
    name: str = "",
    overlap_plan: OverlapPlan | None = None,
) -> tuple[list[WriteTask], StagingCopy]:
    """Make room for everything and fill in all but the tensors.

    Args:
        images: the planned files.
        buffer: where to; holds nothing else.
        folder: the staging directory that the files will be written to.
        manifest: goes into files that carry their manifest inside.
        name: of the checkpoint, for messages.
        overlap_plan: which tensors may be copied later; None for none.

    Returns:
        What to write, file by file, and what fills the shared buffer.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    buffer.reserve(buffer_bytes(images), waiting=True)
    memory = buffer.memory
    moves: list[TensorCopy] = []
    tasks = list_tasks(images, folder, manifest)
    for image, task in zip(images, tasks, strict=True):
        base = task.offset
        for offset, data in image.pieces:
            memory[base + offset : base + offset + len(data)] = data
        for offset, tensor in image.tensors:
            deferred = overlap_plan is not None and overlap_plan.covers(tensor)
            moves.append(TensorCopy(offset=base + offset, tensor=tensor, deferred=deferred))
    end = max((task.offset + task.length for task in tasks), default=FIRST_BYTE)
    detector = overlap_plan.detector() if overlap_plan is not None and any(move.deferred for move in moves) else None
    return tasks, StagingCopy(name, buffer, moves, end, detector)


def list_tasks(images: Sequence[FilePlan], folder: str, manifest: Mapping[str, Any]) -> list[WriteTask]:
    """What is to be written, with the places in a shared buffer that would hold it all."""
    tasks: list[WriteTask] = []
    base = FIRST_BYTE
    for image in images:
        single = image.records is not None and image.manifest is not None
        tasks.append(
            WriteTask(
                path=f"{folder}/{image.path}",
                offset=base,
                length=image.length,
                records=image.records,
                manifest_name=RECORD_NAME,
                manifest={**manifest, **(image.manifest or {})} if single else {"format": "safe_ckpt-part"},
            )
        )
        base += _rounded(image.length)
    return tasks


def take(images: Sequence[FilePlan], buffer: SharedBuffer, folder: str, manifest: Mapping[str, Any]) -> list[WriteTask]:
    """Copy everything into the shared buffer at once. When this returns the caller may change whatever it likes.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    tasks, copy = lay_out(images, buffer, folder, manifest)
    copy.run()
    if copy.error is not None:
        raise copy.error
    return tasks


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE


_Piece = tuple[TensorCopy, int, int]
"""A tensor, the first byte of it to copy, and how many; -1 for all of it, in the way that its kind needs."""


class StagingCopy:
    """The filling of one shared buffer. ``run`` copies what cannot wait, ``run_deferred`` the rest.

    Of a copy in host memory another thread may take pieces from the back: ``help``.

    Args:
        name: of the checkpoint, for messages.
        buffer: filled with everything but the tensors already.
        moves: in the order of their offsets.
        end: where the last file image ends, to the byte.
        detector: tells of what changed although it should not have; None when nothing is deferred.
        cuda: the devices; None for those of this machine.

    Attributes:
        error: why the shared buffer is not, and will not be, what was to be saved.
    """

    def __init__(
        self,
        name: str,
        buffer: SharedBuffer,
        moves: Sequence[TensorCopy],
        end: int,
        detector: MutationDetector | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        self.error: Exception | None = None
        self._name = name
        self._buffer = buffer
        self._now = [move for move in moves if not move.deferred]
        self._later = [move for move in moves if move.deferred]
        self._end = end
        self._detector = detector
        self._memory: torch.Tensor | None = buffer.bytes  # held: it must stay mapped under the copying
        self._address = buffer.bytes.data_ptr()
        self._stopped = False
        self._rest_is_left = False  # by ``run``, to whoever comes first
        self._taken_over = False
        self._claiming = threading.Lock()
        self._marked = 0
        self._over = threading.Event()
        self._checking = threading.Lock()
        self._pieces: deque[_Piece] = deque()  # those that another thread may take
        self._entering = threading.Lock()  # of the one that helps; never held for long
        self._helping = threading.Lock()  # held by the one that helps
        self._gate_waits = False
        self._to_be_closed = False
        self._ask_for_help: Callable[[Callable[[], None]], None] | None = None
        self._devices = DeviceCopies(buffer, cuda)
        buffer.mark(0)

    def run(self, ask_for_help: Callable[[Callable[[], None]], None] | None = None) -> bool:
        """Copy what cannot wait, on the caller's thread. What goes wrong is in ``error``.

        Args:
            ask_for_help: has what it is given called on another thread; asked where two are faster, or when a gate waits.

        Returns:
            Whether the rest is left for ``run_deferred``, which must be called then.
        """
        if self._over.is_set():
            return False
        left, held = False, self._later[0].offset if self._later else self._end
        try:
            self._devices.begin(self._later)
            self._ask_for_help = ask_for_help
            self._copy(self._now, held, aside=False)
            self._mark(held)
            left = self._rest_is_left = bool(self._later) and self.error is None
        except Exception as error:
            self.fail(error)
            with self._helping:  # the caller may free what is still read
                pass
        except BaseException:
            self.fail(SaveError(name=self._name, cause="interrupted", phase="snapshot"))
            raise
        finally:
            if not left:
                self._close()
        return left

    def abandon(self) -> None:
        """The caller was interrupted and copies no more."""
        self.fail(SaveError(name=self._name, cause="interrupted", phase="snapshot"))
        if self._claim():
            self._close()

    def run_deferred(self) -> None:
        """Copy the rest, on any thread; nothing if it was abandoned before."""
        if self._claim():
            self._run_deferred()

    def _run_deferred(self) -> None:
        try:
            # Not to its very end: the save must not succeed before the tensors were checked for changes.
            self._copy(self._later, self._end - 1, aside=True)
            self._check_unchanged()
            self._mark(self._end)
        except Exception as error:  # it belongs to the thread that saves
            self.fail(error)
        except BaseException:
            self.fail(SaveError(name=self._name, cause="interrupted", phase="snapshot"))
            raise
        finally:
            self._close()

    def fail(self, error: Exception) -> None:
        """Give it up; the first reason counts, and none once it is over."""
        if self.error is None and not self._over.is_set():
            self.error = error
        self._stopped = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing reads the tensors or fills the shared buffer any more. Returns whether that is so."""
        return self._over.wait(timeout_s)

    def pass_gate(self, timeout_s: float) -> None:
        """Return when the tensors may change: at once if their devices keep the order. Called before they change."""
        if self._devices.order(self._later):
            self._check_unchanged()
            return
        self._gate_waits = True
        ask_for_help = self._ask_for_help
        if ask_for_help is not None and self._rest_is_left and not self._over.is_set():
            # Not this thread itself: in the middle of it a signal's handler may wait for this save.
            ask_for_help(self.help)
        if not self._over.wait(timeout_s):
            cause = f"the copy was not complete after {timeout_s:.0f} s (timeouts.barrier_s) and training went on"
            self.fail(SaveError(name=self._name, cause=cause, phase="snapshot"))

    def help(self) -> None:
        """Copy from the back what another thread copies from the front. On a thread that runs no signal's handlers."""
        if self._rest_is_left:
            self.run_deferred()  # the one that should has not come to run yet
        with self._entering:
            if self._is_closing() or not self._pieces or not self._helping.acquire(blocking=False):
                return
        try:
            while not self._stopped and not self._is_closing():
                try:
                    piece = self._pieces.pop()
                except IndexError:
                    break
                self._copy_piece(piece)
        except Exception as error:  # it belongs to the thread that saves
            self._stopped = True  # first of all: the piece that was taken is in nobody's hands
            self.fail(error)
        except BaseException:
            self._stopped = True
            self.fail(SaveError(name=self._name, cause="interrupted", phase="snapshot"))
            raise
        finally:
            with self._entering:
                self._helping.release()
                last = self._is_closing()
            if last:
                self._let_go()

    def _claim(self) -> bool:
        # An interrupt may come while the rest is handed to a thread. Only one of the two may finish the copy.
        with self._claiming:
            first, self._taken_over = not self._taken_over, True
        return first

    def _is_closing(self) -> bool:
        return self._to_be_closed

    def _close(self) -> None:
        """The caller copies no more. If another thread has a piece in its hands, it is over when that is done. Never waits."""
        with self._entering:
            self._to_be_closed = True
            last = not self._helping.locked()
        if last:
            self._let_go()

    def _let_go(self) -> None:
        try:
            # Before it is over: a copy that a device has not finished would land in the next snapshot.
            self._devices.forget()
        except Exception as error:  # the device is lost, and with it whatever was under way
            self.fail(error)
        finally:
            if self.error is None and self._marked != self._end:  # a second Ctrl-C came before the first one was noted
                self.error = SaveError(name=self._name, cause="interrupted", phase="snapshot")
            self._over.set()
            # Let go of the tensors, of the shared buffer, and of whoever owns the threads.
            self._now, self._later, self._detector, self._ask_for_help = [], [], None, None
            self._pieces, self._memory = deque(), None

    def _check_unchanged(self) -> None:
        with self._checking:  # the second caller waits: the step that follows changes what the detector looks at
            detector, self._detector = self._detector, None
            changed = detector() if detector is not None else ""
            if changed:
                cause = f"{changed} changed while it was copied, outside an optimizer's step. "
                cause += 'Change it after handle.wait_snapshot(), or use snapshot="eager"'
                self.fail(SaveError(name=self._name, cause=cause, phase="snapshot"))

    def _copy(self, moves: Sequence[TensorCopy], held: int, *, aside: bool) -> None:
        """Copy, up to ``held`` as far as marks go. ``aside``: while training goes on, on one core and with the writer behind.

        While the caller waits it is the other way round: torch's threads help, or one of ours if torch uses one, and the writer
        does not take their memory bandwidth yet.
        """
        if self._memory is None:
            return
        one_thread = aside or torch.get_num_threads() == 1
        pieces, on_host = self._cut(moves, one_thread=one_thread)
        if on_host:
            self._pieces = pieces
            # Not before: it would find nothing to do, and leave.
            if self._ask_for_help is not None and (self._gate_waits if aside else one_thread and _is_long(moves)):
                self._ask_for_help(self.help)
        while not self._stopped:
            try:
                piece = pieces.popleft()
            except IndexError:
                break  # not ``while pieces``: the one that helps may take the last one in between
            self._copy_piece(piece)
            if aside:
                move, start, length = piece
                end = min(move.offset + (start + length if length >= 0 else move.size), held)
                if end - self._marked >= _PIECE:
                    self._mark(end)
        # At most one piece, unless the source's memory hangs, and then its thread does.
        with self._helping:
            pass
        self._devices.settle()

    def _cut(self, moves: Sequence[TensorCopy], *, one_thread: bool) -> tuple[deque[_Piece], bool]:
        """The pieces, and whether all of them lie in host memory."""
        pieces: deque[_Piece] = deque()
        on_host = True
        for move in moves:
            size = move.size
            if self._devices.takes(move):
                on_host = False
                pieces.append((move, 0, -1))
            elif not move.tensor.is_contiguous() or (not one_thread and size >= _THREADS_FROM):
                pieces.append((move, 0, -1))
            elif size <= _PIECE:
                pieces.append((move, 0, size))
            else:
                pieces.extend((move, start, min(_PIECE, size - start)) for start in range(0, size, _PIECE))
        return pieces, on_host

    def _copy_piece(self, piece: _Piece) -> None:
        move, start, length = piece
        if length >= 0:
            copy = ctypes.memmove if length >= _LOCKED_BELOW else _memmove_locked
            copy(self._address + move.offset + start, move.tensor.data_ptr() + start, length)
        elif self._devices.takes(move):
            self._devices.copy(move)
        elif self._memory is not None:
            move.into(self._memory)

    def _mark(self, end: int) -> None:
        self._devices.settle()
        if not self._stopped:
            self._marked = end
            self._buffer.mark(end)


def _is_long(moves: Sequence[TensorCopy]) -> bool:
    """Whether the copy takes long enough for a second thread to wake up and take its part, on a core of its own."""
    return len(os.sched_getaffinity(0)) > 1 and sum(move.size for move in moves) >= _HELP_FROM
