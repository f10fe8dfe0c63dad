"""docs/doors.md: what its tables say of calls, compared with the signatures. Read from the source: no framework is needed."""

import ast
import re

import griffe
import pytest
from blocks import ROOT
from public import package

PAGE = (ROOT / "docs/doors.md").read_text(encoding="utf-8")
DOORS = {
    "Checkpointer": ["checkpointer.Checkpointer", "core.saving.handle.SaveHandle"],
    "publishing": ["publishing.publishing", "reading"],
    "dcp": ["dcp.saving", "dcp.loading", "dcp.saver"],
    "Lightning": ["lightning.callback.SafeCheckpointCallback", "adapters.handle.AttachedHandle"],
    "Accelerate": ["accelerate.registration", "accelerate.handle.Handle", "adapters.handle.AttachedHandle"],
    "Transformers": ["transformers.mixin.SafeCheckpointMixin"],
    "DeepSpeed": ["deepspeed.handle", "deepspeed.handle.Handle", "adapters.handle.AttachedHandle"],
    "torchtitan": ["torchtitan.manager.SafeCheckpointManager"],
}
# Names that a framework has, or torch: nothing of ours is asked for them.
THEIRS = {"fit", "result", "close"}
CALL = re.compile(r"`([\w.]+)\(([^`]*)\)`")


def rows():
    """Each row that begins with a door, and what stands in it."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        name = cells[0].removeprefix("| ").strip()
        if line.startswith("| ") and name in DOORS:
            yield name, line


def callables_of(door):
    found = {}
    for path in DOORS[door]:
        owner = package()[path]
        found.setdefault(owner.name, owner)
        for name, member in owner.all_members.items():
            if not member.is_alias and (member.is_function or member.is_class):
                found.setdefault(name, member)
    found["Retention"] = package()["config.Retention"]
    return found


def parameters_of(one):
    if one.is_class and "__init__" in one.members:
        one = one.members["__init__"]
    return {name for name in (p.name for p in one.parameters) if name != "self"} | set(
        () if one.is_function else (m for m in one.members if one.members[m].is_attribute)
    )


@pytest.mark.parametrize("door", DOORS)
def test_a_call_on_the_page_has_the_arguments_of_its_signature(door):
    """Every call in a door's row is one that there is, and each argument that is named in it is one of its parameters."""
    known, seen = callables_of(door), 0
    for name, line in rows():
        for called, given in CALL.findall(line) if name == door else ():
            if called in THEIRS and called not in known:
                continue
            assert called in known, (called, line)
            call = ast.parse(f"f({re.sub(r'=(?=[,)]|$)', '=0', given)})", mode="eval").body
            assert isinstance(call, ast.Call)
            named = {one.arg for one in call.keywords} | {one.id for one in call.args if isinstance(one, ast.Name)}
            assert named <= parameters_of(known[called]), (called, given, line)
            seen += 1
    assert seen >= 1


def test_the_wishes_name_calls_that_there_are():
    """``load`` and ``best`` of the first table take what the page gives them."""
    assert {"path", "state", "best", "step"} <= parameters_of(package()["reading.load"])
    assert {"directory", "metric"} <= parameters_of(package()["following.best"])
    assert 'load(path, state, best="loss")' in PAGE


def test_every_door_has_a_row_in_every_table():
    """No door is left out of a table that compares them."""
    counts = [sum(name == door for name, _ in rows()) for door in DOORS]
    assert min(counts) >= 3
    assert isinstance(package(), griffe.Object)


def test_settings_are_called_config_or_as_the_framework_has_it():
    """Where a door takes settings in a call, the argument is ``config``; torchtitan's Config and the Trainer's class differ."""
    for path in (
        "checkpointer.Checkpointer.__init__",
        "publishing.publishing.__init__",
        "dcp.saver.configure",
        "lightning.callback.SafeCheckpointCallback.__init__",
        "accelerate.registration.register",
        "deepspeed.handle.install",
    ):
        assert "config" in [one.name for one in package()[path].parameters], path
