"""A job that ends again and again before it has saved anything goes back to the checkpoint before."""

import os
import shutil
import signal
import textwrap

import pytest

from safe_ckpt.core.health.start_log import StartLog, folder_in
from support import run_script

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
    code = textwrap.dedent(HEAD) + textwrap.dedent(body)
    done = run_script(code, str(folder), how, timeout_s=100, finalize=how == "unclosed")
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("resumed")]
    return (said or [""])[0], done.returncode, done.stderr


@pytest.mark.parametrize("how", ["kill", "unclosed", pytest.param("raise", marks=pytest.mark.thorough)])
def test_it_goes_back_and_then_gives_up(tmp_path, how):
    """Two starts from the newest that end in the same way, two from the one before; then an error that says what to do."""
    assert run(tmp_path, "", SAVE)[1] == 0
    tried = [run(tmp_path, how) for _ in range(5)]
    assert [step for step, *_ in tried] == ["3", "3", "2", "2", ""]
    assert [code for _, code, _ in tried[:4]] == [-signal.SIGKILL if how == "kill" else 1] * 4
    assert "CrashLoopError" in tried[4][2]
    assert ("killed at step 7" if how == "kill" else "ValueError") in tried[4][2]
    assert "step-00000003 is passed over" in tried[2][2]


ONE = """
    with ckpt:
        ckpt.save(1, state).result()
"""


def test_a_lone_checkpoint_is_tried_however_often(tmp_path):
    """There is none to go back to. A message says how it stands."""
    assert run(tmp_path, "", ONE)[1] == 0
    tried = [run(tmp_path, "raise") for _ in range(3)]
    assert [step for step, *_ in tried] == ["1"] * 3
    assert "There is none before it" in tried[2][2]


def test_what_was_passed_over_is_better_than_nothing(tmp_path):
    """Somebody deleted the one before: it is taken after all."""
    assert run(tmp_path, "", SAVE)[1] == 0
    assert [run(tmp_path, "raise")[0] for _ in range(3)] == ["3", "3", "2"]
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"step-{step:08d}")
    assert run(tmp_path, "done")[0] == "3"


HANDLED = """
    import sys
    try:
        import no_such_module
    except ImportError:
        with ckpt:
            pass
"""
DISK = """
    from safe_ckpt.errors import NotEnoughSpaceError
    with ckpt:
        raise NotEnoughSpaceError(path="x", message="full", needed_bytes=2, free_bytes=1)
"""
PEER = """
    with ckpt:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:53453")
"""
AGAIN = """
    with ckpt:
        for _ in range(4):
            ckpt.reached(7)
            ckpt.resume(state)
"""


@pytest.mark.parametrize("body", [HANDLED, DISK, PEER, AGAIN], ids=["handled", "disk", "peer", "resumed again"])
def test_what_says_nothing_about_the_state_does_not_count(tmp_path, body):
    """An exception that was handled already, a full disk, a lost peer, a job that resumes again by itself."""
    run(tmp_path, "", SAVE)
    assert [run(tmp_path, "", body)[0] for _ in range(3)] == ["3"] * 3


@pytest.mark.parametrize("name", ["folder", "pipe", "no log", "no end"])
def test_nothing_in_the_record_keeps_a_job_from_starting(tmp_path, name):
    """Whatever stands where it should be."""
    run(tmp_path, "", SAVE)
    folder = folder_in(tmp_path / ".safe_ckpt")
    shutil.rmtree(folder, ignore_errors=True)
    if name != "folder":
        folder.mkdir()
    {
        "folder": folder.touch,
        "pipe": lambda: os.mkfifo(folder / "starts.json"),
        "no log": lambda: (folder / "starts.json").write_text(
            '{"starts": [{"key": "/etc/x"}], "passed": [], "backs": []}'
        ),
        "no end": (folder / "starts.json").mkdir,
    }[name]()
    assert run(tmp_path, "done")[0] == "3"


def test_an_end_as_planned_does_not_count(tmp_path):
    """However often nothing is saved."""
    run(tmp_path, "", SAVE)
    assert [run(tmp_path, "done")[0] for _ in range(3)] == ["3"] * 3
    log = StartLog(folder_in(tmp_path / ".safe_ckpt")).read()
    assert [(start.end, start.reached) for start in log.starts] == [("done", 7)] * 3


def test_a_damaged_log_keeps_nobody_from_starting(tmp_path):
    """It is no reason not to train."""
    run(tmp_path, "", SAVE)
    folder = folder_in(tmp_path / ".safe_ckpt")
    run(tmp_path, "raise")
    (folder / "starts.json").write_text("{")
    assert run(tmp_path, "done")[0] == "3"
