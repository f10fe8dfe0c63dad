"""The commands beside a live job of a framework, and after it was killed: what is deleted, and what is called free."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kit import warm
from safe_ckpt.tools.cli.app import app
from support import program_path


def run(*args):
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@contextlib.contextmanager
def job(program, *args):
    process = warm.Popen(
        [sys.executable, str(program_path(program)), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "saved\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


@pytest.mark.parametrize("naming", ["automatic", "of the user"])
def test_gc_and_unlock_leave_a_live_job_of_accelerate_alone(tmp_path, naming):
    """While it lives nothing is deleted and nothing is free, whichever lock it holds; once killed both are so at once."""
    folder = tmp_path / "checkpoints" if naming == "automatic" else tmp_path
    if naming == "automatic":
        (folder / ".safe_ckpt/names").mkdir(parents=True)  # of a path in it that was named one day

    def left():
        return sorted(path.name for path in folder.glob("checkpoint_*"))

    with job("accelerate_job", tmp_path, naming) as process:
        for asked in {folder, tmp_path}:
            done = run("gc", asked, "--keep-last", 1)
            assert (done.exit_code, f"process {process.pid} " in done.stderr) == (1, True), done.stderr
            said = run("unlock", asked)
            assert (said.exit_code, f"process {process.pid} " in said.stdout) == (1, True), said.stdout
            assert "is free" not in said.stdout
        assert len(left()) == 3
    assert run("unlock", folder).exit_code == 0
    done = run("gc", folder, "--keep-last", 1)
    assert done.exit_code == 0, done.stderr
    assert left() == ["checkpoint_2"]
    assert run("resume-path", folder).stdout.strip() == str(folder / "checkpoint_2")


def test_gc_leaves_a_live_job_of_lightning_alone(tmp_path):
    """It holds the directory, and saves below it where a filename has a slash: gc leaves both alone while it lives."""

    def left():
        return sorted(path.name for path in (tmp_path / "sub").glob("*.ckpt"))

    with job("lightning_job", tmp_path) as process:
        before = left()
        assert len(before) == 3
        for asked in (tmp_path, tmp_path / "sub"):
            done = run("gc", asked, "--keep-last", 1)
            assert (done.exit_code, f"process {process.pid} " in done.stderr) == (1, True), done.output
        assert run("unlock", tmp_path).exit_code == 1
        assert left() == before
    assert run("unlock", tmp_path).exit_code == 0
    newest = run("resume-path", tmp_path).stdout.strip()
    assert run("gc", tmp_path, "--keep-last", 1).exit_code == 0
    assert left() == [os.path.basename(newest)]
