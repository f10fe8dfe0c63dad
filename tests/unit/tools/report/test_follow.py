import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from safe_ckpt.ledger import event_log, history
from safe_ckpt.ledger.history import History
from safe_ckpt.tools.cli import report
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.report.follow import Follower
from safe_ckpt.tools.report.opening import Openings

START = 1_800_000_000.0
WATCH = [sys.executable, "-c", "from safe_ckpt.tools.cli import main; main()", "watch"]


def line(event, at, **facts):
    return json.dumps({"event": event, "at": START + at, "rank": 0, **facts}) + "\n"


def a_save(step, at, error=None):
    named = {"name": f"step-{step}", "step": step}
    said = line("snapshotted", at, **named, size_bytes=10**9, stall_s=0.004)
    said += line("written", at, **named, size_bytes=10**9, seconds=0.5)
    if error is not None:
        return said + line("failed", at, **named, error=error)
    return said + line("committed", at, **named, path=f"/r/{step}", sequence=step, size_bytes=10**9, seconds=0.75)


def record(directory, text):
    (directory / ".safe_ckpt").mkdir(exist_ok=True)
    with (directory / ".safe_ckpt/events.jsonl").open("a") as file:
        file.write(text)


def seen(directory, now):
    history = Follower(directory).look()
    return report.view(history, Openings(directory).look(history, now), directory, now)


def once(directory, *options):
    return CliRunner().invoke(app, ["watch", str(directory), "--once", *options])


def test_watch_once_prints_the_present_state_in_lines(tmp_path):
    """The present state in plain lines: verdict, last commit, figures, what happened last. Nothing recorded: that is said."""
    assert "record_events" in once(tmp_path).output
    record(tmp_path, a_save(1, 0) + a_save(2, 10, error="no space") + line("respawned", 11, pid=1, ended="signal 9"))
    done = once(tmp_path)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "A restart would start afresh."
    assert lines[1].startswith("1 save committed, 1 failed. Last committed: step 1,")
    assert lines[2].startswith("stall per save 4 ms, durable after 750 ms, throughput 2 GB/s")
    assert [row.split("  ", 1)[1] for row in lines[-3:]] == [
        "committed  step-1: size 953.7 MiB, stall 4 ms, durable after 750 ms, 2 GB/s",
        "failed  step-2: no space",
        "respawned  the writer process was replaced on rank 0: signal 9",
    ]
    data = json.loads(CliRunner().invoke(app, ["watch", str(tmp_path), "--json"]).stdout)
    assert (data["totals"]["committed"], data["totals"]["failed"]) == (1, 1)


def test_nothing_recorded_acts_on_the_terminal(tmp_path):
    """Escape sequences and markup in names and errors come out as text, in lines and on the screen."""
    record(tmp_path, a_save(1, 0, error="\x1b]0;owned\x07 [bold]x[/nonsense] \u202e\ud800"))
    shown = once(tmp_path).stdout
    screen = Console(file=io.StringIO(), width=200, force_terminal=True)
    screen.print(seen(tmp_path, START + 5))
    for text in (shown, screen.file.getvalue()):
        assert "[bold]x[/nonsense]" in text
        assert not {"\x1b]", "\x07", "\u202e", "\ud800"} & {
            text[at : at + size] for at in range(len(text)) for size in (1, 2)
        }


def test_the_screen_of_watch_has_verdict_saves_and_failures(tmp_path):
    """Verdict, figures, the last saves newest first, what failed; a directory in which nothing is recorded yet waits."""
    screen = Console(file=io.StringIO(), width=100)
    screen.print(seen(tmp_path, START))
    assert "waiting" in screen.file.getvalue()
    record(tmp_path, "".join(a_save(step, step) for step in range(1, 31)) + a_save(31, 31, error="no space"))
    screen = Console(file=io.StringIO(), width=100)
    screen.print(seen(tmp_path, START + 31))
    text = screen.file.getvalue()
    assert "30 saves committed, 1 failed." in text
    assert "Last committed: step 30, 1 second ago." in text
    assert text.index("step-30 ") < text.index("step-29 ")
    assert "step-21 " not in text
    assert "step-31: no space" in text


def test_watch_prints_only_what_is_new():
    """After the last line that was printed; all of it when that line is not among them any more."""
    assert report.after(["a", "b", "c"], ["a"]) == ["b", "c"]
    assert report.after(["a", "b"], ["a", "b"]) == []
    assert report.after(["c", "d"], ["a", "b"]) == ["c", "d"]
    assert report.after(["a"], []) == ["a"]
    assert report.happenings(History()) == []


def test_a_file_is_read_again_only_when_it_changed(tmp_path):
    """The same history comes back until something was recorded; rotation is a change."""
    record(tmp_path, a_save(1, 0))
    follower = Follower(tmp_path)
    first = follower.look()
    assert follower.look() is first
    record(tmp_path, a_save(2, 1))
    assert len(follower.look().saves) == 2
    os.rename(tmp_path / ".safe_ckpt/events.jsonl", tmp_path / ".safe_ckpt/events.jsonl.1")
    record(tmp_path, a_save(3, 2))
    assert [save.step for save in follower.look().saves] == [1, 2, 3]


def test_an_unfinished_line_of_the_record_waits_for_its_end(tmp_path):
    """It is neither an event nor one that is no event, until its end is there."""
    record(tmp_path, a_save(1, 0) + '{"event"')
    follower = Follower(tmp_path)
    told = follower.look()
    assert (told.events, told.skipped) == (3, 0)
    record(
        tmp_path,
        ': "finished"}\n' + a_save(2, 10) + "no event\n\n" + a_save(3, 20, error="no space") + '{"event": "unfin',
    )
    told = follower.look()
    assert ([save.step for save in told.saves], told.events, told.skipped) == ([1, 2, 3], 9, 2)
    record(tmp_path, 'ished"}\n' + a_save(4, 30))
    assert [save.step for save in follower.look().saves] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["rotated", "cut", "cut and grown beyond", "older ones deleted"])
def test_watch_shows_the_record_that_is_there_after_a_rotation(tmp_path, kind):
    """A rotated file, one that shrank or is another behind the same inode: the history is that of what is there now."""
    file = tmp_path / ".safe_ckpt/events.jsonl"
    record(tmp_path, a_save(1, 0))
    os.rename(file, f"{file}.1")
    record(tmp_path, a_save(2, 10) + a_save(3, 20))
    follower = Follower(tmp_path)
    before = follower.look()
    assert [save.step for save in before.saves] == [1, 2, 3]
    if kind == "rotated":
        os.rename(f"{file}.1", f"{file}.2")
        os.rename(file, f"{file}.1")
        record(tmp_path, a_save(4, 30))
    elif kind.startswith("cut"):
        os.truncate(file, 0)
        record(tmp_path, a_save(5, 10) * (3 if "grown" in kind else 1))
    else:
        os.unlink(f"{file}.1")
    assert follower.look() != before
    assert follower.look() == history.build_history(event_log.read_events(event_log.find_events(tmp_path)))


def test_watch_does_not_call_an_unknown_outcome_failed(tmp_path):
    """A save that may be committed is not called failed, in lines and on the screen."""
    unknown = line("failed", 2, name="step-2", step=2, error="rank 0 was lost", outcome_unknown=True)
    record(tmp_path, a_save(1, 0) + unknown)
    shown = once(tmp_path).stdout
    assert "1 save committed, none failed, 1 with an unknown outcome." in shown
    assert "outcome unknown  step-2: rank 0 was lost" in shown
    screen = Console(file=io.StringIO(), width=150)
    screen.print(seen(tmp_path, START + 5))
    assert "outcome unknown" in screen.file.getvalue()
    assert "step-2: rank 0 was lost" in screen.file.getvalue()


def test_watch_without_a_terminal_prints_a_line_per_save(tmp_path):
    """One line per save as it happens; Ctrl-C ends it with status 0 and no traceback."""
    record(tmp_path, a_save(1, 0))
    command = [*WATCH, str(tmp_path), "--every", "0.1"]
    with _started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "A restart would start afresh.\n"
        assert process.stdout.readline().startswith("1 save committed, none failed.")
        assert process.stdout.readline().startswith("stall per save")
        while "step-1:" not in process.stdout.readline():  # the ledger
            pass
        record(tmp_path, a_save(2, 10, error="no space"))
        assert process.stdout.readline().endswith("failed  step-2: no space\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def test_watch_on_a_terminal_ends_with_ctrl_c_and_status_0(tmp_path):
    """On a terminal the screen follows; Ctrl-C ends it with status 0 and gives the cursor back."""
    record(tmp_path, a_save(1, 0))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [*WATCH, str(tmp_path), "--every", "0.1"]
    with _started(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        _read_until(ours, "1 save committed")
        record(tmp_path, a_save(2, 10))
        _read_until(ours, "2 saves committed")
        process.send_signal(signal.SIGINT)
        rest = _read_until(ours, "\x1b[?25h")
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in rest
    os.close(ours)


@contextlib.contextmanager
def _started(command, **options):
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def _read_until(terminal, text, timeout_s=30.0):
    seen = ""
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], timeout_s)
        assert ready, seen
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen
