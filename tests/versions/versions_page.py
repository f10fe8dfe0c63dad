"""The tables of docs/limits.md, made of what ``make test-versions`` wrote down: docs/reference/versions_run.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from packaging.version import Version

from safe_ckpt.versions import SUPPORTED, Supported

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "reference" / "versions_run.json"
PAGE = ROOT / "docs" / "limits.md"
ENDS = ("oldest", "newest")
BEGIN, END = "<!-- made by `make test-versions`: {} -->", "<!-- end of what was made -->"
NAMED = ("torch", "lightning", "accelerate", "transformers", "deepspeed", "peft", "safetensors", "filelock", "numpy")


def read() -> dict[str, Any]:
    """What was run, by end."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def base(version: str) -> str:
    """Without what names a build: ``2.15.0+cu132`` is 2.15.0."""
    return Version(version).base_version


def with_tables(page: str, record: dict[str, Any]) -> str:
    """The page with its tables made anew."""
    for name, table in (("ranges", _ranges(record)), ("runs", _runs(record))):
        begin = BEGIN.format(name)
        pattern = re.compile(rf"(?<={re.escape(begin)}\n).*?(?={re.escape(END)})", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"{PAGE.name} has no place for {begin}")
        page = pattern.sub(lambda _, table=table: f"\n{table}\n\n", page, count=1)
    return page


def _ranges(record: dict[str, Any]) -> str:
    rows = ["| Package | Oldest, run | Newest that was run | Why not older |", "|---|---|---|---|"]
    for name, supported in SUPPORTED.items():
        rows.append(
            f"| {_shown(name)} | {supported.lowest} | {_newest(name, supported, record)} | {supported.because} |"
        )
    return "\n".join(rows)


def _newest(name: str, supported: Supported, record: dict[str, Any]) -> str:
    run = record["newest"]["packages"].get(name)
    return supported.newest if name == "python" or run is None else base(run)


def _shown(name: str) -> str:
    return "Python" if name == "python" else name


def _runs(record: dict[str, Any]) -> str:
    rows = [f"| | Python | {' | '.join(NAMED)} |", "|---" * (2 + len(NAMED)) + "|"]
    for end in ENDS:
        run = record[end]
        versions = (base(run["packages"][name]) if name in run["packages"] else "" for name in NAMED)
        rows.append(f"| {end} | {run['packages']['python']} | {' | '.join(versions)} |")
    rows += ["", "| | Tests | Run on | Passed | Skipped | Failed |", "|---|---|---|---|---|---|"]
    for end in ENDS:
        for suite, counts in record[end]["suites"].items():
            failed = ", ".join(f"`{name}`" for name in counts["failed"]) or "none"
            rows.append(f"| {end} | {suite} | {counts['date']} | {counts['passed']} | {counts['skipped']} | {failed} |")
    return "\n".join(rows)


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main()
