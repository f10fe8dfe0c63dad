"""The headline: what a restart would take now, its age and its health."""

import contextlib
import io
import json
import os
import re
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Checkpointer, Health
from safe_ckpt.testing import inline_saves
from safe_ckpt.tools.cli import report
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.report import restart
from safe_ckpt.tools.report.follow import Follower
from safe_ckpt.tools.report.opening import Openings


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, in a directory."""
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20)
    return tmp_path / "run"


def page_of(directory):
    found = CliRunner().invoke(app, ["report", str(directory), "-o", "-"])
    assert found.exit_code == 0, found.output
    return found.stdout.replace("\N{NO-BREAK SPACE}", " ")


def test_the_headline_is_what_a_restart_would_take(saved):
    """The newest with its step, age and health, on the page, in the text and in the JSON."""
    there = restart.look_at_restart(saved)
    assert (there.name, there.step, there.verifiable, there.passed_over) == ("step-00000002", 2, True, ())
    assert restart.sentence(there, there.saved_at + 7300) == "A restart goes on from step 2, 2 hours old, healthy."
    text = page_of(saved)
    assert "A restart goes on from step 2" in text
    assert "all is well" in text
    told = json.loads(CliRunner().invoke(app, ["report", str(saved), "--json"]).stdout)
    assert list(told)[:2] == ["restart", "ledger"]
    assert told["restart"]["step"] == 2
    said = CliRunner().invoke(app, ["report", str(saved), "-o", str(saved / "r.html")]).output
    assert said.startswith("A restart goes on from step 2")


def test_a_damaged_newest_is_no_good_news(saved):
    """One that was cut short: the one before is named, and why; the page has no check mark."""
    (saved / "step-00000002/w.safetensors").write_bytes(b"short")
    there = restart.look_at_restart(saved)
    assert there.step == 1
    assert "step-00000002: w.safetensors has 5 bytes" in there.passed_over[0]
    assert "not all is well" in page_of(saved)


def test_a_run_of_unhealthy_checkpoints_is_no_good_news(tmp_path):
    """Every save was committed, none failed, and a restart takes none of them."""
    with Checkpointer(tmp_path, CheckpointConfig(health=Health(action="mark"))) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(2, 2).to(torch.float32).requires_grad_(True), "n": 1}).result(
            timeout_s=20
        )
        bad = torch.nn.Linear(2, 2)
        bad.weight.data.fill_(float("nan"))
        for step in (2, 3):
            ckpt.save(step, {"model": bad, "n": 1}).result(timeout_s=20)
    there = restart.look_at_restart(tmp_path)
    assert there.step == 1
    assert any("NaN" in one for one in there.passed_over)
    page = page_of(tmp_path)
    assert "not all is well" in page
    assert len(re.findall(r'class="bad"><span>unhealthy: ', page)) == 2
    assert 'class="short"><span>valid<' in page  # in the colour of what is good


def test_without_any_checkpoint_a_restart_starts_afresh(tmp_path):
    """That is said; a directory that cannot be read says nothing."""
    with Checkpointer(tmp_path):
        pass
    assert restart.sentence(restart.look_at_restart(tmp_path), 0.0) == "A restart would start afresh."
    assert restart.look_at_restart(tmp_path / "nowhere") is None


class _Crash(BaseException):
    """Ends a run with a step that was not saved."""


@pytest.fixture
def crashed(tmp_path):
    """Two runs: the first ends behind step 2 with work that was not saved, the second has bad numbers in its newest."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for life in (1, 2):
        with (
            contextlib.suppress(_Crash),
            inline_saves(),
            Checkpointer(tmp_path / "run", CheckpointConfig(health=Health(action="mark"))) as ckpt,
        ):
            state = {"model": model, "optimizer": optimizer, "step": 0}
            ckpt.resume(state)
            for step in range(state["step"] + 1, 5):
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                if step == 4:
                    model.weight.data.fill_(float("nan"))
                if life == 1 and step == 3:
                    raise _Crash
                if step % 2 == 0:
                    ckpt.save(step, {**state, "step": step}).result(timeout_s=20)
    return tmp_path / "run"


def screen_of(directory, width=120):
    screen, history, now = Console(file=io.StringIO(), width=width), Follower(directory).look(), time.time()
    screen.print(report.view(history, Openings(directory).look(history, now), directory, now))
    return screen.file.getvalue()


def test_watch_opens_with_the_headline_and_the_ledger_of_the_report(crashed):
    """What a restart would take, what is passed over, and what crashes cost: in lines, on the screen, in JSON."""
    said = CliRunner().invoke(app, ["report", str(crashed), "-o", str(crashed / "r.html")]).stdout.splitlines()
    ledger = [line for line in said if "cost" in line or "holds training" in line or line.startswith("run 1")]
    assert said[0].startswith("A restart goes on from step 2,")
    assert said[1].startswith("not step-00000004: ")
    assert len(ledger) >= 3
    once = CliRunner().invoke(app, ["watch", str(crashed), "--once"]).stdout.splitlines()
    assert [line.partition(",")[0] for line in once[:2]] == [line.partition(",")[0] for line in said[:2]]
    assert set(ledger[:2]) <= set(once)
    assert any(line.startswith("run 2 ended") and "2 steps lost" in line for line in once)
    assert not any(line.startswith("run 1 ") for line in once)  # the last crash alone: the sum stands above it
    shown = screen_of(crashed, width=400)
    for line in (said[1], *ledger[:2]):
        assert line in shown
    assert shown.index("A restart goes on from step 2,") < shown.index("saves committed")
    page, live = (
        json.loads(CliRunner().invoke(app, [name, str(crashed), "--json"]).stdout) for name in ("report", "watch")
    )
    assert list(live) == list(page)
    assert live["restart"] == page["restart"]
    assert live["ledger"]["losses"] == page["ledger"]["losses"]


def test_watch_looks_again_when_something_was_recorded_or_some_seconds_are_over(crashed):
    """Not at each drawing: a directory of thousands is not listed each second. A file that is damaged meanwhile is seen."""
    seconds = [0.0]
    follower, heads = Follower(crashed), Openings(crashed, clock=lambda: seconds[0])
    first = heads.look(follower.look(), time.time())
    assert first.restart.step == 2
    os.truncate(next((crashed / "step-00000002").glob("model*")), 3)
    seconds[0] = 9.0
    assert heads.look(follower.look(), time.time()) is first
    seconds[0] = 11.0
    assert heads.look(follower.look(), time.time()).restart.name == ""
    again = heads.look(follower.look(), time.time())
    with (crashed / ".safe_ckpt/events.jsonl").open("a") as file:
        file.write("\n")
    assert heads.look(follower.look(), time.time()) is not again
    assert heads.look(None, time.time()) is None
