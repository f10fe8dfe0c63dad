"""Decides whether the numbers of a file are healthy, and what is learnt for the next save. Pure decisions.

In a trained parameter, or in an optimizer's state, no number may be NaN or infinite. Anything else, such as a mask, may be
infinite by design. Where it is infinite at the first save that has it is learnt, and is no alarm as long as it stays so. A
buffer, or a parameter that is not trained, may also become less infinite. NaN is always an alarm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from safe_ckpt.core.formats.names import plain_name
from safe_ckpt.extensions.health.regions import Region

_MOST_ROWS = 20
_MOST_FINITE = 2000  # more names would make the manifest large
_MORE = ""
"""Stands for names of tensors that are not infinite, where there are more."""
_NO_OTHER = "."
"""Stands for them where there are none: then what comes is new, too."""
_LARGEST = 1e300  # JSON has no infinity


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The facts that are known of a file before it is written. Its ``vars`` are JSON-able.

    Attributes:
        first: whether no save of this file is known.
        layout: of the tensors that the file had at the last save, as ``Scan.facts`` has it.
        learnt: tensors that may have infinite numbers -> a digest of where these are, and how many; "" and 0 for none so far.
        trained: names of parameters that are trained. One counts for every tensor whose name ends in it.
        fixed: names of buffers and of parameters that are not trained. One counts for every tensor whose name ends in it.
        ignored: patterns of names that are not looked at.
        norm: at the last healthy save; None where that is not known.
        norm_jump: by which factor the norm may grow from there; None for any.
        action: of the settings.
    """

    first: bool = True
    layout: str = ""
    learnt: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trained: Sequence[str] = ()
    fixed: Sequence[str] = ()
    ignored: Sequence[str] = ()
    norm: float | None = None
    norm_jump: float | None = None
    action: str = "mark"

    def regions(self, regions: Iterable[Region]) -> list[Region]:
        """The regions that are looked at."""
        return [one for one in regions if not any(fnmatchcase(one.name, pattern) for pattern in self.ignored)]

    def judge(
        self,
        facts: Mapping[str, Any],
        sick: Sequence[Mapping[str, Any]],
        names: Iterable[str] | None = None,
        optimizers: Collection[str] = (),
    ) -> dict[str, Any]:
        """The entry of one file in the manifest's health section.

        Args:
            facts: of the numbers.
            sick: the tensors with numbers that are not finite.
            names: of all tensors that were looked at; None where that is not known.
            optimizers: of those that lie where an optimizer keeps its state.
        """
        # A tensor that the models have, in a module that is called ``state``, is not of an optimizer.
        own = frozenset((*self.fixed, *self.trained))
        kept = frozenset(name for name in optimizers if "state" not in name_among(name, own).split(".")[:-1])
        alarms, learnt = self._alarms(facts, sick, kept)
        if names is not None:
            # The other tensors of the file that may be infinite are learnt, too: none of them is new at the next save.
            learnt = {name: known for name, known in learnt.items() if known[0]}
            trained = frozenset(self.trained)
            finite = [name for name in names if name not in learnt and not (name in kept or name_among(name, trained))]
            more = (finite or [_NO_OTHER]) if len(finite) <= _MOST_FINITE else [_MORE]
            learnt |= dict.fromkeys(more, ("", 0))
        alarms.sort(key=lambda row: (-row["nan"] - row["inf"], row["name"]))
        jump = None
        same = facts.get("layout") == self.layout  # with other tensors in it a file has another norm
        if self.norm_jump is not None and self.norm and same and facts["norm"] > self.norm_jump * self.norm:
            jump = min(facts["norm"] / self.norm, _LARGEST)
        found = {**facts, "sick": alarms[:_MOST_ROWS], "sick_tensors": len(alarms), "jump": jump, "learnt": learnt}
        found["ignored"] = digest_of_patterns(self.ignored)
        return {key: value for key, value in found.items() if value not in (None, [], {}, 0, "")}

    def _alarms(
        self, facts: Mapping[str, Any], sick: Sequence[Mapping[str, Any]], kept: frozenset[str]
    ) -> tuple[list[dict[str, Any]], dict[str, Sequence[Any]]]:
        """The alarms, and what is learnt beside what was known."""
        fixed, trained = frozenset(self.fixed), frozenset(self.trained)
        others, learnt, alarms = facts.get("layout") != self.layout, dict(self.learnt), []
        # A tensor that was not in the file before is new. Where that is not known, what is not trained may be.
        all_named = _MORE not in self.learnt and any(pattern == "" for pattern, _ in self.learnt.values())
        may_be_new = others and (all_named or bool(self.trained))
        for row in sick:
            name, pattern, inf = row["name"], row["pattern"], row["inf"]
            before, count = learnt.get(name, ("", -1))
            if row["nan"]:
                fine = False
            elif self.first or (may_be_new and name not in self.learnt):
                fine = name not in kept and not name_among(name, trained)
            else:
                is_fixed = bool(name_among(name, fixed, whole=name in kept))
                fine = before == pattern or (is_fixed and (inf <= count or others))
            if fine:
                learnt[name] = pattern, inf
            else:
                alarms.append({key: value for key, value in row.items() if key != "pattern"})
        return alarms, learnt


def digest_of_patterns(patterns: Sequence[str]) -> str:
    """Tells whether two files were looked at alike; "" for no patterns."""
    return xxhash.xxh3_64("\n".join(patterns).encode()).hexdigest() if patterns else ""


def name_among(name: str, names: frozenset[str], *, whole: bool = False) -> str:
    """The name, or unless it counts as a ``whole`` the end of it from a dot on, that is one of these; "" if none is."""
    while name and name not in names:
        if (plain := plain_name(name)) in names:
            return plain
        name = "" if whole else name.partition(".")[2]
    return name


def is_sick(health: Mapping[str, Any]) -> bool:
    """Whether what a manifest says of a file, or of a checkpoint, is an alarm. ``changed`` is in those of earlier versions."""
    return bool(health.get("sick_tensors") or health.get("jump") or health.get("changed"))


def of_checkpoint(files: Mapping[str, Mapping[str, Any]], action: str) -> dict[str, Any]:
    """The health section of a checkpoint's manifest: its files, and whether it is marked.

    Args:
        files: path -> what ``Expectation.judge`` returned. Empty where nothing was looked at.
        action: of the settings.
    """
    if not files:
        return {}
    sick = any(map(is_sick, files.values()))
    return {
        "healthy": not sick,
        "marked": sick and action != "warn",
        "files": {name: dict(files[name]) for name in files},
    }
