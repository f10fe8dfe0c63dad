"""The part of a manifest that says what was found of the numbers: checked as a whole for its readers, and told in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safe_ckpt.core.formats.file_plan import ITSELF


def checked_health(data: Any) -> dict[str, Any]:
    """The section as the extension makes it; empty where nothing was looked at.

    Raises:
        TypeError, ValueError, KeyError: it is not that.
    """
    section: dict[str, Any] = _of_type(data, dict)
    if not section:
        return {}
    for key in ("healthy", "marked"):
        if type(section[key]) is not bool:
            raise TypeError(f"health: {key} is {section[key]!r:.80}")
    for facts in _of_type(section["files"], dict).values():
        for key, value in _of_type(facts, dict).items():
            _check_fact(key, value)
    return section


def describe_unhealthy(health: Mapping[str, Any]) -> str:
    """Say what is wrong: the worst tensors by name. Empty where nothing is."""
    words = []
    for path, facts in sorted(health.get("files", {}).items()):
        where = f"{path}: " if path != ITSELF else ""
        for row in facts.get("sick", ()):
            counts = ", ".join(f"{row[key]} {word}" for key, word in (("nan", "NaN"), ("inf", "Inf")) if row[key])
            words.append(f"{where}{row['name']} has {counts} among {row['numbers']} numbers")
        words += [
            f"{where}{row['name']} changed and nothing had written to it: the memory of {row['where']} is at fault"
            for row in facts.get("changed", ())
        ]
        if facts.get("jump"):
            words.append(f"{where}the norm is {facts['jump']:.3g} times that of the last healthy checkpoint")
    more = sum(facts.get("sick_tensors", 0) for facts in health.get("files", {}).values()) - 3
    return "; ".join(words[:3]) + (f"; and {more} tensors more" if more > 0 else "")


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"health: expected {kind.__name__}, got {value!r:.80}")
    return value


_ROWS: Mapping[str, Mapping[str, type]] = {
    "sick": {"name": str, "numbers": int, "nan": int, "inf": int},
    "changed": {"name": str, "where": str},
}
_TEXTS = ("layout", "ignored", "largest")


def _check_fact(key: str, value: Any) -> None:
    if key in _ROWS:
        for row in _of_type(value, list):
            for name, kind in _ROWS[key].items():
                _of_type(row[name], kind)
    elif key == "learnt":
        for pattern, count in _of_type(value, dict).values():
            _of_type(pattern, str)
            _of_type(count, int)
    elif key == "hashes":
        for digest in _of_type(value, dict).values():
            _of_type(digest, str)
    elif key in _TEXTS:
        _of_type(value, str)
    elif type(value) not in (int, float):
        raise TypeError(f"health: expected a number, got {value!r:.80}")
