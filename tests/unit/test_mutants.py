"""``make mutants``: a mutant that a test can notice dies, one that nobody can notice survives, and each is one small change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.patience import scaled
from mutants.change import changes

TESTS = Path(__file__).parents[1]
SMALL = '''\
def half(number, log=None):
    """Half of it."""
    if log is not None:
        log.append(number)
    return number // 2


def never():
    return 1
'''
TINY = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    ".gitignore": ".pytest_cache/\n",
    "src/safe_ckpt/__init__.py": "",
    "src/safe_ckpt/tiny/__init__.py": "",
    "src/safe_ckpt/tiny/small.py": SMALL,
    "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')\n",
    "tests/unit/test_small.py": (
        "from safe_ckpt.tiny.small import half\n\n\n"
        "def test_half():\n    assert half(9) == 4\n\n\n"
        "def test_nothing():\n    assert True\n"
    ),
}


def tried(tree, files):
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True, timeout=60)
    program = [sys.executable, TESTS / "programs/unit/tries_mutants.py", tree]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=scaled(60), check=False)


@pytest.mark.slow
def test_a_mutant_dies_where_a_test_notices_it_and_lives_where_none_can(tmp_path):
    """Each is run with the tests of its statement, or else its module; it tells which failed. The tree stays the same."""
    done = tried(tmp_path, TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(line, kind, tests, alive) for line, kind, tests, alive, _ in json.loads(done.stdout)]
    half = ["test_half"]
    assert said == [
        (3, "a branch less", half, True),  # nobody gives it a log
        (3, "another comparison", half, False),
        (4, "a statement less", half, True),
        (5, "another operator", half, False),
        (5, "nothing returned", half, False),
        (5, "one more", half, False),
        (9, "nothing returned", half, True),
        (9, "one more", half, True),
    ]
    assert {by for *_, alive, by in json.loads(done.stdout) if not alive} == {"tests/unit/test_small.py::test_half"}
    assert (tmp_path / "src/safe_ckpt/tiny/small.py").read_text() == SMALL


@pytest.mark.slow
@pytest.mark.thorough
def test_a_test_that_fails_without_a_mutant_is_named_and_notices_none(tmp_path):
    """Whatever a mutant did, it would fail. Where nothing can be run at all, nothing is tried."""
    name = "tests/unit/test_small.py"
    done = tried(tmp_path, {**TINY, name: TINY[name].replace("== 4", "== 5")})
    first, said = done.stdout.splitlines()
    assert first == f"left out, for they fail without a mutant: {name}::test_half"
    assert {(alive, *tests) for *_, tests, alive, _ in json.loads(said)} == {(True,)}
    done = tried(tmp_path, {**TINY, name: "import nothing_of_this_name"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "the tests do not run without a mutant" in done.stderr
    assert "nothing_of_this_name" in done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a < b\n", {"x = (a <= b)\n"}),
        ("f(1, key=c)\n", {"f(2, key=c)\n", "(f(1))\n", "pass\n"}),
        ("def f():\n    'told'\n    raise E\n", {"def f():\n    'told'\n    pass\n"}),
        ("x: Literal[1] = not y\n", {"x: Literal[1] = (y)\n"}),
        ("logger.info('%d', 1)\n", set()),
        ("if a:\n    b = c\nelif c:\n    b = d\n", {"if a:\n    b = c\npass\n"}),
        ("if a:\n    b = c\nelif c:\n    b = d\nelse:\n    b = a\n", set()),
    ],
)
def test_a_mutant_is_one_change_and_none_of_what_people_read(before, after):
    """Annotations, docstrings and messages stay; what Python would not take is no mutant."""
    assert {change.of(before) for change in changes(before)} - {before} == after
