"""What a run of pytest said of each test, and how two runs differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import yaml

ABSENT = "no result"
OMISSIONS = "not compared"


@dataclass(frozen=True)
class Outcome:
    """Of one test: passed, failed, error (in set-up or tear-down), skipped, xfailed or no result; and what it said."""

    kind: str
    message: str = ""


@dataclass(frozen=True)
class Difference:
    """A test that ends otherwise with ours."""

    test: str
    stock: Outcome
    ours: Outcome


@dataclass(frozen=True)
class Row:
    """A difference that is expected.

    Attributes:
        reason: the name of the reason.
        test: an identifier of a test; ``*`` is any text, and without ``[...]`` all parameters are meant.
        variants: in which runs.
        outcome: with ours.
        says: what its message must hold, so that the row does not hide another failure of the test.
        sometimes: it depends on which of two comes first, and may be missing.
    """

    reason: str
    test: str
    variants: tuple[str, ...]
    outcome: str
    sometimes: bool
    says: str = ""

    def explains(self, difference: Difference) -> bool:
        """Whether it is this difference that the row expects."""
        ours = difference.ours
        return self.means(difference.test) and self.outcome == ours.kind and self.says in ours.message

    def means(self, test: str) -> bool:
        """Whether this row is about a test."""
        pattern = re.escape(self.test).replace(r"\*", ".*")
        return re.fullmatch(rf"{pattern}(\[.*\])?", test, re.DOTALL) is not None


@dataclass(frozen=True)
class Table:
    """What is expected of one framework.

    Attributes:
        rows: the differences.
        reasons: theirs: name -> (why, where docs/migrating.md tells it).
        omissions: pattern of a message -> why a test that is skipped with it cannot be compared on any machine of ours.
    """

    rows: tuple[Row, ...]
    reasons: Mapping[str, tuple[str, str]]
    omissions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What came of the differences.

    Attributes:
        explained: those that a row expects.
        unexplained: the others.
        obsolete: rows that nothing answered to.
    """

    explained: tuple[tuple[Row, Difference], ...]
    unexplained: tuple[Difference, ...]
    obsolete: tuple[Row, ...]


def read_junit(path: Path, folder: str) -> dict[str, Outcome]:
    """The outcomes in a file of ``--junitxml`` (xunit1), by ``file::class::test`` with the file relative to ``folder``."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.get("file", "")
        module = file.removesuffix(".py").replace("/", ".")
        inner = case.get("classname", "").removeprefix(module).strip(".")
        name = "::".join(part for part in (_below(folder, file), inner, case.get("name", "")) if part)
        outcome = _outcome(case)
        if (
            name not in found or found[name].kind == "passed"
        ):  # a test that passed and whose tear-down did not is there twice
            found[name] = outcome
    return found


def _below(folder: str, file: str) -> str:
    return file.removeprefix(f"{folder}/")


def _outcome(case: ElementTree.Element) -> Outcome:
    for tag, kind in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        element = case.find(tag)
        if element is not None:
            told = "xfailed" if element.get("type") == "pytest.xfail" else kind
            return Outcome(told, " ".join(element.get("message", "").split()))
    return Outcome("passed")


def differences(stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> list[Difference]:
    """Every test that ends otherwise, or that only one of the two runs has."""
    absent = Outcome(ABSENT)
    pairs = ((test, stock.get(test, absent), ours.get(test, absent)) for test in sorted({*stock, *ours}))
    return [Difference(test, before, after) for test, before, after in pairs if before.kind != after.kind]


def compare(found: Iterable[Difference], rows: Iterable[Row]) -> Comparison:
    """Put differences and the rows for this variant side by side."""
    explained, unexplained, met = [], [], set()
    rows = tuple(rows)
    for difference in found:
        row = next((row for row in rows if row.explains(difference)), None)
        if row is None:
            unexplained.append(difference)
        else:
            explained.append((row, difference))
            met.add(row)
    obsolete = (row for row in rows if row not in met and not row.sometimes)
    return Comparison(tuple(explained), tuple(unexplained), tuple(obsolete))


def not_compared(stock: Mapping[str, Outcome], table: Table) -> list[str]:
    """The tests and files that no run compares: skipped for a reason that is not in the table, or not even collected."""
    return [
        test
        for test, outcome in sorted(stock.items())
        if (outcome.kind == "error" and outcome.message.startswith("collection "))
        or (outcome.kind == "skipped" and _omission(outcome, table) is None)
    ]


def left_out(stock: Mapping[str, Outcome], table: Table) -> dict[str, list[str]]:
    """The tests that are skipped for a reason that is in the table: why -> which."""
    found: dict[str, list[str]] = {}
    for test, outcome in sorted(stock.items()):
        why = _omission(outcome, table) if outcome.kind == "skipped" else None
        if why is not None:
            found.setdefault(why, []).append(test)
    return found


def _omission(outcome: Outcome, table: Table) -> str | None:
    return next((why for pattern, why in table.omissions.items() if re.search(pattern, outcome.message)), None)


def read_table(path: Path, page: Path, variants: tuple[str, ...]) -> Table:
    """Read the table of one framework.

    Raises:
        ValueError: a reason lacks its explanation, or points to a heading that ``page`` does not have.
    """
    anchors = {_anchor(line) for line in page.read_text().splitlines() if line.startswith("#")}
    reasons, rows = {}, []
    table = yaml.safe_load(path.read_text()) or {}
    omissions = table.pop(OMISSIONS, {})
    for name, entry in table.items():
        if not entry.get("why") or entry.get("see") not in anchors:
            raise ValueError(f"{path.name}: {name!r} needs a `why`, and a `see` that is a heading of {page}")
        reasons[name] = (" ".join(entry["why"].split()), entry["see"])
        for test in entry["tests"]:
            row = {"test": test} if isinstance(test, str) else test
            rows.append(
                Row(
                    reason=name,
                    test=row["test"],
                    variants=tuple(row.get("variants", entry.get("variants", variants))),
                    outcome=row.get("outcome", "failed"),
                    sometimes=row.get("sometimes", False),
                    says=row.get("says", entry.get("says", "")),
                )
            )
    return Table(tuple(rows), reasons, omissions)


def _anchor(heading: str) -> str:
    # As mkdocs makes them.
    text = re.sub(r"[^\w\s-]", "", heading.lstrip("#").strip().lower())
    return re.sub(r"[-\s]+", "-", text)
