"""Code blocks of a Markdown page: what they are, and whether what was printed is what the page shows.

The marks are explained in CONTRIBUTING.md. Pure: nothing here runs anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("python", "yaml", "sh", "console", "text", "diff")
ANYTHING = "…"
_INSTALL = "pip install "
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})(?P<language>\w*)(?P<info>[^`]*)$")
_TITLE = re.compile(r'\btitle="([^"]+)"')
_MARK = re.compile(r"^\s*<!-- not run: ?(.+?) -->\s*$")
_NEEDS = re.compile(r"^<!-- needs: (\w+) -->\s*$", re.MULTILINE)
_EXITS = re.compile(r"# exits with (\d+)\s*$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block.

    Attributes:
        page: relative to the repository.
        line: of the opening fence, counted from 1.
        language: of ``LANGUAGES``.
        title: the file that it is written to; "" for none.
        code: what is between the fences, without their indentation.
        not_run: why it is not run; "" when it is.
    """

    page: str
    line: int
    language: str
    title: str
    code: str
    not_run: str = ""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a ``console`` block: what to run, the status it ends with, and what it prints."""

    command: str
    status: int
    shown: str


def pages() -> list[str]:
    """Every page that users read, relative to the repository."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def needs(page: str) -> str:
    """What must be installed for a page to run, or "" for nothing besides what the tests need."""
    found = _NEEDS.search((ROOT / page).read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def blocks_of(page: str | Path, text: str | None = None) -> list[Block]:
    """The blocks of a page in order, those in HTML comments included.

    Raises:
        ValueError: a fence is not closed, or says no language.
    """
    file = ROOT / page
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    lines = (file.read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        closing = re.compile(rf"^\s*{opened['fence']}\s*$")
        end = next((n for n in range(at + 1, len(lines)) if closing.match(lines[n])), None)
        if end is None or opened["language"] not in LANGUAGES:
            raise ValueError(f"{name}:{at + 1}: a fence that is not closed or names none of {', '.join(LANGUAGES)}")
        mark = _MARK.match(lines[at - 1]) if at else None
        title = _TITLE.search(opened["info"])
        found.append(
            Block(
                page=name,
                line=at + 1,
                language=opened["language"],
                title=title.group(1) if title else "",
                code="".join(line.removeprefix(opened["indent"]) + "\n" for line in lines[at + 1 : end]),
                not_run=mark.group(1) if mark else "",
            )
        )
        at = end + 1
    return found


def is_install(line: str) -> bool:
    """Whether a line of a ``sh`` block installs something: such a line is checked, not run."""
    return line.startswith(_INSTALL)


def install_lines(block: Block) -> list[str]:
    """What a ``sh`` block has pip install, line by line."""
    lines = block.code.splitlines() if block.language == "sh" else []
    return [line[len(_INSTALL) :].split("#")[0] for line in lines if is_install(line)]


def commands_of(block: Block) -> list[Command]:
    """The commands of a ``console`` block: lines after ``$``; every other line is output.

    Raises:
        ValueError: it begins with output.
    """
    found: list[tuple[str, list[str]]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif not found:
            raise ValueError(f'{block.where}: a console block begins with "$ "')
        else:
            found[-1][1].append(line)
    return [
        Command(command=command, status=int(status.group(1)) if (status := _EXITS.search(command)) else 0, shown=shown)
        for command, shown in ((command, "\n".join(lines)) for command, lines in found)
    ]


def difference(shown: str, printed: str) -> str:
    """Why ``printed`` is not what the page shows; "" when it is.

    ``…`` stands for any text within a line, a line of nothing else for any number of lines. Blanks count as one.
    """
    wanted, got = _lines(shown), _lines(printed)
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line == ANYTHING else ".*?".join(map(re.escape, line.split(ANYTHING))) + r"\n"
        for line in wanted
    )
    if re.fullmatch(pattern, "".join(line + "\n" for line in got)):
        return ""
    return "shown:\n  " + "\n  ".join(wanted) + "\nprinted:\n  " + "\n  ".join(got)


def _lines(text: str) -> list[str]:
    # What stands before a carriage return was overwritten on the screen.
    lines = [re.sub(r"\s+", " ", line.rstrip("\r").rsplit("\r", 1)[-1]).strip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines
