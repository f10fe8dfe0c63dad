"""The shape of the tree: what a reader can hold in the head."""

import ast
import re
from pathlib import Path

import pytest

import safe_ckpt
from kit.lines import code_lines

TESTS = Path(__file__).parents[1]
SOURCES = Path(safe_ckpt.__file__).parent
MODULES, LINES, TEST_LINES = 13, 450, 600


def named(paths, below):
    return {path.relative_to(below).as_posix() for path in paths}


def imported_by(file):
    """The modules that a file imports, in functions as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def offenders(rule):
    if rule == "modules":
        folders = [folder for folder in SOURCES.rglob("*") if folder.is_dir()]
        return named([f for f in folders if len(set(f.glob("*.py")) - {f / "__init__.py"}) > MODULES], SOURCES)
    if rule == "lines of source":
        return named([file for file in SOURCES.rglob("*.py") if code_lines(file.read_text("utf-8")) > LINES], SOURCES)
    if rule == "lines of tests":
        return named(
            [file for file in TESTS.rglob("*.py") if len(file.read_text("utf-8").splitlines()) > TEST_LINES], TESTS
        )
    if rule == "rooms":
        rooms = {room.name for house in (SOURCES, SOURCES / "core", SOURCES / "tools") for room in house.iterdir()}
        tested = [room.name for wing in ("unit", "unit/tools") for room in (TESTS / wing).iterdir() if room.is_dir()]
        return set(tested) - rooms - {"__pycache__"}
    files = [f for f in TESTS.rglob("*.py") if any(n.rpartition(".")[2].startswith("test_") for n in imported_by(f))]
    return named(files, TESTS)


@pytest.mark.parametrize("rule", ["modules", "lines of source", "lines of tests", "rooms", "imports"])
def test_the_tree_keeps_its_shape(rule):
    """At most 13 modules a folder, 450 code lines each, 600 lines a test; tests lie as the rooms do, none imports another."""
    assert offenders(rule) == set()


def test_locks_can_be_taken_again_by_their_thread():
    """A signal's handler saves on the thread that it interrupts: a lock that this thread holds would never come free."""
    lines = [
        f"{file.relative_to(SOURCES)}:{number}"
        for file in SOURCES.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if "threading.Lock()" in line and "# not reentrant: " not in line
    ]
    assert lines == []


READERS = {"load", "loads", "Unpickler", "_Unpickler", "read_pickle"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OTHERS = {
    *("load_object", "gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"),
    *("recv_object_list", "send_object_list", "_tensor_to_object", "eval", "exec"),
}


def runs_what_it_reads(node):
    """Whether a node of the syntax unpickles: a call of a pickle module, of torch or numpy without a bar, or of an object
    collective of torch.distributed, which sends pickles.
    """
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).rpartition(".")[2] in {"Unpickler", "_Unpickler"} for base in node.bases)
    if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
        return any(alias.name in READERS for alias in node.names)
    if not isinstance(node, ast.Call):
        return False
    home, _, name = ast.unparse(node.func).rpartition(".")
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if home in {"torch", "serialization", "torch.serialization"} and name in {"load", "_load"}:
        # ``_load`` is given the unpickler itself.
        return given.get("weights_only") != "True" and "unpickler" not in [ast.unparse(arg) for arg in node.args]
    if home in {"np", "numpy"} and name == "load":
        return given.get("allow_pickle") != "False"
    return (home in PICKLES and name in READERS) or (name in OTHERS and home in {"", "dist", "torch.distributed"})


def test_nothing_is_unpickled_freely():
    """What reads a pickle admits data alone, or its line says after ``# unpickles:`` why it may, or why nothing can run."""
    found = []
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        found += [
            f"{file.relative_to(SOURCES)}:{node.lineno}"
            for node in ast.walk(ast.parse(text))
            if runs_what_it_reads(node) and "# unpickles: " not in lines[node.lineno - 1]
        ]
    assert found == []


MAKERS = re.compile(
    r"torch\.(empty|empty_strided|zeros|ones|tensor|as_tensor|full|arange|eye|scalar_tensor|rand|randn)"
)
REPEATS_TORCH = "data/order.py"  # and draws where torch's own loader and samplers draw


def test_each_tensor_of_our_own_says_on_which_device_it_is():
    """A user may have called ``torch.set_default_device``: what a file is read into would lie on that device."""
    found = [
        f"{file.relative_to(SOURCES)}:{node.lineno}"
        for file in SOURCES.rglob("*.py")
        if file.relative_to(SOURCES).as_posix() != REPEATS_TORCH
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and MAKERS.fullmatch(ast.unparse(node.func))
        if "device" not in {word.arg for word in node.keywords}
    ]
    assert found == []


def test_one_module_asks_whether_bytes_are_values():
    """A tensor may have values that its memory does not have yet. ``file_plan`` alone asks, so that nobody forgets one kind."""
    asked = re.compile(r"\.(is_conj|is_neg|resolve_conj|resolve_neg)\(")
    found = [file for file in SOURCES.rglob("*.py") if asked.search(file.read_text(encoding="utf-8"))]
    assert [str(file.relative_to(SOURCES)) for file in found] == ["core/formats/file_plan.py"]


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("pickle.loads(data)", True),
        ("pickle.Unpickler(stream).load()", True),
        ("class A(pickle.Unpickler): pass", True),
        ("from pickle import loads", True),
        ("torch.load(file)", True),
        ("torch.load(file, weights_only=False)", True),
        ("torch.load(file, weights_only=given)", True),
        ("torch.load(file, weights_only=True)", False),
        ("dist.broadcast_object_list(parts)", True),
        ("np.load(file, allow_pickle=True)", True),
        ("pickle.dumps(state)", False),
        ("json.loads(text)", False),
    ],
)
def test_the_rule_of_pickles_finds_a_free_unpickling(line, runs):
    """The rule above is no rule if it finds nothing."""
    assert any(map(runs_what_it_reads, ast.walk(ast.parse(line)))) == runs


def test_no_source_looks_at_a_modification_time():
    """Nothing that saves, chooses or deletes reads mtimes, but to see that a file to be copied or shared is still what it was.

    doctor sees by them which of its folders are old, report and watch see by them that a record has grown, and audit that a
    save is being written, which is when it kills.
    """
    of_copies = {"core/storage/presence.py", "offload/consolidate.py"}
    looks_on = ("tools/doctor/", "ledger/event_log.py", "tools/report/", "tools/audit/")
    seen = {
        name
        for name, file in ((file.relative_to(SOURCES).as_posix(), file) for file in SOURCES.rglob("*.py"))
        if not name.startswith(looks_on) and re.search(r"\b(st_mtime|getmtime|mtime)", file.read_text(encoding="utf-8"))
    }
    assert seen == of_copies
