"""The side that deletes: it looks at the pins of its run, heeds those that count, and takes away those that are silent."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.home.pins.record import DEFAULT_TTL_S, Due, Pin, Silence, ruling_on, silent_after
from safe_ckpt.core.home.pins.shelf import MISSED, SUFFIX, Shelf, to_tell, told_of
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import SafeCheckpointError

logger = logging.getLogger(__name__)


class PinWatch:
    """One run's pins, as the job that deletes there sees them. Used on one thread at a time.

    Args:
        shelf: where they lie.
        clock: of this process, in seconds; it never jumps.
    """

    def __init__(self, shelf: Shelf, clock: Callable[[], float] = time.monotonic) -> None:
        self._shelf = shelf
        self._clock = clock
        self._silence, self._left = Silence(), Silence()
        self._read: dict[str, tuple[bytes, Pin | None]] = {}
        self._known: set[str] = set()  # readers, when all that was due was looked at
        self._told: set[str] = set()  # which files were logged
        self.any_seen = False

    def kept(self, places: Sequence[Place]) -> dict[Place, str]:
        """Return those of ``places``, all that is due, that must stay, and for whom.

        Raises:
            OSError: the pins cannot be read: whether one is held is not known.
        """
        pins = self._living()
        self._known = {pin.reader for pin in pins}
        return self._decided(pins, places)

    def held(self, places: Sequence[Place]) -> dict[Place, str]:
        """A second look at some that are about to be deleted: who holds one since the look at all that is due?

        Raises:
            OSError: the pins cannot be read.
        """
        pins = self._living()
        holding = [pin.next(wants=(), seen=None) if pin.reader in self._known else pin for pin in pins]
        return self._decided(holding, places)

    def _decided(self, pins: Sequence[Pin], places: Sequence[Place]) -> dict[Place, str]:
        names = {place: self._shelf.name_of(place) for place in places} if pins else {}
        by_place = any(pin.seen is not None for pin in pins)
        due = [_due(place, name, look=by_place) for place, name in names.items() if name]
        verdict = ruling_on(pins, due)
        for reader, missed in verdict.missed.items():
            if lost := [one for one in missed if one.name not in verdict.kept]:
                self._tell(reader, lost)
        return {place: verdict.kept[name] for place, name in names.items() if name in verdict.kept}

    def _living(self) -> list[Pin]:
        pins, besides = self._shelf.read()
        read = self._read  # most say what they said a moment ago
        found = {
            name: before
            if (before := read.get(name)) is not None and before[0] == data
            else (data, Pin.from_bytes(data))
            for name, data in pins.items()
        }
        self._read = found
        over = self._silence.over(
            {name: (data, silent_after(pin)) for name, (data, pin) in found.items()}, self._clock()
        )
        self._remove_left([name for name in besides if f"{name.lstrip('.').partition('.')[0]}{SUFFIX}" not in pins])
        for name in sorted(over):
            pin = found[name][1]
            logger.info("the pin of reader %s has ended: no sign of life", pin if pin is not None else name)
            try:
                self._shelf.remove([name, name.removesuffix(SUFFIX) + MISSED])
            except OSError as error:
                if name not in self._told:
                    logger.warning("%s could not be removed, and does not count: %s", self._shelf.place / name, error)
                self._told.add(name)
        self.any_seen = len(found) > len(over)
        return [pin for name, (_, pin) in found.items() if pin is not None and name not in over]

    def _remove_left(self, names: Sequence[str]) -> None:
        """Take away half-written words and words to readers that are gone, when they have lain there for long."""
        over = self._left.over(dict.fromkeys(names, (b"", DEFAULT_TTL_S)), self._clock())
        if over:
            with contextlib.suppress(OSError):  # the next look tries again
                self._shelf.remove(sorted(over))

    def _tell(self, reader: str, missed: Sequence[Due]) -> None:
        """Tell a reader, before they are deleted, which ones it will not find."""
        name = f"{reader}{MISSED}"
        try:
            before = told_of(self._shelf.told(name))
            said: list[Mapping[str, object]] = [{"name": one.name, "sequence": one.sequence} for one in missed]
            if (data := to_tell(before, said)) != to_tell(before, []):
                self._shelf.write(name, data)
        except OSError as error:
            logger.warning("a reader could not be told what it missed: %s: %s", self._shelf.place / name, error)


def _due(place: Place, name: str, *, look: bool) -> Due:
    if look:
        try:
            manifest = read_manifest(place)
            return Due(name=name, sequence=manifest.sequence, marked=manifest.marked)
        except (OSError, SafeCheckpointError) as error:
            logger.debug("%s: its place in the order of commits is not known: %s", place, error)
    return Due(name=name)


def held_in(shelves: Sequence[Shelf], found: Sequence[Candidate]) -> dict[Place, str]:
    """Return which of ``found`` readers keep from being deleted, and who. One look cannot tell which readers are silent.

    Raises:
        OSError: the pins cannot be read.
    """
    held: dict[Place, str] = {}
    for shelf in shelves:
        pins = [pin for data in shelf.read()[0].values() if (pin := Pin.from_bytes(data)) is not None]
        names = {shelf.name_of(one.path): one for one in found} if pins else {}
        due = [
            Due(name=name, sequence=one.manifest.sequence, marked=one.manifest.marked)
            if one.manifest is not None
            else Due(name=name)
            for name, one in names.items()
        ]
        held |= {names[name].path: why for name, why in ruling_on(pins, due).kept.items()}
    return held
