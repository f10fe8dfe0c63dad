import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.inside import lock_in
from safe_ckpt import Checkpointer
from safe_ckpt.core.home.holders import holder_of
from safe_ckpt.ledger import event_log
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.doctor import durability
from safe_ckpt.tools.doctor.check import CheckOptions, Examined, known_size
from safe_ckpt.tools.inspection.listing import list_existing, read_listing
from support import holding_lock


def run(command, directory, *options):
    return CliRunner().invoke(app, [command, str(directory), *options])


def test_the_lock_of_a_killed_job_keeps_nobody_out(tmp_path):
    """While it lives unlock names it and exits with 1; killed, it is said to be gone, status 0; the next job gets in."""
    hidden = tmp_path / ".safe_ckpt"
    hidden.mkdir()
    with holding_lock(hidden) as job:
        said = run("unlock", tmp_path)
        assert (said.exit_code, f"process {job.pid} on host" in said.stdout) == (1, True)
        assert "which is alive" in said.stdout
        assert holder_of(hidden).alive is True
        before = {path.name: path.read_bytes() for path in hidden.iterdir()}
        job.kill()
        job.wait()
    said = run("unlock", tmp_path)
    assert said.exit_code == 0
    assert "is free" in said.stdout
    assert f"process {job.pid} " in said.stdout
    assert "--break-lock" not in said.stdout
    told = run("unlock", tmp_path, "--json")
    holder = json.loads(told.stdout)["holder"]
    assert (told.exit_code, holder["alive"], holder["pid"]) == (0, False, job.pid)
    found = durability.holder(Examined(asked=tmp_path, existing=tmp_path))[0]
    assert f"process {job.pid} " in found.measured
    assert "is gone" in found.measured
    assert {path.name: path.read_bytes() for path in hidden.iterdir()} == before
    lock = lock_in(hidden, subject=tmp_path)
    lock.acquire()
    lock.release()
    assert run("unlock", tmp_path).stdout == f"{tmp_path} is free\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda text: text.replace('"host": "', '"host": "other-').replace('"kernel": "', '"kernel": "other-'),
            "other-",
        ),
        (lambda text: text.split('"lease_s"')[0], "has not written its name"),
        (lambda _: "", "has not written its name"),
    ],
    ids=["another host", "torn", "empty"],
)
def test_unlock_calls_a_holder_of_another_host_neither_alive_nor_gone(tmp_path, change, says):
    """A holder of another host, and a lock file that names nobody: held, alive is null, and the next job's way in is told."""
    hidden = tmp_path / ".safe_ckpt"
    hidden.mkdir()
    lock = lock_in(hidden, subject=tmp_path)
    lock.acquire()
    text = (hidden / "lock").read_text()
    lock.release()
    (hidden / "lock").write_text(change(text))
    said = run("unlock", tmp_path)
    assert said.exit_code == 1
    assert says in said.stdout
    assert "next job takes it over after" in said.stdout
    assert json.loads(run("unlock", tmp_path, "--json").stdout)["holder"]["alive"] is None
    assert run("unlock", tmp_path, "--break-lock").exit_code == 0
    assert os.listdir(hidden) == []


def test_unlock_names_the_holder_that_the_lock_file_names(tmp_path):
    """Who holds it, and since when, come from one file: a record of an earlier job cannot be mistaken for this one's."""
    lock = lock_in(tmp_path)
    lock.acquire()
    found = holder_of(tmp_path)
    lock.release()
    assert (found.pid, found.host, found.alive) == (os.getpid(), socket.gethostname(), True)
    assert found.started_at.startswith("20")
    assert holder_of(tmp_path) is None
    assert holder_of(None) is None


def test_escape_sequences_in_names_come_out_as_text(tmp_path):
    """A directory whose name is an escape sequence comes out as text, also where stdout takes ASCII only."""
    directory = tmp_path / "\x1b]0;owned\x07é"
    record(directory / ".safe_ckpt", "é")
    runner = CliRunner(charset="ascii")
    for command in (
        ["unlock"],
        ["report", "-o", str(directory / "p.html")],
        ["watch", "--once"],
        ["doctor", "--mebibytes", "0"],
    ):
        done = runner.invoke(app, [command[0], str(directory), *command[1:]])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert done.stdout_bytes.isascii()
        assert "\x1b]0" not in done.output
        assert "\x07" not in done.output
    page = runner.invoke(app, ["report", str(directory), "-o", "-"])
    assert page.exit_code == 0
    assert "é" in page.stdout_bytes.decode("utf-8")


@contextlib.contextmanager
def nobody():
    """Without root's right to read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["", ".safe_ckpt"], ids=["the directory", "its hidden folder"])
@pytest.mark.parametrize("command", [["unlock"], ["report"], ["watch", "--once"]], ids=lambda command: command[0])
def test_unlock_of_a_directory_without_permission_says_the_cause(command, closed):
    """One sentence with the cause, status 1, no traceback; it is not said that nothing was saved, or that it is free."""
    with tempfile.TemporaryDirectory() as place:  # all of pytest's own are root's alone
        Path(place).chmod(0o755)
        record(Path(place) / ".safe_ckpt")
        Path(place, closed).chmod(0)
        try:
            with nobody():
                done = run(command[0], place, *command[1:])
        finally:
            Path(place, closed).chmod(0o755)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "Permission denied" in done.stderr
    assert done.stdout == ""
    assert "no job has saved" not in done.stderr


def record(hidden, name="step-1"):
    hidden.mkdir(parents=True)
    event = {"event": "committed", "at": 1_800_000_000.0, "rank": 0, "name": name, "step": 1, "path": "/r/1"}
    (hidden / "events.jsonl").write_text(json.dumps(event) + "\n")


LAYOUTS = {  # where the checkpoints are, their name, the hidden folder, what the user names
    "Checkpointer": (".", "step-00000001", ".safe_ckpt", "."),
    "Transformers": (".", "checkpoint-1", "_safe_ckpt", "."),
    "Accelerate": ("checkpoints", "checkpoint_1", ".safe_ckpt", "."),
    "Accelerate's checkpoints": ("checkpoints", "checkpoint_1", ".safe_ckpt", "checkpoints"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_commands_have_one_idea_of_a_directory(tmp_path, layout):
    """What read_listing finds is what unlock, doctor and report speak of: the lock, the quarantine, the checkpoints, events."""
    below, name, hidden, asked = LAYOUTS[layout]
    hidden, asked = tmp_path / hidden, tmp_path / asked
    with Checkpointer(tmp_path / "made") as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=20)
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / "made/step-00000001").rename(tmp_path / below / name)
    shutil.rmtree(tmp_path / "made")
    record(hidden)
    (hidden / "quarantine" / f"{name}-bad").mkdir(parents=True)
    lock = lock_in(hidden, subject=tmp_path)
    lock.acquire()
    try:
        shelf = read_listing(asked)
        unlocked = json.loads(run("unlock", asked, "--json").stdout)
        found = durability.holder(Examined(asked=asked, existing=asked))[0]
    finally:
        lock.release()
    assert shelf.places[0] == hidden
    assert unlocked["holder"]["pid"] == found.figures["pid"] == os.getpid()
    rows, problem = list_existing(asked)
    (found_one,) = shelf.standing.usable
    assert found_one.path == tmp_path / below / name
    assert asked / rows[0].name == found_one.path
    assert rows[1].name.endswith(f"/quarantine/{name}-bad")
    assert ([row.state for row in rows], problem) == (["valid", "quarantined"], "")
    assert known_size(asked, CheckOptions()) == (found_one.info.size_bytes, f"as {name} is")
    assert event_log.find_events(asked) == (hidden / "events.jsonl",)
