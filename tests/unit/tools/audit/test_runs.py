"""How runs are started, killed and read, with a script that pretends to train: it writes what a recorder would."""

import sys

import pytest

from safe_ckpt.errors import AuditError
from safe_ckpt.tools.audit.runs import Options, audit

# Saves each 4th step, in the step after it: as an asynchronous save does. ``--forget`` is for the start that is resumed.
_SCRIPT = """
import json, os, signal, sys, time
out, stop = sys.argv[1], int(os.environ["SAFE_CKPT_AUDIT_STOP"])
file, step = os.path.join(out, "checkpoint"), 0
if os.path.exists(file):
    step = int(open(file).read())
records = open(os.path.join(os.environ["SAFE_CKPT_AUDIT"], f"{os.getpid()}.jsonl"), "w")
for number in range(1, 999):
    step += 1
    values = {"weights.w": step, "state.step.w": 0 if "--forget" in sys.argv and number == 1 else step}
    line = {"step": number, "rank": 0, "batch": [f"b{step}"], "samples": [None], "values": values, "zero": [], "variables": {}}
    records.write(json.dumps(line) + "\\n")
    records.flush()
    if number == stop:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 4 == 1 and step > 1:
        open(file + ".new", "w").write(str(step - 1))
        os.replace(file + ".new", file)
    time.sleep(0.005)
"""


def run(folder, *, script=_SCRIPT, words=(), **options):
    (folder / "train.py").write_text(script)
    command = [sys.executable, str(folder / "train.py"), "{out}", *words]
    return audit(Options(command=command, folder=folder / "runs", **options))


def test_each_start_is_killed_behind_its_steps_and_the_last_one_is_compared_to_the_end(tmp_path):
    """Killed behind 10 steps, it goes on from 8, and all that the whole run still has is compared."""
    found = run(tmp_path, stop=10, until=30)
    assert (found.equal, found.killed, found.comparisons[0].steps) == (True, (10,), 22)
    made = {file.parent.name: len(file.read_text().splitlines()) for file in tmp_path.glob("runs/*.steps/*.jsonl")}
    assert made == {"whole-1.steps": 30, "whole-2.steps": 30, "stopped-10-0.steps": 10, "stopped-10-1.steps": 30}


def test_arguments_for_the_resume_are_given_to_each_start_but_the_first(tmp_path):
    """With them, in this script, a counter begins anew."""
    found = run(tmp_path, stop=10, until=30, stops=2, resume_args=["--forget"])
    assert [one.findings[0].names for one in found.comparisons] == [("step",), ("step",)]
    assert len(found.findings) == 1


def test_a_kill_within_a_save_comes_when_a_file_changes(tmp_path):
    """Behind its steps the start goes on until something below {out} is another file, and is killed at once."""
    found = run(tmp_path, stop=10, until=200, stops=3, within_save=True)
    assert found.equal, str(found)
    first, second = (
        len(next(tmp_path.glob(f"runs/stopped-10-{n}.steps/*.jsonl")).read_text().splitlines()) for n in (1, 2)
    )
    least = (200 - 10) // 6
    assert (first > least, second) == (True, least)


def test_of_several_processes_of_one_rank_the_one_that_trains_is_read(tmp_path):
    """A process that it starts may make a step or two of its own, such as a test of the machine."""
    more = """
        other = open(os.path.join(os.path.dirname(records.name), "9999999.jsonl"), "w")
        print(json.dumps({**line, "values": {"weights.w": -1}}), file=other)
        other.close()
"""
    script = _SCRIPT.replace("    if number == stop:", f"    if number == 1:{more}    if number == stop:")
    assert run(tmp_path, script=script, stop=10, until=30).equal


def test_a_kill_moves_up_to_the_last_step_but_one(tmp_path):
    """The first checkpoint is there behind 5 steps: kills behind 2 and 4 are told, and the one that counts."""
    found = run(tmp_path, stop=2, until=7)
    assert (found.equal, found.killed) == (True, (2, 4, 6))
    short = tmp_path / "short"
    short.mkdir()
    with pytest.raises(AuditError, match="within 3 steps: save earlier, or raise --until"):
        run(short, stop=2, until=4)
