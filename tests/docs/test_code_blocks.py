"""What the README and the pages below docs/ show is what a reader gets."""

import importlib.metadata
import re
import shlex

import pytest
from blocks import ROOT, Block, blocks_of, commands_of, difference, install_lines, needs, pages
from packaging.requirements import Requirement
from page import Page
from running import run_page

from kit.kinds import marks_of_text

ALL = [block for page in pages() for block in blocks_of(page)]
RUN = [
    pytest.param(
        page,
        marks=[
            *(getattr(pytest.mark, name) for name in marks_of_text("".join(b.code for b in ran))),
            *([pytest.mark.slow] if any(b.title for b in ran) else []),  # it starts programs
        ],
    )
    for page in pages()
    if not needs(page) and (ran := [block for block in blocks_of(page) if not block.not_run])
]
# Page and beginning of every block that is not run; the reason stands above the block.
NOT_RUN = {
    ("README.md", "make demo   # trains on real data"),
    ("docs/simulator.md", "cd tests\npython -m sim "),
    ("docs/programs.md", "make programs"),
    ("docs/reference/configuration.md", "python train.py fit "),
    ("docs/object-stores.md", '{\n  "Version"'),
    ("docs/object-stores.md", "from safe_ckpt import CheckpointConfig"),
    ("docs/cli.md", "safe-ckpt list s3://bucket/run"),
    ("docs/follow.md", "safe-ckpt follow runs/exp"),
    # tests/schedulers run these.
    ("docs/clusters.md", "#!/bin/bash\n#SBATCH"),
    ("docs/clusters.md", "$ sbatch job.sbatch python train.py"),
    ("docs/clusters.md", "$ sbatch job.sbatch python train_lightning.py"),
    ("docs/clusters.md", "#!/bin/bash\n# The same on every host"),
    ("docs/clusters.md", "$ bash host.sh"),
    ("docs/clusters.md", "apiVersion: batch/v1"),
    ("docs/clusters.md", "$ kubectl apply"),
}


def block(code, language="python", **more):
    return Block(page="page.md", line=1, language=language, title="", code=code, **more)


@pytest.mark.parametrize("page", RUN)
def test_every_block_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path):
    """Pasted in order into an empty folder, the blocks of a page work, and their output is the output shown."""
    done = run_page(ROOT / page, tmp_path, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_block_that_is_not_run_is_listed_here():
    """No block drops out of the tests unnoticed."""
    found = [(b.page, b.code) for b in ALL if b.not_run]
    assert len(found) == len(NOT_RUN)
    assert [(page, code) for page, code in found if not any(page == p and code.startswith(c) for p, c in NOT_RUN)] == []


def test_every_file_that_a_page_shows_is_run_on_it():
    """A quick start that nobody starts proves nothing."""
    for page in pages():
        found = blocks_of(page)
        ran = "".join(b.code for b in found if not b.title)
        assert [b.where for b in found if b.title and b.title not in ran] == []


CHECKOUT = "/path/to/checkout"


def test_every_extra_of_an_install_line_exists():
    """What a page installs is there: each extra exists, the rest pip understands, and this project comes from a checkout.

    No package index has it yet.
    """
    extras = set(importlib.metadata.metadata("safe-ckpt").get_all("Provides-Extra"))
    named = 0
    for shown in ALL:
        for line in install_lines(shown):
            words = [word for word in shlex.split(line) if not word.startswith("-") and word != "."]
            for word in words:
                if word.startswith(CHECKOUT):
                    named += 1
                    assert Requirement(f"it{word.removeprefix(CHECKOUT)}").extras <= extras, shown.where
                else:
                    assert Requirement(word).name != "safe-ckpt", shown.where
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
    assert [page for page, text in texts.items() if "safe-ckpt[" in text] == []
    assert named >= len(("lightning", "accelerate", "transformers", "deepspeed", "torch"))


def test_every_test_that_is_named_exists():
    """A promise whose proof is gone is no promise: a test that a page names is there, and so is each file of tests."""
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    there = {name for text in files.values() for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    named, missing = set(), []
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= set(re.findall(r"`(test_\w+)`", text))
        missing += [file for file in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (ROOT / file).exists()]
    assert len(named) > 120
    assert sorted(named - there) + missing == []


def test_every_promise_names_its_tests():
    """Each row of the guarantees, and of the README's promises, ends with names of tests: a file or a folder is no proof."""
    for page, least in (("README.md", 5), ("docs/guarantees.md", 60)):
        text = (ROOT / page).read_text(encoding="utf-8")
        tables = re.findall(r"^\| Promise .*Test \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
        rows = "".join(tables).splitlines()
        assert len(rows) >= least, page
        assert [
            row for row in rows if not re.fullmatch(r"`test_\w+`(?:, `test_\w+`)*", row.split(" | ")[-1][:-2])
        ] == []


def test_links_out_of_the_site_lead_somewhere():
    """Relative links of the files that mkdocs does not see, and paths of the repository that pages name in code."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), f"{name}: {link}"
    for page in pages():
        for path in re.findall(r"`((?:examples|benchmarks|docs)/[\w/.]+\.\w+)`", (ROOT / page).read_text("utf-8")):
            assert (ROOT / path).exists(), f"{page}: {path}"


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("```python\nprint(1)\n```\n```text\n1\n```", ""),
        ("```python\nprint(1)\n```\n```text\n2\n```", "page.md:4: shown:"),
        ("```python\n1 / 0\n```", "ZeroDivisionError"),
        ("```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```", "AssertionError"),
        ("```text\nnothing printed this\n```", "no block before it"),
        ("```sh\nfalse\ntrue\n```", "exits with 1, not 0"),
        ("```console\n$ echo a; exit 3   # exits with 3\na\n```", ""),
        ("```console\n$ echo a\nb\n```", "printed:"),
        ("```console\n$ true   # exits with 1\n```", "exits with 0, not 1"),
        ("```yaml\nretention: {keep_lst: 1}\n```", "does not parse"),
        ("```diff\n-a = (1\n+a = 1\n b = 2\n```", "no Python"),
        ("```diff\n-a = 1\n+a = 2\n b = a\n```", ""),
        ('```python title="a.py"\nprint(5)\n```\n```console\n$ python a.py\n5\n```', ""),
        ("<!-- not run: it would fail -->\n```python\n1 / 0\n```", ""),
        ("<!-- hidden\n```python\nx = 1\n```\n-->\n```python\nprint(x)\n```\n```text\n1\n```", ""),
    ],
)
def test_a_page_that_lies_is_found(code, wrong, tmp_path, monkeypatch):
    """The runner itself: what does not run, or prints something else, fails, and says where."""
    monkeypatch.chdir(tmp_path)
    page = Page(show=False)
    for part in blocks_of("page.md", code):
        page.run(part)
    assert bool(page.problems) is bool(wrong)
    assert wrong in "".join(page.problems)


def test_every_fence_says_its_language():
    """A block that nobody could check is an error, not a gap."""
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks_of("page.md", "```\nwhat is this\n```")
    with pytest.raises(ValueError, match=r"page\.md:2"):
        blocks_of("page.md", "\n```python\nno end")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n  b   c", "a\nb c\n\n", True),
        ("a …\nc", "a 12 s\nc", True),
        ("a …\nc", "b 12 s\nc", False),
        ("…\nlast", "1\n2\nlast", True),
        ("…\nlast", "last\nmore", False),
        ("first\n…", "first", True),
        ("100%", "10%\r100%", True),
        ("", "something", False),
    ],
)
def test_ellipses_and_blanks_in_an_output_match_any_text(shown, printed, same):
    """``…`` is any text in a line, or any lines; blanks count as one; everything else is literal."""
    assert (difference(shown, printed) == "") is same


def test_console_blocks_are_split_into_commands_outputs_and_statuses():
    """Lines after ``$`` are commands, a backslash goes on, ``# exits with N`` is the status."""
    found = commands_of(block("$ a \\\n  b\nout\n$ c   # exits with 2\n", "console"))
    assert [(c.command.split(), c.status, c.shown) for c in found] == [
        (["a", "\\", "b"], 0, "out"),
        (["c", "#", "exits", "with", "2"], 2, ""),
    ]
