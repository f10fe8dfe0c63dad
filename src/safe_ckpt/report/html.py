"""Elements of a page. Text becomes part of one only through ``tag``, which escapes it: there is no other way in. Pure."""

from __future__ import annotations

import html

from safe_ckpt.text import clean

_EMPTY = frozenset({"meta"})


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
