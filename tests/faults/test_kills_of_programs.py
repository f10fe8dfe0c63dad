"""``safe_ckpt.testing.kills``: a program that loses something is found, and one that is safe is not."""

import sys
from pathlib import Path

import pytest

from safe_ckpt.errors import AuditError, ResumeDiffersError
from safe_ckpt.testing import kills

COUNTS = """
import os, sys
from pathlib import Path

file = Path("{out}", "n")
count = int(file.read_text()) if file.exists() else 0
for count in range(count + 1, 4):
    SAVE
Path("{out}", "end").write_text(str(count))
"""
IN_PLACE = "file.write_text(str(count))"
BY_RENAME = "Path('{out}', 'new').write_text(str(count)); os.replace(Path('{out}', 'new'), file)"
SAFE = """
from safe_ckpt import Checkpointer

with Checkpointer("{out}/run") as ckpt:
    state = {"step": 0}
    ckpt.resume(state)
    for step in range(state["step"] + 1, 3):
        state["step"] = step
        ckpt.save(step, state).result()
with open("{out}/end", "w") as file:
    file.write(str(state))
"""


def end(out):
    return (out / "end").read_text()


def command(save):
    return [sys.executable, "-c", COUNTS.replace("SAVE", save)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_program_that_writes_in_place_is_found(tmp_path, torn):
    """It cannot start again after a kill between the opening of its file and the write; by a rename it can after each."""
    if not torn:
        found = kills(command(IN_PLACE), result=end, folder=tmp_path / "in place")
        assert list(found.problems) == ["operation 2", "operation 4", "operation 6"]
    safe = kills(command(BY_RENAME), result=end, torn=torn, folder=tmp_path / "by rename")
    safe.check()
    assert str(safe) == "0 of 11 kills had a wrong end"  # opening, writing and renaming thrice; the end


def test_what_is_found_is_raised_and_says_after_which_kill(tmp_path):
    """A program that takes an empty file for another number ends with that."""
    wrong = [part.replace("file.read_text()", "file.read_text() or 5") for part in command(IN_PLACE)]
    with pytest.raises(ResumeDiffersError, match=r"operation 2: it ended with '5', and not with '3'"):
        kills(wrong, result=end, folder=tmp_path).check()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpointer_goes_on_after_a_kill_at_each_operation(tmp_path):
    """At every fifteenth one of two saves, and at two random moments; the writer process and the lock included."""
    for more in ({"every": 15}, {"times": 2, "seed": 1}):
        found = kills([sys.executable, "-c", SAFE], result=end, folder=tmp_path / str(len(more)), **more)
        found.check()
        assert found.count >= 2


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit('no')", "without a kill it ended with 1: no"),
        ("'{out}'", "changes nothing"),
        ("import uuid; open('{out}/end', 'w').write(uuid.uuid4().hex)", "differ"),
    ],
)
def test_a_program_that_cannot_be_compared_is_an_error(tmp_path, code, error):
    """One that fails by itself, writes nothing, or ends differently each time."""
    with pytest.raises(AuditError, match=error):
        kills(
            [sys.executable, "-c", f"'{{out}}'; {code}"],
            result=lambda out: [p.read_text() for p in Path(out).glob("*")],
        )
    with pytest.raises(AuditError, match="where the command names"):
        kills([sys.executable, "-c", "1"], result=end)
