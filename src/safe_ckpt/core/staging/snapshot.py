"""A snapshot: where in the shared buffer each file lies, and the copying of the tensors to their places there.

It is copied at once, or what is known not to change yet on a thread of its own. Where that is faster a second thread helps: one
begins at the front, the other at the back. While it is copied it is marked how far the shared buffer is filled without a gap,
so the writer process follows right behind. Where a save has the tensors of the one before, in the same memory, the places and
addresses are those that are known already.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask, lies_as_written
from safe_ckpt.core.formats.manifest import RECORD_NAME
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.device import DeviceCopies, Devices, TensorCopy
from safe_ckpt.core.staging.progress import FIRST_BYTE
from safe_ckpt.core.storage.direct_io import PAGE
from safe_ckpt.errors import SaveError

# Giving the interpreter lock away may cost milliseconds until it comes back; so much is copied in a few microseconds, unless it
# lies in a mapped file that has yet to be read.
_LOCKED_BELOW = 32 << 10
_HELP_FROM = 32 << 20  # below this the copy is over before another thread has woken up

# Without the interpreter lock is ``ctypes.memmove``.
_memmove_locked = ctypes.PyDLL(None).memmove
_memmove_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_locked.restype = ctypes.c_void_p


PIECE_BYTES = 16 << 20  # the writer may begin after so many
_THREADS_FROM = 1 << 20  # below this torch's own copy costs more in dispatch than it gains by its threads

Piece = tuple[int | TensorCopy, int, int]
"""The address of memory, or a tensor that is copied in the way that its kind needs; its place in the shared buffer; bytes."""


class Deferral(Protocol):
    """Which tensors stay as they are until an optimizer steps."""

    token: object
    """The same for two of which one is the other with other objects in the same memory."""

    def covers(self, tensor: torch.Tensor, /) -> bool:
        """Whether ``tensor`` lies in memory that may be copied later."""

    def detector(self) -> Callable[[], str]:
        """Remember the tensors as they are now. Returns what names one that has changed; no text for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyPlan:
    """Part of the tensors of a snapshot, in the order of their places.

    Attributes:
        rows: one for each tensor.
        moves: those of them that are not rows of plain addresses.
        held: what the addresses belong to. Not the tensors: they may be given other memory before the copy is over.
        on_host: whether all of them are in host memory.
    """

    rows: Sequence[Piece] = ()
    moves: Sequence[TensorCopy] = ()
    held: Sequence[object] = ()
    on_host: bool = True

    @classmethod
    def of(
        cls, moves: Sequence[TensorCopy], elsewhere: Callable[[TensorCopy], bool] = lambda move: not move.tensor.is_cpu
    ) -> CopyPlan:
        """Plan to copy ``moves``; ``elsewhere`` says of one that it is not in host memory."""
        rows: list[Piece] = []
        kept: list[TensorCopy] = []
        on_host = True
        for move in moves:
            size, away = move.size, elsewhere(move)
            on_host = on_host and not away
            if away or size >= _THREADS_FROM or not lies_as_written(move.tensor):
                kept.append(move)
                rows.append((move, move.offset, size))
            else:
                rows.append((move.tensor.data_ptr(), move.offset, size))
        return cls(rows=rows, moves=kept, held=_memory_of([move.tensor for move in moves]), on_host=on_host)

    @classmethod
    def joined(cls, plans: Sequence[CopyPlan]) -> CopyPlan:
        """Join several plans, whose places follow one another."""
        return cls(
            rows=list(chain.from_iterable(plan.rows for plan in plans)),
            moves=list(chain.from_iterable(plan.moves for plan in plans)),
            held=list(chain.from_iterable(plan.held for plan in plans)),
            on_host=all(plan.on_host for plan in plans),
        )

    @property
    def size_bytes(self) -> int:
        """The bytes of all of them."""
        return sum(size for _, _, size in self.rows)

    def pieces(self, elsewhere: Callable[[TensorCopy], bool], *, one_thread: bool) -> deque[Piece]:
        """Cut into pieces that any thread may copy; whole where torch's own threads copy it."""
        if not self.moves and PIECE_BYTES >= _THREADS_FROM:
            return deque(self.rows)  # none is larger than a piece
        pieces: deque[Piece] = deque()
        for row in self.rows:
            source, offset, size = row
            if isinstance(source, int):
                address = source
            elif elsewhere(source) or not lies_as_written(source.tensor) or not one_thread:
                pieces.append(row)
                continue
            else:
                address = source.tensor.data_ptr()
            for at in range(0, size, PIECE_BYTES):
                pieces.append((address + at, offset + at, min(PIECE_BYTES, size - at)))
        return pieces


def _memory_of(tensors: Sequence[torch.Tensor]) -> Sequence[object]:
    storage: Any = torch.Tensor.untyped_storage
    return list(map(storage, tensors))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Template:
    """A ``CopyPlan`` without its tensors.

    Attributes:
        rows: as there; of those that need the tensor, the place and the size count.
        odd: these: which row, and which of all tensors of the snapshot.
        deferred: whether they may be copied later.
        on_host: as there.
    """

    rows: Sequence[Piece]
    odd: Sequence[tuple[int, int]]
    deferred: bool
    on_host: bool

    @classmethod
    def of(cls, plan: CopyPlan, numbers: Sequence[int], *, deferred: bool) -> _Template:
        odd = [row for row, piece in enumerate(plan.rows) if not isinstance(piece[0], int)]
        rows = list(plan.rows)
        for row in odd:
            rows[row] = (0, *rows[row][1:])
        return cls(rows=rows, odd=[(row, numbers[row]) for row in odd], deferred=deferred, on_host=plan.on_host)

    def plan(self, tensors: Sequence[torch.Tensor], held: Sequence[object]) -> CopyPlan:
        rows, moves = list(self.rows), []
        for row, number in self.odd:
            _, offset, size = rows[row]
            move = TensorCopy(offset=offset, tensor=tensors[number].detach(), deferred=self.deferred)
            rows[row] = (move, offset, size)
            moves.append(move)
        return CopyPlan(rows=rows, moves=moves, held=held, on_host=self.on_host)


class KnownCopies:
    """The last snapshot's plans, file by file. One per pipeline, used on the thread that saves."""

    def __init__(self) -> None:
        self._templates: dict[object, tuple[_Template, _Template]] = {}
        self._used: set[object] = set()

    def recall(self, key: object, placed: Sequence[tuple[int, torch.Tensor]]) -> tuple[CopyPlan, CopyPlan] | None:
        """Return which tensors of a file are copied now and which later, if its plan is known.

        Args:
            key: equal where all addresses and places are; None where that is not known.
            placed: its tensors, with their places in it.
        """
        templates = None if key is None else self._templates.get(key)
        if templates is None:
            return None
        self._used.add(key)
        tensors = [tensor for _, tensor in placed]
        now, later = templates
        held = _memory_of(tensors)
        return now.plan(tensors, held), later.plan(tensors, held if later.rows else ())

    def remember(self, key: object, plans: tuple[CopyPlan, CopyPlan], deferred: Sequence[bool]) -> None:
        """Keep a file's plans, without their tensors.

        Args:
            key: as above.
            plans: what is copied now and what later.
            deferred: which of its tensors are copied later.
        """
        if key is None:
            return
        self._used.add(key)
        numbers: tuple[list[int], list[int]] = [], []
        for number, is_later in enumerate(deferred):
            numbers[is_later].append(number)
        now, later = plans
        self._templates[key] = (
            _Template.of(now, numbers[0], deferred=False),
            _Template.of(later, numbers[1], deferred=True),
        )

    def forget_others(self) -> None:
        """Keep what the snapshot that was laid out just now has used."""
        self._templates = {key: found for key, found in self._templates.items() if key in self._used}
        self._used = set()


def buffer_bytes(files: Sequence[FilePlan]) -> int:
    """How much of a shared buffer the files take."""
    return FIRST_BYTE + sum(_rounded(file.length) for file in files)


def lay_out(
    files: Sequence[FilePlan],
    buffer: SharedBuffer,
    folder: str,
    manifest: Mapping[str, Any],
    *,
    name: str = "",
    overlap_plan: Deferral | None = None,
    known: KnownCopies | None = None,
) -> tuple[list[WriteTask], StagingCopy]:
    """Make room for everything and fill in all but the tensors.

    Args:
        files: the planned files.
        buffer: where to; holds nothing else.
        folder: the staging directory that the files will be written to.
        manifest: goes into files that carry their manifest inside.
        name: of the checkpoint, for messages.
        overlap_plan: which tensors may be copied later; None for none.
        known: the last snapshot's plans.

    Returns:
        What to write, file by file, and what fills the shared buffer.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    buffer.reserve(buffer_bytes(files), waiting=True)
    known = known or KnownCopies()
    tasks = list_tasks(files, folder, manifest)
    _fill_in(files, tasks, buffer)
    plans = [_copies(file, task, overlap_plan, known) for file, task in zip(files, tasks, strict=True)]
    known.forget_others()
    now, later = (CopyPlan.joined([plan[turn] for plan in plans]) for turn in (0, 1))
    end = max((task.offset + task.length for task in tasks), default=FIRST_BYTE)
    detector = overlap_plan.detector() if overlap_plan is not None and later.rows else None
    return tasks, StagingCopy(name, buffer, (now, later), end, detector)


def _copies(
    file: FilePlan, task: WriteTask, overlap_plan: Deferral | None, known: KnownCopies
) -> tuple[CopyPlan, CopyPlan]:
    """Plan which tensors of one file are copied now and which later."""
    # Equal where all tensors have the same addresses and places.
    key = None if file.layout is None else (file.layout, task.offset, overlap_plan and overlap_plan.token)
    plans = known.recall(key, file.tensors)
    if plans is not None:
        return plans
    now: list[TensorCopy] = []
    later: list[TensorCopy] = []
    turns = [overlap_plan is not None and overlap_plan.covers(tensor) for _, tensor in file.tensors]
    for (offset, tensor), deferred in zip(file.tensors, turns, strict=True):
        # Detached: a tensor of a known plan is the very one that training uses, and it may be given other memory.
        move = TensorCopy(offset=task.offset + offset, tensor=tensor.detach(), deferred=deferred)
        (later if deferred else now).append(move)
    plans = CopyPlan.of(now), CopyPlan.of(later)
    known.remember(key, plans, turns)
    return plans


def _fill_in(files: Sequence[FilePlan], tasks: Sequence[WriteTask], buffer: SharedBuffer) -> None:
    """Write the bytes that are known already. Those that the last snapshot put to the same places are still there."""
    memory, there = buffer.memory, buffer.filled_for
    buffer.filled_for = frozenset()
    for file, task in zip(files, tasks, strict=True):
        same = file.layout is not None and (file.layout, task.offset) in there
        for start, end in () if same else file.gaps():  # what an earlier snapshot had there is nobody's business
            memory[task.offset + start : task.offset + end] = bytes(end - start)
        for offset, data in file.pieces[file.fixed :] if same else file.pieces:
            memory[task.offset + offset : task.offset + offset + len(data)] = data
    placed = zip(files, tasks, strict=True)
    buffer.filled_for = frozenset((file.layout, task.offset) for file, task in placed if file.layout is not None)


def list_tasks(files: Sequence[FilePlan], folder: str, manifest: Mapping[str, Any]) -> list[WriteTask]:
    """List the write tasks, with their places in a shared buffer that would hold all of it."""
    tasks: list[WriteTask] = []
    base = FIRST_BYTE
    for file in files:
        single = file.records is not None and file.manifest is not None
        tasks.append(
            WriteTask(
                path=f"{folder}/{file.path}",
                offset=base,
                length=file.length,
                records=file.records,
                manifest_name=RECORD_NAME,
                manifest={**manifest, **(file.manifest or {})} if single else {"format": "safe_ckpt-part"},
            )
        )
        base += _rounded(file.length)
    return tasks


def take(files: Sequence[FilePlan], buffer: SharedBuffer, folder: str, manifest: Mapping[str, Any]) -> list[WriteTask]:
    """Copy everything into the shared buffer at once. When this returns the caller may change whatever it likes.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    tasks, copy = lay_out(files, buffer, folder, manifest)
    copy.run()
    if copy.error is not None:
        raise copy.error
    return tasks


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE


class StagingCopy:
    """The filling of one shared buffer. ``run`` copies what cannot wait, ``run_deferred`` the rest.

    Of a copy in host memory another thread may take pieces from the back: ``help``.

    Args:
        name: of the checkpoint, for messages.
        buffer: filled with everything but the tensors already.
        plans: what is copied now and what later, each in the order of the offsets.
        end: where the last file file ends, to the byte.
        detector: tells of what changed although it should not have; None when nothing is deferred.
        devices: None for those of this process.

    Attributes:
        error: why the shared buffer is not, and will not be, what was to be saved.
    """

    def __init__(
        self,
        name: str,
        buffer: SharedBuffer,
        plans: tuple[CopyPlan, CopyPlan],
        end: int,
        detector: Callable[[], str] | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.error: Exception | None = None
        self._name = name
        self._buffer = buffer
        self._devices = DeviceCopies(buffer, devices)
        self._now, self._later = plans
        self._end = end
        self._detector = detector
        self._memory: torch.Tensor | None = buffer.bytes  # held: it must stay mapped under the copying
        self._address = buffer.bytes.data_ptr()
        self._stopped = False
        self._rest_is_left = False  # by ``run``, to whoever comes first
        self._taken_over = False
        self._claiming = threading.RLock()
        self._marked = 0
        self._over = threading.Event()
        self._checking = threading.RLock()
        self._pieces: deque[Piece] = deque()  # those that another thread may take
        self._entering = threading.RLock()  # of the one that helps; never held for long
        self._helping = threading.Lock()  # not reentrant: held by the one that helps, which is asked without waiting
        self._gate_waits = False
        self._to_be_closed = False
        self._ask_for_help: Callable[[Callable[[], None]], None] | None = None
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
        left, held = False, self._later.rows[0][1] if self._later.rows else self._end
        try:
            self._devices.begin(self._later.moves)
            self._ask_for_help = ask_for_help
            self._copy(self._now, held, aside=False)
            self._mark(held)
            left = self._rest_is_left = bool(self._later.rows) and self.error is None
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
        if not self._later.on_host and self._devices.order(self._later.moves):
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
            self._now = self._later = CopyPlan()
            self._detector = self._ask_for_help = None
            self._pieces, self._memory = deque(), None

    def _check_unchanged(self) -> None:
        with self._checking:  # the second caller waits: the step that follows changes what the detector looks at
            detector, self._detector = self._detector, None
            changed = detector() if detector is not None else ""
            if changed:
                cause = f"{changed} changed while it was copied, outside an optimizer's step. "
                cause += 'Change it after handle.wait_snapshot(), or use snapshot="eager"'
                self.fail(SaveError(name=self._name, cause=cause, phase="snapshot"))

    def _copy(self, plan: CopyPlan, held: int, *, aside: bool) -> None:
        """Copy, up to ``held`` as far as marks go. ``aside``: while training goes on, on one core and with the writer behind.

        While the caller waits it is the other way round: torch's threads help, or one of ours if torch uses one, and the writer
        does not take their memory bandwidth yet.
        """
        if self._memory is None:
            return
        one_thread = aside or torch.get_num_threads() == 1
        pieces = plan.pieces(self._devices.takes, one_thread=one_thread)
        if plan.on_host:
            self._pieces = pieces
            # A second thread must have the time to wake up, and a core of its own.
            is_long = plan.size_bytes >= _HELP_FROM and len(os.sched_getaffinity(0)) > 1
            # Not before: it would find nothing to do, and leave.
            if self._ask_for_help is not None and (self._gate_waits if aside else one_thread and is_long):
                self._ask_for_help(self.help)
        while not self._stopped:
            try:
                piece = pieces.popleft()
            except IndexError:
                break  # not ``while pieces``: the one that helps may take the last one in between
            self._copy_piece(piece)
            if aside:
                end = min(piece[1] + piece[2], held)
                if end - self._marked >= PIECE_BYTES:
                    self._mark(end)
        # At most one piece, unless the source's memory hangs, and then its thread does.
        with self._helping:
            pass
        self._devices.synchronize()

    def _copy_piece(self, piece: Piece) -> None:
        source, offset, length = piece
        if isinstance(source, int):
            copy = ctypes.memmove if length >= _LOCKED_BELOW else _memmove_locked
            copy(self._address + offset, source, length)
        elif self._devices.takes(source):
            self._devices.copy(source)
        elif self._memory is not None:
            source.into(self._memory)

    def _mark(self, end: int) -> None:
        self._devices.synchronize()
        if not self._stopped:
            self._marked = end
            self._buffer.mark(end)
