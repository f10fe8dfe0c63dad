"""docs/cli.md names every command and every option of ``safe-ckpt``, and no other."""

import re

import pytest
from blocks import ROOT
from typer.main import get_command

from safe_ckpt.tools.cli.app import app

PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
WORDS = 1490


def commands(command=None, name=""):
    """The name of each command, those within another included -> its options, but for ``--help``."""
    command = command or get_command(app)
    inner = getattr(command, "commands", {})
    if not inner:
        return {name: {one for p in command.params if p.param_type_name == "option" for one in p.opts}}
    return {key: value for n, c in inner.items() for key, value in commands(c, f"{name} {n}".strip()).items()}


def options_on(page):
    """What the rows of a page's table of options say: command -> options."""
    found = {}
    for names, options in re.findall(r"^\| (`[a-z][^|]*`) \| (`-[^|]*) \|", page, re.MULTILINE):
        for name in re.findall(r"`([a-z -]+)`", names):
            found.setdefault(name, set()).update(OPTION.findall(options))
    return found


def test_the_page_has_every_command_and_no_other():
    """What ``safe-ckpt --help`` lists is in the table of commands, and nothing else is."""
    listed = re.findall(r"^\| \[`([a-z -]+?)(?: \[?[A-Z].*)?`\]", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(commands())


def test_the_page_has_every_option_of_every_command_and_no_other():
    """The table of options is what the parser takes, command by command."""
    assert options_on(PAGE) == {name: options for name, options in commands().items() if options}


def test_an_option_that_the_text_names_exists():
    """Also beyond the table: whatever looks like an option of ``safe-ckpt`` in the text is one."""
    known = set().union(*commands().values()) | {"--help"}
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert {one for code in re.findall(r"`([^`\n]+)`", prose) for one in OPTION.findall(code)} - known <= {"-"}


def test_the_page_of_the_commands_stays_short():
    """A reference that nobody reads to the end helps nobody."""
    assert len(PAGE.split()) <= WORDS


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("| `gc`, `config show` | `--json` | x |", {"gc": {"--json"}, "config show": {"--json"}}),
        ("| `report` | `-o FILE`, `--output FILE` | x |", {"report": {"-o", "--output"}}),
        ("| `1` | x |", {}),
    ],
)
def test_the_comparison_reads_what_a_row_of_the_page_says(row, found):
    """The comparison reads what a row says: one that reads nothing would compare nothing."""
    assert options_on(row) == found
