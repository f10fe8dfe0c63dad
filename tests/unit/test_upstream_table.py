"""The comparison of the frameworks' own tests with their parts and with ours: ``tests/upstream``."""

import subprocess
import sys
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[1] / "upstream"
PAGE = UPSTREAM.parents[1] / "docs" / "migrating.md"
sys.path.insert(0, str(UPSTREAM))
from outcomes import (  # noqa: E402
    Outcome,
    Row,
    compare,
    differences,
    left_out,
    not_compared,
    read_junit,
    read_table,
)
from saves import counted  # noqa: E402
from suites import SUITES  # noqa: E402

PASSED, FAILED = Outcome("passed"), Outcome("failed", "because")


def row(test, outcome="failed", sometimes=False, says=""):
    return Row(reason="a", test=test, variants=("sync",), outcome=outcome, sometimes=sometimes, says=says)


def test_unexplained_outcomes_and_obsolete_rows_are_told_apart():
    """A row explains the outcome that it names of the tests that it names, parameters and all; the rest is unexplained. A row
    without a difference is obsolete unless it says that it may be."""
    stock = {"f.py::a[1]": PASSED, "f.py::a[2]": PASSED, "f.py::ab": PASSED, "f.py::c": PASSED, "f.py::d": FAILED}
    ours = {"f.py::a[1]": FAILED, "f.py::a[2]": FAILED, "f.py::ab": FAILED, "f.py::d": FAILED, "f.py::e": PASSED}
    found = differences(stock, ours)
    assert [(each.test, each.stock.kind, each.ours.kind) for each in found] == [
        ("f.py::a[1]", "passed", "failed"),
        ("f.py::a[2]", "passed", "failed"),
        ("f.py::ab", "passed", "failed"),
        ("f.py::c", "passed", "no result"),
        ("f.py::e", "no result", "passed"),
    ]
    all_of_a, wrong_outcome = row("f.py::a", says="cause"), row("f.py::ab", outcome="error")
    wrong_words = row("f.py::ab", says="something else")
    fixed, flighty, any_c = row("f.py::d"), row("f.py::g", sometimes=True), row("*::c", outcome="no result")
    told = compare(found, [all_of_a, wrong_outcome, wrong_words, fixed, flighty, any_c])
    assert [(each.test, by) for by, each in told.explained] == [
        ("f.py::a[1]", all_of_a),
        ("f.py::a[2]", all_of_a),
        ("f.py::c", any_c),
    ]
    assert [each.test for each in told.unexplained] == ["f.py::ab", "f.py::e"]
    assert list(told.obsolete) == [wrong_outcome, wrong_words, fixed]


def test_tests_that_were_not_compared_are_failures(tmp_path):
    """A file that cannot be collected, and a test that is skipped for a reason that the table does not have, are named."""
    table = tmp_path / "expected_any.yaml"
    table.write_text("not compared:\n  requires (GPU|TPU): there is none\n")
    known = read_table(table, PAGE, ("sync",))
    stock = {
        "f.py::a": PASSED,
        "f.py::b": Outcome("skipped", "test requires GPU"),
        "f.py::c": Outcome("skipped", "test requires sentencepiece"),
        "f.py::d": Outcome("xfailed", ""),
        "f.py::e": Outcome("error", "OSError"),
        "g.py": Outcome("error", "collection failure"),
    }
    assert not_compared(stock, known) == ["f.py::c", "g.py"]
    assert left_out(stock, known) == {"there is none": ["f.py::b"]}


def test_a_file_that_cannot_be_collected_is_in_the_results(tmp_path):
    """As pytest writes it: that is how it is found."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text("import there_is_no_such_package\n")
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "tests"]
    command += [f"--junitxml={tmp_path / 'j.xml'}", "-o", "junit_family=xunit1"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    found = read_junit(tmp_path / "j.xml", "tests")
    assert not_compared(found, read_table(UPSTREAM / "expected_lightning.yaml", PAGE, ("sync",))) == list(found)
    assert len(found) == 1


def test_an_upstream_run_without_a_save_of_ours_counts_none(tmp_path):
    """A run in which nothing went through ours has none."""
    assert counted(tmp_path / "sync.saves") == 0
    (tmp_path / "sync.saves").write_bytes(b"...")
    assert counted(tmp_path / "sync.saves") == 3


@pytest.mark.parametrize("framework", sorted(SUITES))
def test_every_row_is_explained_in_the_documentation(framework):
    """Each reason says why and points to a heading of docs/migrating.md; each row belongs to runs that there are."""
    table = read_table(UPSTREAM / f"expected_{framework}.yaml", PAGE, SUITES[framework].variants)
    assert {row.reason for row in table.rows} == set(table.reasons)
    for each in table.rows:
        assert set(each.variants) <= set(SUITES[framework].variants)


def test_a_reason_without_an_explanation_is_refused(tmp_path):
    """A table whose reason leads nowhere cannot be used."""
    table = tmp_path / "expected_any.yaml"
    table.write_text("odd:\n  why: it is odd\n  see: no-such-heading\n  tests: [f.py::a]\n")
    with pytest.raises(ValueError, match="'odd' needs"):
        read_table(table, PAGE, ("sync",))


def test_a_run_is_read_as_pytest_wrote_it(junit):
    """Classes, parameters, failures of set-up and tear-down, skips and expected failures arrive under the test's name."""
    found = read_junit(junit, "tests")
    assert {name: outcome.kind for name, outcome in found.items()} == {
        "inner/test_it.py::test_param[1-a]": "passed",
        "inner/test_it.py::test_param[2-b]": "failed",
        "inner/test_it.py::TestOf::test_skip": "skipped",
        "inner/test_it.py::TestOf::test_x": "xfailed",
        "inner/test_it.py::test_before": "error",
        "inner/test_it.py::test_after": "error",
    }
    assert "2 == 1" in found["inner/test_it.py::test_param[2-b]"].message


@pytest.fixture
def junit(tmp_path):
    folder = tmp_path / "tests" / "inner"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize(('n', 'word'), [(1, 'a'), (2, 'b')])\n"
        "def test_param(n, word): assert n == 1\n"
        "class TestOf:\n"
        "    @pytest.mark.skip\n"
        "    def test_skip(self): pass\n"
        "    @pytest.mark.xfail\n"
        "    def test_x(self): assert False\n"
        "@pytest.fixture\n"
        "def bad(): raise OSError\n"
        "def test_before(bad): pass\n"
        "@pytest.fixture\n"
        "def late():\n"
        "    yield\n"
        "    raise OSError\n"
        "def test_after(late): pass\n"
    )
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "tests"]
    command += [f"--junitxml={junit}", "-o", "junit_family=xunit1"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    return junit
