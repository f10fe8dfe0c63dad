"""The server of the test kit that scripts are forked from: its processes are as real as those of subprocess."""

import os
import signal
import subprocess
import sys

import pytest

from kit import warm
from support import processes_of_this_test


def run(code, *args, **more):
    return warm.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, **more)


@pytest.mark.slow
@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('x'); import atexit; atexit.register(print, 'y')", 0, "x\ny\n"),
        ("import sys; print(sys.argv[1]); sys.exit(3)", 3, "an argument\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise SystemExit('why')", 1, "why"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import signal, os; os.kill(os.getpid(), signal.SIGINT); input()", -2, "KeyboardInterrupt"),
        ("import os; print(os.environ['MINE'], os.getcwd(), __name__)", 0, "1 / __main__\n"),
    ],
)
def test_a_program_ends_as_in_a_fresh_interpreter(code, status, said, finalize):
    """Status, streams, arguments, environment and folder are its own."""
    done = run(code, "an argument", env={**os.environ, "MINE": "1"}, cwd="/", finalize=finalize)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert "warm.py" not in done.stderr or finalize


def test_a_warm_process_can_be_found_and_killed():
    """Its pid is that of the process, in a session of its own, and it belongs to this test."""
    code = "import time; print('there', flush=True); time.sleep(60)"
    with warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.warm
        assert process.stdout.readline() == "there\n"
        assert process.poll() is None
        assert (os.getsid(process.pid), processes_of_this_test()) == (process.pid, [process.pid])
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("command", [["-O", "-c", "pass"], ["-I", "-c", "pass"], ["-"]])
def test_programs_with_flags_or_on_stdin_get_a_fresh_interpreter(command):
    """Flags of the interpreter, and a program on stdin."""
    with warm.Popen([sys.executable, *command], stdin=subprocess.DEVNULL) as process:
        assert not process.warm
        assert process.wait(60) == 0
