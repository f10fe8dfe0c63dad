"""``python tests/docs/drawing.py``: draws ``docs/drawings/*.txt``, which tests compare with what happens, as SVG beside them.

A line says which thread does what; the lines are in their order. Each thread has a column.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
COLUMNS = {
    "caller": "the thread that trains",
    "save": "the background",
    "write": "the writer",
    "hooks": "the hooks' thread",
}
WIDTH, ROW, LETTER, LEFT = 280, 22, 6.7, 8
STYLE = (
    "text{font:11px monospace;fill:#222}.head{font-weight:bold}.line{stroke:#bbb}.box{fill:#eef3fa;stroke:#7a93b8}"
    ".disk{fill:#fdf3e1;stroke:#c99b4a}.next{stroke:#888;fill:none}svg{background:#fff}"
)
ON_DISK = ("mkdir", "open", "rename", "rmdir", "remove", "link", "read")


def shown(what):
    """A line's text, short enough for its column."""
    what = what.removeprefix("extensions: ").replace(".safe_ckpt/", "").replace("step-0000000", "step-")
    return what if len(what) * LETTER < WIDTH - 2 * LEFT else what[: int((WIDTH - 2 * LEFT) / LETTER) - 1] + "…"


def drawn(text):
    """The SVG of such lines."""
    rows = [line.split(": ", 1) for line in text.splitlines()]
    names = [name for name in COLUMNS if any(thread == name for thread, _ in rows)]
    height, width = (len(rows) + 2) * ROW, len(names) * WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><style>{STYLE}</style>'
    ]
    for number, name in enumerate(names):
        x = number * WIDTH
        parts.append(f'<text class="head" x="{x + LEFT}" y="15">{COLUMNS[name]}</text>')
        parts.append(f'<line class="line" x1="{x + 2}" x2="{x + 2}" y1="{ROW}" y2="{height}"/>')
    before = None
    for row, (thread, what) in enumerate(rows, start=1):
        x, y = names.index(thread) * WIDTH + 2, row * ROW + 4
        kind = "disk" if what.split()[0] in ON_DISK else "box"
        if before not in (None, thread):
            parts.append(f'<path class="next" d="M{names.index(before) * WIDTH + 20} {y - 4} H{x + 20} V{y}"/>')
        wide = len(shown(what)) * LETTER + 2 * LEFT
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{wide:.0f}" height="18" rx="3"/>')
        parts.append(f'<text x="{x + LEFT}" y="{y + 13}"><title>{escape(what)}</title>{escape(shown(what))}</text>')
        before = thread
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.txt")):
        source.with_suffix(".svg").write_text(drawn(source.read_text(encoding="utf-8")), encoding="utf-8")
