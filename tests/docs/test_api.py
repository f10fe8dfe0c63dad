"""The API pages and the examples in docstrings: nothing public is missing, and every example runs."""

import ast
import builtins

import griffe
import pytest
from blocks import blocks_of
from docstrings import package_of, problems_of
from public import classes_of, example_of, exported, on_pages, package, public, with_examples
from running import run_examples

EXAMPLES = with_examples()
# In one process: what does not disturb each other. Those that are not installed here run in tests of their own.
TOGETHER = {
    "safe_ckpt": ("", "adapters"),
    "lightning": ("lightning",),
    "hugging face": ("accelerate", "transformers", "peft"),
}
ELSEWHERE = ("deepspeed", "torchtitan", "ray")  # test_deepspeed_page.py, test_torchtitan_page.py, test_ray_page.py
LONGEST = 8
MEETING = (
    "checkpointer.Checkpointer.save",
    "checkpointer.Checkpointer.resume",
    "reading.load",
    "reading.newest",
    "publishing.publishing",
    "dcp.saving.save",
    "dcp.loading.load",
)
# The base of those that say which ranks did not meet; what an import raises; what a resume passes over and says in the log.
NOT_LISTED = {"CoordinationError", "UnsupportedVersionError", "IncompleteCheckpointError"}


def test_everything_public_is_on_a_page():
    """What an ``__all__`` names, and every event and error, is on a page of the API; and nothing else is."""
    shown = set(on_pages())
    wanted = {one.path for one in public().values()}
    assert wanted - shown == set()
    assert shown - wanted == set()


def test_every_package_that_exports_is_found():
    """The comparison sees all packages, those that are not installed here too."""
    assert {name.split(".")[1] for name in exported() if name.count(".") > 1} >= {
        *ELSEWHERE,
        "lightning",
        "dcp",
        "peft",
    }
    assert {"safe_ckpt.publishing", "safe_ckpt.Checkpointer"} <= set(exported())


def test_everything_that_is_exported_has_a_short_example():
    """Of every class and function of an ``__all__`` the docstring shows how it is used, in one to eight lines."""
    assert [name for name, one in exported().items() if not example_of(one)] == []
    for name, text in EXAMPLES.items():
        lines = [
            line for block in blocks_of(name, text) if block.language == "python" for line in block.code.split("\n")
        ]
        assert 0 < len([line for line in lines if line]) <= LONGEST, name


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=[] if "" in TOGETHER[name] else [pytest.mark.framework]) for name in TOGETHER]
)
def test_every_example_runs_and_prints_what_it_shows(group, tmp_path):
    """An example, with what a program has around it, works in an empty folder."""
    names = [name for name in EXAMPLES if package_of(name) in TOGETHER[group]]
    done = run_examples(names, tmp_path)
    assert names
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_is_run_somewhere():
    """No example drops out; those that run in another environment are valid Python at least."""
    assert {package_of(name) for name in EXAMPLES} == {
        *(one for group in TOGETHER.values() for one in group),
        *ELSEWHERE,
    }
    for name, text in EXAMPLES.items():
        for block in blocks_of(name, text):
            assert (block.not_run, block.title) == ("", ""), name
            if block.language == "python":
                ast.parse(block.code)


def test_an_example_that_lies_is_found(tmp_path, monkeypatch):
    """The runner itself: what raises, or prints something else, is a problem."""
    monkeypatch.chdir(tmp_path)
    assert "NameError" in problems_of("safe_ckpt.load", "```python\nsafe_ckpt.newest(nothing)\n```")[0]


def raises_of(one):
    docstring = one.docstring.parse("google") if one.docstring else []
    return {str(row.annotation) for section in docstring if section.kind.value == "raises" for row in section.value}


def test_every_error_in_a_raises_section_exists():
    """What a docstring of the API says that it raises is an error of ours or a builtin."""
    known = {path.rpartition(".")[2] for path in classes_of("safe_ckpt.errors")} | set(vars(builtins))
    for name, one in public().items():
        for part in (one, *(m for m in one.members.values() if not m.is_alias)):
            assert raises_of(part) <= known, f"{name}: {part.name}"


@pytest.mark.parametrize("call", MEETING)
def test_a_call_in_which_ranks_meet_lists_what_a_meeting_raises(call):
    """The docstrings of ``save``, ``resume`` and ``load`` say what happens when the ranks do not meet."""
    assert raises_of(package()[call]) >= {
        "DesyncError",
        "RendezvousTimeout",
        "PeerLostError",
        "TamperedError",
        "UnexpectedError",
        "ForkedError",
    }


def test_every_error_of_the_tree_is_listed_somewhere():
    """Each error that can reach a user is in the ``Raises:`` of something public, but for bases and what only a tool raises."""
    listed = set()
    for one in public().values():
        listed |= raises_of(one).union(*(raises_of(m) for m in one.members.values() if not m.is_alias))
    leaves = {path.rpartition(".")[2] for path in classes_of("safe_ckpt.errors")}
    assert leaves - listed == NOT_LISTED


def test_the_tree_of_errors_is_that_of_the_classes():
    """The tree on the page of the errors has each class once, below its base, with the builtin that it also is."""
    docstring = package()["errors"].docstring
    assert docstring is not None
    drawn, path = [], []
    for line in docstring.value.split("\n"):
        name = line.lstrip("│├└─ ").partition(" ")[0]
        if name.partition("(")[0].isidentifier() and ("── " in line or name == "SafeCheckpointError"):
            depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
            path[depth:] = [name.partition("(")[0]]
            drawn.append((path[-1], path[-2] if depth else "Exception", name.partition("(")[2].rstrip(")")))
    assert sorted(drawn) == sorted(_family(one) for one in classes_of("safe_ckpt.errors").values())


def _family(one: griffe.Object) -> tuple[str, str, str]:
    bases = [str(base) for base in one.bases]
    return one.name, bases[0], bases[1] if len(bases) > 1 else ""
