"""Which checkpoints are deleted after a commit. Policies are values and pure: they decide from what they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safe_ckpt import text
from safe_ckpt.config import Retention
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.standing import Catalog, is_under_its_name, newest_of, still_has_its_name
from safe_ckpt.core.storage.objects.place import Place

_NAMES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Unjudged:
    """``keep_best`` cannot choose: no checkpoint has a finite number as its metric.

    Attributes:
        metric: the name that the rule has.
        known: the names that have one, sorted.
    """

    metric: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        names = text.listed([text.clean(name) for name in self.known], _NAMES_SHOWN) or "none yet"
        return f"no checkpoint that counts has a finite number as metric {self.metric!r}: all stay (metrics there: {names})"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of retention after a commit.

    Attributes:
        to_delete: what is to be deleted now.
        kept: names of what stays, oldest first, where that is known.
        sizes: how many bytes those have that are known.
        unjudged: why the rules could not choose; None where they could.
    """

    to_delete: Sequence[Place]
    kept: Sequence[str] = ()
    sizes: Mapping[Place, int] = field(default_factory=dict)
    unjudged: Unjudged | None = None


RetentionPolicy = Callable[[Sequence[CheckpointInfo]], Sequence[Place]]
"""Chooses what is to be deleted now among the committed checkpoints of one directory; of none where there is no catalog."""


@dataclass(frozen=True)
class ByRules:
    """Keeps what any of these settings keeps, and the newest."""

    rules: Retention

    def __call__(self, committed: Sequence[CheckpointInfo]) -> Sequence[Place]:
        """Return the places that the rules do not keep."""
        return [info.path for info in to_delete(committed, self.rules)]


def policy_of(rules: Retention) -> RetentionPolicy | None:
    """Return the policy of these settings; None when they have no rule, so that nothing is ever deleted."""
    return ByRules(rules) if has_rules(rules) else None


def delete_listed(paths: Sequence[Path]) -> RetentionPolicy:
    """Return a policy that deletes ``paths``: the caller has decided already."""
    return lambda _: paths


def keep_newest(limit: int | None, best: Path | None = None) -> RetentionPolicy:
    """Keeps the newest up to a limit, and the best, as ``transformers.trainer_utils.rotate_checkpoints`` chooses them.

    Args:
        limit: how many to keep; None or less than 1 for all.
        best: never deleted; None where there is none.
    """

    def chosen(committed: Sequence[CheckpointInfo]) -> list[Place]:
        if limit is None or limit < 1:
            return []
        by_age = [info.path for info in sorted(committed, key=lambda info: info.sequence)]
        spared = {*by_age[-1:], *(path for path in by_age if path == best)}
        surplus = len(by_age) - max(limit, len(spared))
        return [path for path in by_age if path not in spared][: max(0, surplus)]

    return chosen


def decide_deletions(
    new: CheckpointInfo,
    catalog: Catalog | None,
    policy: RetentionPolicy | None,
    *,
    marked: Sequence[CheckpointInfo] = (),
) -> Decision | None:
    """``new`` was committed: add it to the catalog, and decide what is deleted. On rank 0, in the background.

    Marked ones are not shown to the policy, which would count them. After the commit of a marked one the policy is not asked
    at all, and only older marked ones are deleted: the newest stays for somebody to look at.

    Args:
        new: what was committed.
        catalog: what there is besides; None for no catalog.
        policy: decides; None deletes nothing.
        marked: the last one that this job committed, also where there is no catalog.

    Returns:
        The decision; None where nothing is decided.

    Raises:
        OSError: a pointer of the catalog could not be read.
    """
    replaced = catalog.add(new) if catalog is not None else ()
    if policy is None and not replaced:
        return None
    committed = catalog.still_ours(new) if catalog is not None else []
    protected = {*catalog.named(), *newest_of(committed)} if catalog is not None else set()
    missing = None
    if new.marked:
        listed = [info.path for info in committed if info.marked and is_under_its_name(info) and info is not new]
        # A healthy one may have its name since.
        earlier = [info.path for info in marked if info.path != new.path and still_has_its_name(info)]
        chosen: Sequence[Place] = list(dict.fromkeys([*listed, *earlier]))
    else:
        counted = [info for info in committed if not info.marked]
        chosen = policy(counted) if policy is not None else ()
        missing = unjudged(counted, policy.rules) if isinstance(policy, ByRules) else None
    paths = [*replaced, *(path for path in chosen if path not in protected)]
    if catalog is not None:
        catalog.forget(paths)
    kept = sorted((info for info in committed if info.path not in paths), key=lambda info: info.sequence)
    sizes = {info.path: info.size_bytes for info in committed}
    return Decision(to_delete=paths, kept=[info.path.name for info in kept], sizes=sizes, unjudged=missing)


def to_delete(infos: Sequence[CheckpointInfo], policy: Retention) -> list[CheckpointInfo]:
    """The committed checkpoints that no rule keeps, oldest first. The newest is never among them.

    Args:
        infos: all committed checkpoints of one directory.
        policy: the rules; a checkpoint that any of them keeps stays. Without any rule all stay, and where none has the metric.
    """
    if not has_rules(policy) or unjudged(infos, policy) is not None:
        return []
    # A checkpoint under another name than it was saved under is the user's copy or link, which only the user deletes.
    by_age = sorted((info for info in infos if is_under_its_name(info)), key=lambda info: info.sequence)
    kept = {info.sequence for info in by_age[-(policy.keep_last or 1) :]}
    if policy.keep_best is not None and policy.metric is not None:
        kept |= {info.sequence for info in best_first(by_age, policy)[: policy.keep_best]}
    if policy.keep_every_steps is not None:
        kept |= {info.sequence for info in by_age if info.step % policy.keep_every_steps == 0}
    return [info for info in by_age if info.sequence not in kept]


def unjudged(infos: Sequence[CheckpointInfo], policy: Retention) -> Unjudged | None:
    """Why ``keep_best`` cannot choose among these and keeps all of them; None where it can, or is not set."""
    own = [info for info in infos if is_under_its_name(info)]
    if policy.keep_best is None or policy.metric is None or not own:
        return None
    known = {name for info in own for name, value in info.metrics.items() if abs(value) < math.inf}  # NaN is not
    return None if policy.metric in known else Unjudged(metric=policy.metric, known=tuple(sorted(known)))


def has_rules(policy: Retention) -> bool:
    """Whether anything is ever deleted."""
    return not (policy.keep_last is None and policy.keep_best is None and policy.keep_every_steps is None)


def best_first(infos: Sequence[CheckpointInfo], policy: Retention) -> list[CheckpointInfo]:
    """Sort those that have the policy's metric, best first; of equals the newer first. NaN is worse than anything."""
    sign = 1 if policy.mode == "min" else -1
    rated = [info for info in infos if policy.metric in info.metrics]

    def rank(info: CheckpointInfo) -> tuple[float, int]:
        value = info.metrics[policy.metric or ""]
        return (math.inf if math.isnan(value) else sign * value, -info.sequence)

    return sorted(rated, key=rank)
