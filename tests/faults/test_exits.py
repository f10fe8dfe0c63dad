"""How a program may end: with -O, from stdin, by an exception, by Ctrl-C, without closing."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kit import warm
from kit.patience import scaled
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from support import names_in, program_path, run_program, run_script, writer_processes, writers_of

SAVING = "ends_in_a_save"


def committed(folder):
    found = [path for path in folder.glob("step-*") if verify_files(path, read_manifest(path))]
    assert names_in(folder / ".safe_ckpt/pending") == []
    assert not (folder / ".safe_ckpt/lock").exists()
    return [path.name for path in found]


@pytest.mark.parametrize("flags", [(), pytest.param(("-O",), marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("returns", 0, ""),
        ("closes", 0, ""),
        ("exits", 3, ""),
        ("raises", 1, "KeyError: 'mine'"),
        ("forgets", 0, ""),
        ("waits in a thread", 0, ""),
    ],
)
def test_a_save_in_flight_is_committed_whatever_ends_the_program(tmp_path, how, code, words, flags):
    """A save in flight when the program ends is finished first, the exception stays the user's; -O changes nothing."""
    done = run_program(SAVING, str(tmp_path / "exp"), how, flags=flags, finalize=True)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert committed(tmp_path / "exp") == ["step-00000001"]


def test_a_script_on_stdin_saves_and_is_not_imported_by_the_writer(tmp_path):
    """python - < script: nothing to import, nothing imported."""
    script = program_path(SAVING).read_text()
    done = run_script("", str(tmp_path / "exp"), "closes", stdin=script)
    assert done.returncode == 0, done.stderr
    assert committed(tmp_path / "exp") == ["step-00000001"]


@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_validation_does_not_depend_on_assert(tmp_path, flags):
    """Bad input is refused with -O as well."""
    done = run_program("refuses_bad_input", str(tmp_path / "exp"), flags=flags, finalize=True)
    assert done.stdout.split() == ["ConfigError", "ConfigError", "ClosedError", "DirectoryError"], done.stderr


def test_the_source_has_no_assert():
    """Nothing in the package leans on a statement that -O removes, but the tests to derive from: those are run by pytest."""
    import ast
    from pathlib import Path

    import safe_ckpt

    package = Path(safe_ckpt.__file__).parent
    for file in {*package.rglob("*.py")} - {package / "testing/contracts.py"}:
        code = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        assert [node.lineno for node in code if isinstance(node, ast.Assert)] == [], file


def test_ctrl_c_within_a_save_ends_promptly_with_a_committed_checkpoint(tmp_path):
    """SIGINT to the whole group in the middle of a save: KeyboardInterrupt, a prompt end, a committed checkpoint."""
    command = [sys.executable, str(program_path(SAVING)), str(tmp_path / "exp"), "at Ctrl-C"]
    with warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, finalize=True
    ) as process:
        assert process.stdout.readline() == "saving\n"
        os.killpg(process.pid, signal.SIGINT)
        begun = time.monotonic()
        assert "KeyboardInterrupt" in process.stderr.read()
        process.wait(timeout=20)
        assert time.monotonic() - begun < scaled(8)
        assert writers_of(process.pid) == []
    assert committed(tmp_path / "exp") == ["step-00000001"]


def test_a_second_ctrl_c_ends_the_wait_for_a_stopped_writer(tmp_path):
    """The writer is stopped and close() waits for it: a second SIGINT ends that wait, and leaves no process."""
    command = [sys.executable, str(program_path("closes_with_a_stopped_writer")), str(tmp_path / "exp"), "60"]
    with warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, finalize=True
    ) as process:
        assert process.stdout.readline() == "closing\n"
        time.sleep(0.3)  # the first one interrupts the wait in close(), the second what is left of it
        begun = time.monotonic()
        while process.poll() is None and time.monotonic() - begun < 20:
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.5)
        assert process.poll() is not None
        assert "KeyboardInterrupt" in process.stderr.read()
        assert time.monotonic() - begun < 15
    assert not [pid for pid in writer_processes() if pid]
    assert not list((tmp_path / "exp").glob("step-*"))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("inject", "expected"),
    [
        ("fsync:error=EIO:when=1", "2"),  # the kernel may have dropped the pages: written again, to another file
        ("fsync:error=EIO", "DirectoryError"),
        ("pwrite64:error=ENOSPC:when=3+", "NotEnoughSpaceError"),
        pytest.param("pwrite64:error=EDQUOT:when=1", "NotEnoughSpaceError", marks=pytest.mark.thorough),
        ("pwrite64:signal=KILL:when=2", "2"),
        pytest.param("fsync:signal=SEGV:when=1", "2", marks=pytest.mark.thorough),
        ("pwrite64:delay_enter=3000000:when=1", "2"),
    ],
)
def test_errors_and_signals_at_the_writers_system_calls_lose_no_save(tmp_path, inject, expected):
    """Errors, signals and delays at the writer's system calls, from the kernel's side: committed, or a named error."""
    done = run_program("saves_under_strace", str(tmp_path / "exp"), inject, finalize=True)
    assert done.stdout.split() == [expected], done.stderr
    assert len(committed(tmp_path / "exp")) == (2 if expected == "2" else 1)


def test_a_stopped_writer_does_not_hold_the_exit(tmp_path):
    """The writer process is stopped and the program ends: it is out within the shutdown time, and says why."""
    begun = time.monotonic()
    done = run_program("closes_with_a_stopped_writer", str(tmp_path / "exp"), "2", finalize=True)
    assert time.monotonic() - begun < 25
    assert done.returncode == 1
    assert "SaveError" in done.stderr
    assert not list((tmp_path / "exp").glob("step-*"))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, pytest.param(signal.SIGSEGV, marks=pytest.mark.thorough)]
)
def test_a_lost_writer_is_replaced_and_the_save_committed(tmp_path, number):
    """The writer is killed, stopped or crashes in the middle of a file: one warning, and the same bytes are committed."""
    done = run_program("signals_its_writers", str(tmp_path / "exp"), str(int(number)), finalize=True)
    assert done.stdout.split() == ["2", "3", "4"], done.stderr
    assert done.stderr.count("the same snapshot is written again") >= 3
    assert len(committed(tmp_path / "exp")) == 4


def test_a_stopped_writer_is_replaced_within_seconds_and_a_pause_harms_nothing(tmp_path):
    """With the default limits: a writer that is stopped for a second goes on and is the same one; one that stays so is replaced
    within 5 s. The program itself may be stopped longer than that, together with its writer.
    """
    done = run_program("pauses_its_writer", str(tmp_path / "exp"), finalize=True)
    same, step, other, seconds = done.stdout.split()
    assert (same, step, other) == ("True", "4", "True"), done.stderr
    assert 3 <= float(seconds) < scaled(5.5)
    assert len(committed(tmp_path / "exp")) == 4


def test_a_slow_disk_is_not_taken_for_a_stopped_writer():
    """What waits for the disk or a processor has as long as an fsync; who is stopped has seconds; all of it has an end."""
    from safe_ckpt import Timeouts
    from safe_ckpt.core.writer.workers import _stall_limit_s

    limits = Timeouts()
    assert [_stall_limit_s(limits, "write", state) for state in "TtSDR"] == [3, 3, 60, 300, 300]
    assert [_stall_limit_s(limits, "fsync", state) for state in ("T", "D", "S", "")] == [3, 300, 300, 300]
    assert _stall_limit_s(Timeouts(writer_stall_s=1), "idle", "T") == 1
