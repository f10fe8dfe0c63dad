"""The reader's side of a pin: written before the checkpoint is looked at, renewed while the reader lives, then taken away.

A pin counts once its reader has seen the checkpoint after writing it. Whoever deletes first says so, looks at the pins, and
only then deletes. So one of the two sees the other: the reader waits for what comes of a deletion that is under way.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from safe_ckpt.core.home.pins.record import Pin
from safe_ckpt.core.home.pins.shelf import MISSED, SUFFIX, Shelf, shelf_of, told_of
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import SafeCheckpointError

logger = logging.getLogger(__name__)
_PER_TTL = 6  # signs of life
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_WAIT_S = 5.0
"""For a deletion that is under way. One that takes longer looks at the pins again, and brings back what is held."""


class Hold:
    """One reader's pin, as long as the reader lives.

    Args:
        title: what the reader calls itself.
        ttl_s: for how long the pin counts after its last sign of life.
        tick: called in the background; it may change the pin. None for nothing.
        tick_s: how often.
    """

    def __init__(
        self, *, title: str, ttl_s: float, tick: Callable[[], None] | None = None, tick_s: float = 1.0, **facts: Any
    ) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        host, pid = socket.gethostname(), os.getpid()
        self._pin = Pin(reader=uuid.uuid4().hex[:16], title=title, host=host, pid=pid, since=now, ttl_s=ttl_s, **facts)
        self._tick, self._tick_s = tick, tick_s
        self._shelf: Shelf | None = None
        self._refused: set[Place | None] = set()
        self._stale: set[str] = set()  # what killed deletions left
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._keepers: list[threading.Thread] = []
        self._written = 0.0

    @property
    def is_written(self) -> bool:
        """Whether there is a pin: not in a directory that this reader may not write in."""
        return self._shelf is not None

    def take(self, checkpoint: Place, is_there: Callable[[], bool], *, ours: bool) -> bool:
        """Pin a checkpoint, in place of the one before. Returns whether it is there; if so it stays.

        Args:
            checkpoint: which one.
            is_there: looks.
            ours: see ``shelf_of``.
        """
        with self._lock:
            name = self._move_to(checkpoint, ours=ours)
            is_written = bool(name) and self.change(holds=name)
        if (not is_written or self._waited_for_deletions(name)) and is_there():
            return True
        self.change(holds="")
        return False

    def leave(self, **changes: Any) -> None:
        """The reader is through with what it held."""
        self.change(holds="", **changes)

    def change(self, **changes: Any) -> bool:
        """Change the pin. Returns whether that is written. What the storage refuses is said once, and tried again later."""
        with self._lock:
            self._pin = self._pin.next(**changes)
            return self._write(alike=not changes)

    def name_of(self, place: Place) -> str:
        """Return the name of a checkpoint as the pin has it; "" without one."""
        return self._shelf.name_of(place) if self._shelf is not None else ""

    def place_at(self, place: Place, *, ours: bool) -> None:
        """Leave a pin at the run in which this checkpoint lies, although none is held yet."""
        with self._lock:
            self._move_to(place, ours=ours)

    def told(self) -> list[str]:
        """Return the names of what the side that deletes says that this reader will not find."""
        if self._shelf is None:
            return []
        try:
            return [str(one.get("name", "")) for one in told_of(self._shelf.told(f"{self._pin.reader}{MISSED}"))]
        except OSError as error:
            logger.debug("what was missed is not known: %s", error)
            return []

    def close(self) -> None:
        """Take the pin away."""
        self._stop.set()
        with self._lock:
            shelf, self._shelf = self._shelf, None
            if shelf is not None and self._pin.pid == os.getpid():
                try:
                    shelf.remove([f"{self._pin.reader}{SUFFIX}", f"{self._pin.reader}{MISSED}"])
                except (OSError, SafeCheckpointError) as error:
                    logger.warning("a pin stays until its time is over: %s", error)

    def _move_to(self, checkpoint: Place, *, ours: bool) -> str:
        try:
            shelf = shelf_of(checkpoint, ours=ours)
        except OSError as error:
            self._refuse(checkpoint.parent, error)
            return ""
        if shelf is None:
            return ""
        if self._shelf is not None and self._shelf.place != shelf.place:
            self._shelf.remove([f"{self._pin.reader}{SUFFIX}"])
            self._shelf = None
        if self._shelf is None and shelf.place not in self._refused:
            self._shelf = shelf
            self._pin = self._pin.next(holds="")
            if self._write(first=True):
                self._start()
        return self.name_of(checkpoint)

    def _write(self, *, first: bool = False, alike: bool = False) -> bool:
        shelf = self._shelf
        if shelf is None or self._pin.pid != os.getpid():
            return False
        try:
            put = shelf.renew if alike else shelf.write
            put(f"{self._pin.reader}{SUFFIX}", self._pin.to_bytes())
        except (OSError, SafeCheckpointError) as error:
            if first and isinstance(error, OSError) and not isinstance(error, TimeoutError):
                self._refuse(shelf.place, error)
                self._shelf = None
            else:
                silent_s = time.monotonic() - self._written
                level = logging.WARNING if silent_s > self._pin.ttl_s else logging.DEBUG
                logger.log(level, "the pin of %s was not renewed for %.0f s: %s", self._pin, silent_s, error)
            return False
        now = time.monotonic()
        if self._written and now - self._written > self._pin.ttl_s:
            message = (
                "reader %s stood still for %.0f s: what was deleted meanwhile was not held, nor will it be told of"
            )
            logger.warning(message, self._pin, now - self._written)
        self._written = now
        return True

    def _refuse(self, place: Place, error: OSError) -> None:
        if place not in self._refused:
            logger.warning("what is read is not pinned, and may be deleted meanwhile: %s", error)
        self._refused.add(place)

    def _start(self) -> None:
        if not self._keepers:
            # One of its own for the signs of life: to look at a run may take long.
            self._keepers = [threading.Thread(target=self._keep, name="safe_ckpt-pin", daemon=True)]
            if self._tick is not None:
                self._keepers.append(threading.Thread(target=self._look, name="safe_ckpt-follow", daemon=True))
            for keeper in self._keepers:
                keeper.start()

    def _keep(self) -> None:
        period_s = self._pin.ttl_s / _PER_TTL
        while not self._stop.wait(period_s):
            with self._lock:
                if not self._stop.is_set():
                    self.change()

    def _look(self) -> None:
        while self._tick is not None and not self._stop.wait(self._tick_s):
            try:
                self._tick()
            except (OSError, SafeCheckpointError) as error:
                logger.debug("the run could not be looked at: %s", error)

    def _waited_for_deletions(self, name: str) -> bool:
        """Wait for deletions under way. Returns False for one of this very checkpoint that does not come to its end."""
        shelf, pause_s, until = self._shelf, _FIRST_PAUSE_S, time.monotonic() + _WAIT_S
        before = shelf.undecided(name) - self._stale if shelf is not None else set()
        while shelf is not None and before and time.monotonic() < until:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            before &= shelf.undecided(name)
        self._stale |= before - {name}
        return name not in before
