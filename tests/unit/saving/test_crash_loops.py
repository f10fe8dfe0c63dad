"""A job that ends again and again before it has saved anything goes back to the checkpoint before."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from safe_ckpt.core.health.start_log import StartLog, folder_in

HEAD = """
    import os, signal, sys, torch
    from safe_ckpt import CheckpointConfig, Checkpointer, Loops
    folder, how = sys.argv[1], sys.argv[2]
    state = {"t": {"x": torch.zeros(3)}, "step": 0}
    ckpt = Checkpointer(folder, CheckpointConfig(loops=Loops(tries=2, back=1)))
    info = ckpt.resume(state)
    print("resumed", info.step if info else None, flush=True)
"""
SAVE = """
    with ckpt:
        for step in range(1, 4):
            state["step"] = step
            ckpt.save(step, state).result()
"""
FAIL = """
    def train():
        for step in range(100):
            ckpt.reached(step)
            if step == 7 and how == "raise":
                raise ValueError("a bad batch")
            if step == 7 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 7 and how == "done":
                return
    if how == "unclosed":
        raise ValueError("not in a with block")
    with ckpt:
        train()
"""


def run(folder, how, body=FAIL):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(body), folder, how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("resumed")]
    return (said or [""])[0], done.returncode, done.stderr


@pytest.mark.parametrize("how", ["raise", "kill", "unclosed"])
def test_it_goes_back_and_then_gives_up(tmp_path, how):
    """Two starts from the newest that end in the same way, two from the one before; then an error that says what to do."""
    assert run(tmp_path, "", SAVE)[1] == 0
    tried = [run(tmp_path, how) for _ in range(5)]
    assert [step for step, *_ in tried] == ["3", "3", "2", "2", ""]
    assert [code for _, code, _ in tried[:4]] == [-signal.SIGKILL if how == "kill" else 1] * 4
    assert "CrashLoopError" in tried[4][2]
    assert ("killed at step 7" if how == "kill" else "ValueError") in tried[4][2]
    assert "step-00000003 is passed over" in tried[2][2]


def test_an_end_as_planned_does_not_count(tmp_path):
    """However often nothing is saved."""
    run(tmp_path, "", SAVE)
    assert [run(tmp_path, "done")[0] for _ in range(4)] == ["3"] * 4
    log = StartLog(folder_in(tmp_path / ".safe_ckpt")).read()
    assert [(start.end, start.reached) for start in log.starts] == [("done", 7)] * 4


def test_a_damaged_log_keeps_nobody_from_starting(tmp_path):
    """It is no reason not to train."""
    run(tmp_path, "", SAVE)
    folder = folder_in(tmp_path / ".safe_ckpt")
    run(tmp_path, "raise")
    (folder / "starts.json").write_text("{")
    assert run(tmp_path, "done")[0] == "3"
