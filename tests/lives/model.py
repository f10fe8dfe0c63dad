"""What must be in a directory and in its mirror, and what a resume takes: docs/concepts.md, observability.md, object-stores.md.

Plain Python, which shares no code with the package. A name is that of a folder. Where the docs leave a moment open, such as
when a copy is deleted, a name is in ``may_go`` or ``may_come``, and after each step the model takes what it sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Rules:
    """The settings of one start."""

    keep_last: int | None = None
    keep_best: int | None = None
    mode: str = "min"
    every: int | None = None
    judges: bool = True  # bad numbers mark a checkpoint
    jumps: bool = False  # and so does a norm that has jumped
    mirror: bool = False
    there_last: int | None = None
    there_every: int | None = None
    required: bool = False
    follow: bool = False

    @property
    def any(self) -> bool:
        return not (self.keep_last is self.keep_best is self.every is None)

    @property
    def there(self) -> Rules:
        """The mirror's own; what is the best here stays the best there."""
        if self.there_last is self.there_every is None:
            return Rules()
        return replace(self, keep_last=self.there_last, every=self.there_every)


@dataclass(frozen=True)
class Saved:
    """One checkpoint: ``order`` is that of the commits, ``value`` tells it from all others."""

    name: str
    step: int
    order: int
    value: int
    loss: float | None = None
    marked: bool = False
    damage: str = ""  # "bytes" or "manifest"
    folder: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it has the name that it was saved under; else it is the user's."""
        return self.folder == self.name


def kept(found: list[Saved], rules: Rules) -> set[str]:
    """Folders of those that some rule keeps, of healthy ones under their own names."""
    if not rules.any or (rules.keep_best and not any(_rated(one) < math.inf for one in found)):
        return {one.folder for one in found}
    newest = sorted(found, key=lambda one: -one.order)
    stay = {one.folder for one in newest[: rules.keep_last or 1]}
    if rules.keep_best:
        sign = 1 if rules.mode == "min" else -1
        known = [one for one in newest if one.loss is not None]
        best = sorted(known, key=lambda one: math.inf if math.isnan(one.loss) else sign * one.loss)
        stay |= {one.folder for one in best[: rules.keep_best]}
    return stay | {one.folder for one in found if rules.every and one.step % rules.every == 0}


def _rated(one: Saved) -> float:
    return abs(one.loss) if one.loss is not None and not math.isnan(one.loss) else math.inf


@dataclass
class Model:
    """A directory and its mirror."""

    rules: Rules = field(default_factory=Rules)
    here: dict[str, Saved] = field(default_factory=dict)
    there: dict[str, Saved] = field(default_factory=dict)
    quarantine: list[Saved] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    may_go: set[str] = field(default_factory=set)  # here: chosen by retention, and needed or held for longer
    there_may_go: set[str] = field(default_factory=set)
    there_may_come: dict[str, Saved] = field(default_factory=dict)
    up: bool = True
    behind: bool = False  # an upload of this job has failed
    orders: int = 0
    followed: set[int] = field(default_factory=set)  # deleted here by this job's retention
    last: Saved | None = None  # that this job has saved or resumed, and that is healthy

    def save(self, step: int, value: int, loss: float | None, *, sick: bool) -> Saved:
        """A save was committed: what it is, and what goes for it."""
        self.orders += 1
        name, marked = f"step-{step:08d}", sick and self.rules.judges
        there = self.here.get(name)
        if marked and there is not None and not (there.marked and there.damage != "manifest"):
            name = f"unhealthy-{name}"
        new = Saved(name, step, self.orders, value, loss, marked, folder=name)
        self.here[name] = new
        self.may_go.discard(name)
        gone = self._chosen(new)
        self.may_go |= gone
        if not self.rules.required:
            for folder in gone - self.held:
                self.followed.add(self.here.pop(folder).value)
            self.may_go -= gone - self.held
        self._mirror(new, gone)
        return new

    def _chosen(self, new: Saved) -> set[str]:
        counted = [one for one in self.here.values() if one.is_own and one.damage != "manifest"]
        if not self.rules.any:
            return set()
        if new.marked:
            return {one.folder for one in counted if one.marked} - {new.folder}
        healthy = [one for one in counted if not one.marked]
        return {one.folder for one in healthy} - kept(healthy, self.rules)

    def _mirror(self, new: Saved, gone: set[str]) -> None:
        if not self.rules.mirror:
            return
        if self.rules.follow:
            self.there_may_go |= (gone | self.may_go) & self.there.keys()
        if new.marked:
            return
        self.last = new
        if not self.up or self.behind:
            self.behind = True
            self.there_may_come[new.folder] = new
            self._let_go({**self.there, **self.there_may_come})
            return
        self.there[new.folder] = new
        self.there_may_go.discard(new.folder)
        found = list(self.there.values())
        for folder in self.there.keys() - kept(found, self.rules.there):
            del self.there[folder]
            self.there_may_go.discard(folder)

    def _let_go(self, found: dict[str, Saved]) -> None:
        """What the mirror's rules may delete, whichever of these are there."""
        if self.rules.there.any:
            newest = max(found.values(), key=lambda one: one.order).folder
            self.there_may_go |= self.there.keys() - {newest}

    def order(self, step: int | None = None, *, named: bool = False) -> list[Saved]:
        """What a resume tries, in this order."""
        names = None if step is None else f"step-{step:08d}"
        found = [one for one in self.here.values() if names in (None, one.name) and one.damage != "manifest"]
        return sorted((one for one in found if named or not one.marked), key=lambda one: -one.order)

    def newer_there(self, step: int | None = None) -> Saved | None:
        """What a resume fetches before it tries what is here."""
        if not self.rules.mirror:
            return None
        here = self.order(step, named=True)
        newest = self.offered(step)[:1]
        known = {one.value for one in here}
        return next(
            (one for one in newest if one.value not in known and one.order > max([0, *(h.order for h in here)])), None
        )

    def offered(self, step: int | None = None) -> list[Saved]:
        """What the mirror has for a resume, the newest first."""
        names = None if step is None else f"step-{step:08d}"
        found = [one for one in self.there.values() if self.rules.mirror and names in (None, one.name)]
        return sorted(found, key=lambda one: -one.order)

    def fetch(self, one: Saved) -> None:
        """It is brought here, under the folder's name that it was uploaded from."""
        old = self.here.get(one.folder)
        if old is not None and (old.order >= one.order or old.damage == "manifest"):
            self.quarantine.append(old)
        self.here[one.folder] = one
        self.may_go.discard(one.folder)

    def resume(self, step: int | None) -> tuple[str, Saved | None]:
        """With a mirror that answers, or none: "taken", "fresh", "not found" or "no valid"; and what is taken."""
        if (newer := self.newer_there(step)) is not None and not newer.damage:
            self.fetch(newer)
        # Without a manifest that can be read only the name of a folder says that it is a checkpoint, and of which step.
        names = {f"step-{number:08d}" for number in ([step] if step is not None else range(100))}
        tried = [one for one in self.here.values() if one.damage == "manifest" and one.folder in names]
        for number, one in enumerate(self.order(step, named=step is not None)):
            if number and (sounder := self._sound_there(step, one.order)) is not None:
                return "taken", self._fetch_and_take(sounder, tried)
            if not one.damage:
                return "taken", self._take(one, tried)
            tried.append(one)
        if (sound := self._sound_there(step, -1)) is not None:
            return "taken", self._fetch_and_take(sound, tried)
        passed = step is None and any(one.marked and one.damage != "manifest" for one in self.here.values())
        aside = [one for one in self.quarantine if one.folder in names] if step is not None else self.quarantine
        if tried or passed or aside:
            return "no valid", None
        return ("fresh" if step is None else "not found"), None

    def _sound_there(self, step: int | None, newer_than: int) -> Saved | None:
        return next((one for one in self.offered(step) if not one.damage and one.order > newer_than), None)

    def _fetch_and_take(self, one: Saved, tried: list[Saved]) -> Saved:
        self.fetch(one)
        return self._take(one, [old for old in tried if old.folder != one.folder])

    def _take(self, one: Saved, damaged: list[Saved]) -> Saved:
        for bad in damaged:
            self.quarantine.append(bad)
            del self.here[bad.folder]
            self.may_go.discard(bad.folder)
        if self.rules.mirror and one.value not in {other.value for other in self.there.values()} and not one.marked:
            self.there_may_come[one.folder] = one
            self._let_go({**self.there, one.folder: one})
        self.last = None if one.marked else one
        return one
