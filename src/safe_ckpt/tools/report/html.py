"""Elements and tables of a page. Text enters a page only through ``tag``, which escapes it. Pure functions."""

from __future__ import annotations

import html
from collections.abc import Sequence

from safe_ckpt.text import clean

_EMPTY = ("meta",)
_SHORT = 24


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float | None) -> Html:
    """One element. A child that is not ``Html`` is text and is escaped; so is every value of an attribute.

    Args:
        name: of the element.
        children: what it holds.
        attributes: their names with ``_`` for ``-``, a trailing one dropped (``class_``); None leaves one out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{_escaped(_plain(value))}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in _EMPTY and not children else f"{opening}{join(*children)}</{name}>")


def join(*children: str) -> Html:
    """Several, one after the other."""
    return Html("".join(child if isinstance(child, Html) else _escaped(child) for child in children))


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _escaped(text: str) -> str:
    # Quotes too: the same goes for attributes.
    return html.escape(clean(text, 4000), quote=True)


def table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table; a column without any content is left out.

    It becomes a list of cards on a narrow screen: that lays cells out as blocks, which would drop their roles, so these are
    explicit.
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
