"""Tables that become lists of cards on a narrow screen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from safe_ckpt.report.html import Html, tag

_SHORT = 24


def table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table; a column without any content is left out.

    The roles are said aloud because a narrow screen lays the cells out as blocks, which would take them away.
    """
    used = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    headings = [tag("th", columns[number], scope="col", role="columnheader") for number in used]
    body = [tag("tr", *(_cell(columns[number], row[number]) for number in used), role="row") for row in rows]
    head = tag("thead", tag("tr", *headings, role="row"), role="rowgroup")
    whole = tag("table", head, tag("tbody", *body, role="rowgroup"), role="table", aria_label=label)
    return tag("div", whole, class_="scroll")


def _cell(column: str, text: str) -> Html:
    short = "short" if len(text) <= _SHORT else None
    return tag("td", tag("span", text), role="cell", data_label=column, class_=short)
