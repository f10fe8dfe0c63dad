"""What ``make test`` leaves out, that it starts nothing of it, and that continuous integration runs it all."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit import disks, hosts, kinds, object_servers, ranks, slurm
from sim.running import share_of_saves_that_succeed, sim
from support import run_program

ROOT = Path(__file__).parents[2]


def recipe(target):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)[1]


def uses_a_server(folder):
    with object_servers.start("moto", folder) as server:
        return server


def helps(folder):
    return [uses_a_server(folder) for _ in range(2)]


def uses_a_disk(folder):
    with disks.small_disk(folder, "1m"):
        pass


def imports_what_makes_hosts(folder):
    from kit.hosts import Hosts

    with Hosts(2, folder):
        pass


def spawns(folder):
    ranks.spawn_ranks(print, 2)


def trains():
    import lightning.pytorch

    return lightning.pytorch


def mounts(folder):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)


def launches():
    subprocess.run(["python", "-m", "torch.distributed.run"], check=True)


def starts_a_program_with_a_server():
    run_program("starts_an_object_server", "moto")


def waits_only():
    """It names spawn_ranks, mount and torchrun, and uses a part of kit.hosts that makes none."""
    return hosts.wait_until(lambda: True)


@pytest.mark.parametrize(
    ("function", "marks"),
    [
        (uses_a_server, {"server"}),
        (helps, {"server"}),
        (uses_a_disk, {"hosts"}),
        (imports_what_makes_hosts, {"hosts"}),
        (spawns, {"ranks"}),
        (trains, {"framework"}),
        (mounts, {"hosts"}),
        (launches, {"ranks"}),
        (starts_a_program_with_a_server, {"server"}),
        (waits_only, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mark_is_found_in_the_code(function, marks):
    """Through helpers, imports within functions and words of commands; a docstring counts for nothing."""
    assert kinds.marks_of(function) == marks


def test_a_mark_is_found_in_a_fixture(request):
    """The fixtures of conftest.py that lead to a server give their tests its mark."""
    definitions = {
        name: request._fixturemanager.getfixturedefs(name, request.node) for name in ("bucket", "object_server")
    }
    item = SimpleNamespace(
        path=Path(__file__),
        function=waits_only,
        fixturenames=list(definitions),
        _fixtureinfo=SimpleNamespace(name2fixturedefs=definitions),
        get_closest_marker=lambda _: None,
    )
    assert kinds.marks_of_item(item) == {"server"}
    item.path = kinds.TESTS / "multirank/test_promises.py"
    assert kinds.marks_of_item(item) == {"server", "ranks"}


def test_marks_do_not_depend_on_what_else_is_collected():
    """A fixture that imports a part of the kit itself has its mark, where no other test has imported that part, too."""
    done = run_program("marks_a_fixture", fresh=True)
    assert (done.stdout.splitlines(), done.stderr) == (["imported: False", "marks: ['server']"], "")


STARTS = [
    (lambda folder: object_servers.start("moto", folder), "server"),
    (lambda folder: hosts.Hosts(1, folder).__enter__(), "hosts"),
    (lambda folder: slurm.one_node().__enter__(), "hosts"),
    (lambda folder: disks.small_disk(folder, "1m").__enter__(), "hosts"),
    (lambda folder: ranks.spawn_ranks(print, 1), "ranks"),
    (lambda folder: ranks.spawn_over(hosts.Hosts(1, folder), 1, print), "ranks"),
]


def test_a_quick_test_that_starts_something_fails(tmp_path):
    """Each part of the kit that starts a server, hosts or ranks refuses to within a quick test, before it starts anything."""
    assert len(STARTS) == len(kinds.STARTERS)
    for start, kind in STARTS:
        with kinds.starts_nothing(), pytest.raises(kinds.StartedError, match=f"starts: {kind}"):
            start(tmp_path)


def test_this_test_may_start_nothing_if_it_is_quick(request):
    """The guard is there while a quick test runs, and only then."""
    if request.config.getoption("--quick"):
        with pytest.raises(kinds.StartedError):
            kinds.starting("server")
    else:
        kinds.starting("server")


def test_every_mark_is_one_that_pytest_knows(pytestconfig):
    """Those that are found, and those that are left out."""
    known = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    found = {*kinds.STARTERS.values(), *kinds._WORDS.values(), *kinds._ON_PAGES, *kinds._FOLDERS.values()}
    assert found <= set(kinds.NOT_QUICK) <= known


def test_what_is_marked_quick_is_run_by_make_test():
    """The files with such tests lie in whole folders that its command runs, or are those that it finds."""
    marked = {path for path in kinds.TESTS.rglob("test_*.py") if "pytest.mark.quick" in path.read_text("utf-8")}
    marked = {path for path in marked if path.parent.name in ("adapters", "multirank", "faults", "schedulers")}
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, check=True, capture_output=True, text=True)
    named = {ROOT / name for name in re.findall(r"tests/(?:adapters|multirank)/\w+\.py", done.stdout)}
    assert named - {kinds.TESTS / kinds.PROMISES} == marked != set()


@pytest.mark.parametrize(
    ("marks", "quick"),
    [
        ((), True),
        (("framework",), False),
        (("framework", "quick"), True),
        (("ranks", "quick"), True),
        (("framework", "slow", "quick"), False),
        (("server", "quick"), False),
    ],
)
def test_what_is_quick_by_its_marks(marks, quick):
    """The mark makes a test of a framework's folder quick, and none that starts a server or is slow."""
    item = SimpleNamespace(path=Path(__file__), get_closest_marker=lambda name: name in marks)
    assert kinds.is_quick(item) is quick


def test_continuous_integration_runs_all_tests():
    """``.ci/run`` calls the README's command for everything, which has all parts and leaves nothing out."""
    command = "make test-full"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n{command} ||" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    parts = ("test-short", "test-schedulers", "test-long")
    assert [part for part in parts if part not in recipe("test-full")] == []
    assert "--quick" in recipe("test")
    assert not any("--quick" in recipe(part) for part in ("test-full", *parts))
    ran = set(re.findall(r"tests/(\w+)", "".join(map(recipe, parts))))
    folders = {path.parent.relative_to(kinds.TESTS).parts[0] for path in kinds.TESTS.rglob("test_*.py")}
    assert folders - ran == set()


def test_a_few_quick_histories_violate_no_rule():
    """Simulated histories that a quick run has time for, and with other seeds than those of tests/sim.

    Saves fail where a fault strikes, and no more of them: ranks that commit nothing at all would violate no rule either.
    """
    ended = sim("--first", 1_000_000, "--count", 40, "--processes", 2)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    assert share_of_saves_that_succeed(ended) > 0.9, ended.stdout[-1500:]
