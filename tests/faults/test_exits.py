"""How a program may end: with -O, from stdin, by an exception, by Ctrl-C, without closing."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from kit import warm
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from support import names_in, run_script, writer_processes, writers_of

BODY = """
    import signal, sys, torch
    from safe_ckpt import Checkpointer, CheckpointConfig, Timeouts
    config = CheckpointConfig(timeouts=Timeouts(shutdown_s=5))
    ckpt = Checkpointer(sys.argv[1], config)
    handle = ckpt.save(1, {{"w": {{"t": torch.ones(20_000_000)}}}})
    {end}
"""


def committed(folder):
    found = [path for path in folder.glob("step-*") if verify(path, read_manifest(path))]
    assert names_in(folder / ".safe_ckpt/pending") == []
    assert not (folder / ".safe_ckpt/lock").exists()
    return [path.name for path in found]


@pytest.mark.parametrize("flags", [(), pytest.param(("-O",), marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("pass", 0, ""),
        ("ckpt.close()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("del ckpt, handle", 0, ""),
        ("import threading; threading.Thread(target=ckpt.wait).start()", 0, ""),
    ],
)
def test_whatever_the_end_what_was_saved_is_committed(tmp_path, end, code, words, flags):
    """A save in flight when the program ends is finished first, the exception stays the user's; -O changes nothing."""
    done = run_script(BODY.format(end=end), str(tmp_path / "exp"), flags=flags, finalize=True)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert committed(tmp_path / "exp") == ["step-00000001"]


def test_a_script_on_stdin(tmp_path):
    """python - < script: nothing to import, nothing imported."""
    done = run_script("", str(tmp_path / "exp"), stdin=textwrap.dedent(BODY.format(end="ckpt.close()")))
    assert done.returncode == 0, done.stderr
    assert committed(tmp_path / "exp") == ["step-00000001"]


@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_validation_does_not_depend_on_assert(tmp_path, flags):
    """Bad input is refused with -O as well."""
    end = """
    ckpt.close()
    from safe_ckpt import Retention, SafeCheckpointError
    for call in (lambda: Retention(keep_last=0), lambda: Timeouts(barrier_s=-1), lambda: ckpt.save(1, {{}}),
                 lambda: Checkpointer("/dev/null/x")):
        try:
            call()
            print("accepted")
        except SafeCheckpointError as error:
            print(type(error).__name__)
    """
    done = run_script(
        BODY.format(end=end.replace("{{", "{").replace("}}", "}")), str(tmp_path / "exp"), flags=flags, finalize=True
    )
    assert done.stdout.split() == ["ConfigError", "ConfigError", "ClosedError", "DirectoryError"], done.stderr


def test_the_source_has_no_assert():
    """Nothing in the package leans on a statement that -O removes."""
    import ast
    from pathlib import Path

    import safe_ckpt

    for file in Path(safe_ckpt.__file__).parent.rglob("*.py"):
        code = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        assert [node.lineno for node in code if isinstance(node, ast.Assert)] == [], file


def test_ctrl_c_while_saving(tmp_path):
    """SIGINT to the whole group in the middle of a save: KeyboardInterrupt, a prompt end, a committed checkpoint."""
    body = BODY.format(
        end="""signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    print("saving", flush=True)
    while True:
        pass"""
    )
    command = [sys.executable, "-c", textwrap.dedent(body), str(tmp_path / "exp")]
    with warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, finalize=True
    ) as process:
        assert process.stdout.readline() == "saving\n"
        os.killpg(process.pid, signal.SIGINT)
        begun = time.monotonic()
        assert "KeyboardInterrupt" in process.stderr.read()
        process.wait(timeout=20)
        assert time.monotonic() - begun < 8
        assert writers_of(process.pid) == []
    assert committed(tmp_path / "exp") == ["step-00000001"]


def test_ctrl_c_twice_ends_at_once(tmp_path):
    """The writer is stopped and close() waits for it: a second SIGINT ends that wait, and leaves no process."""
    body = BODY.format(
        end="""import os
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(ckpt._engine._save_queue.writer.pid, signal.SIGSTOP)
    print("closing", flush=True)
    ckpt.close()"""
    ).replace("shutdown_s=5", "shutdown_s=60, writer_stall_s=60")
    command = [sys.executable, "-c", textwrap.dedent(body), str(tmp_path / "exp")]
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
def test_what_the_kernel_does_to_the_writer(tmp_path, inject, expected):
    """Errors, signals and delays at the writer's system calls, from the kernel's side: committed, or a named error."""
    end = """
    import subprocess, time
    pid = ckpt._engine._save_queue.writer.pid
    handle.result(timeout_s=30)
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,pwrite64", "-e",
                               "inject=" + sys.argv[2], "-p", str(pid)])
    def tracers():
        return [open(f"/proc/{pid}/task/{t}/status").read().split("TracerPid:")[1].split()[0]
                for t in __import__("os").listdir(f"/proc/{pid}/task")]
    while "0" in tracers():
        time.sleep(0.01)
    try:
        print(ckpt.save(2, {"w": {"t": torch.full((20_000_000,), 2.0)}}).result(timeout_s=40).step)
    except Exception as error:
        print(type(error).__name__)
    ckpt.close()
    tracer.wait(timeout=10)
    """
    body = BODY.format(end=end).replace("shutdown_s=5", "shutdown_s=5, writer_stall_s=1, fsync_stall_s=2")
    done = run_script(body, str(tmp_path / "exp"), inject, finalize=True)
    assert done.stdout.split() == [expected], done.stderr
    assert len(committed(tmp_path / "exp")) == (2 if expected == "2" else 1)


def test_a_stopped_writer_does_not_hold_the_exit(tmp_path):
    """The writer process is stopped and the program ends: it is out within the shutdown time, and says why."""
    end = """
    import os, signal, time
    pid = ckpt._engine._save_queue.writer.pid
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    ckpt.close()
    """
    body = BODY.format(end=end).replace("shutdown_s=5", "shutdown_s=2, writer_stall_s=60")
    begun = time.monotonic()
    done = run_script(body, str(tmp_path / "exp"), finalize=True)
    assert time.monotonic() - begun < 25
    assert done.returncode == 1
    assert "SaveError" in done.stderr
    assert not list((tmp_path / "exp").glob("step-*"))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, pytest.param(signal.SIGSEGV, marks=pytest.mark.thorough)]
)
def test_a_lost_writer_is_replaced_and_the_save_committed(tmp_path, number):
    """The writer is killed, stopped or crashes in the middle of a file: one warning, and the same bytes are committed."""
    end = f"""
    import os, time, logging
    logging.basicConfig()
    for step in (2, 3, 4):
        os.kill(ckpt._engine._save_queue.writer.pid, {int(number)})
        handle = ckpt.save(step, {{"w": {{"t": torch.full((20_000_000,), float(step))}}}})
        print(handle.result(timeout_s=50).step, flush=True)
    ckpt.close()
    """
    body = BODY.format(end=end).replace("shutdown_s=5", "shutdown_s=5, writer_stall_s=1")
    done = run_script(body, str(tmp_path / "exp"), finalize=True)
    assert done.stdout.split() == ["2", "3", "4"], done.stderr
    assert done.stderr.count("the same snapshot is written again") >= 3
    assert len(committed(tmp_path / "exp")) == 4


def test_a_stopped_writer_is_replaced_within_seconds_and_a_pause_harms_nothing(tmp_path):
    """With the default limits: a writer that is stopped for a second goes on and is the same one; one that stays so is replaced
    within 5 s. The program itself may be stopped longer than that, together with its writer.
    """
    end = """
    import os, signal, subprocess, sys, time
    handle.result(timeout_s=30)
    writer = ckpt._engine._save_queue.writer
    pid = writer.pid
    def save(step):
        return ckpt.save(step, {"w": {"t": torch.full((20_000_000,), float(step))}})
    os.kill(pid, signal.SIGSTOP)
    handle = save(2)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    handle.result(timeout_s=30)
    both = "import os, signal, sys, time; pids = [int(pid) for pid in sys.argv[1:]]\\n"
    both += "for number in (signal.SIGSTOP, signal.SIGCONT):\\n [os.kill(pid, number) for pid in pids]; time.sleep(4)"
    os.kill(pid, signal.SIGSTOP)
    handle = save(3)
    pauser = subprocess.Popen([sys.executable, "-c", both, str(os.getpid()), str(pid)])
    handle.result(timeout_s=30)
    pauser.wait()
    print(writer.pid == pid)
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    print(save(4).result(timeout_s=30).step, writer.pid != pid, time.monotonic() - begun)
    ckpt.close()
    """
    done = run_script(BODY.format(end=end), str(tmp_path / "exp"), finalize=True)
    same, step, other, seconds = done.stdout.split()
    assert (same, step, other) == ("True", "4", "True"), done.stderr
    assert 3 <= float(seconds) < 5.5
    assert len(committed(tmp_path / "exp")) == 4


def test_a_slow_disk_is_not_taken_for_a_stopped_writer():
    """What waits for the disk or a processor has as long as an fsync; who is stopped has seconds; all of it has an end."""
    from safe_ckpt import Timeouts
    from safe_ckpt.core.writer.workers import _limit_s

    limits = Timeouts()
    assert [_limit_s(limits, "write", state) for state in "TtSDR"] == [3, 3, 60, 300, 300]
    assert [_limit_s(limits, "fsync", state) for state in ("T", "D", "S", "")] == [3, 300, 300, 300]
    assert _limit_s(Timeouts(writer_stall_s=1), "idle", "T") == 1
