import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from datetime import timezone
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.ledger import event_log, history
from safe_ckpt.text import age, bytes_from, bytes_text, clean, counted, duration, percent, rate
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.inspection.listing import list_existing
from safe_ckpt.tools.report import page, summary
from safe_ckpt.tools.report.page import Bar, Subject
from support import flip_bit

START = 1_800_000_000.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = (
    "\"'></title></style><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;owned\x07\u202e\ud800\x00&amp;"
)


def line(event, at, **facts):
    return {"event": event, "at": START + at, "rank": 0, **facts}


def a_save(step, at, *, seconds=2.0, stall_s=0.1, size=1000, error=None):
    name, path = f"step-{step}", f"/r/step-{step}"
    said = [
        line("snapshotted", at, name=name, step=step, size_bytes=size, stall_s=stall_s),
        line("written", at, name=name, step=step, size_bytes=size, seconds=0.5),
    ]
    if error is not None:
        return [*said, line("failed", at, name=name, step=step, error=error)]
    return [
        *said,
        line("committed", at, name=name, step=step, path=path, sequence=step, size_bytes=size, seconds=seconds),
    ]


def record(folder, events, name="events.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def told(events):
    read = [event_log.parse(json.dumps(event).encode()) for event in events]
    return history.build_history(event_log.Recording(events=tuple(event for event in read if event)))


def rendered(events, **subject):
    facts = {"directory": "/r", "made_at": START + 600, "zone": timezone.utc, **subject}
    return page.render(told(events), Subject(**facts))


def drawn(*args):
    return str(page.TEMPLATES.get_template("drawings.html").module.chart(page.plot(*args)))


def test_events_are_found_where_each_adapter_leaves_them(tmp_path):
    """In the hidden folder, in Transformers', beside Accelerate's checkpoints; rotated ones in order; else nowhere."""
    assert event_log.find_events(tmp_path / "missing") == ()
    assert event_log.find_events(tmp_path) == ()
    hidden = tmp_path / ".safe_ckpt"
    for name in (
        "events.jsonl",
        "events.jsonl.2",
        "events.jsonl.10",
        "events.jsonl.1",
        "events.jsonl.bak",
        "events.jsonl.01",
    ):
        record(hidden, [], name)
    expected = tuple(hidden / f"events.jsonl{suffix}" for suffix in ("", ".1", ".2", ".10"))
    assert event_log.find_events(tmp_path) == expected
    (tmp_path / "checkpoints").mkdir()
    assert event_log.find_events(tmp_path / "checkpoints") == expected
    assert event_log.find_events(hidden) == expected
    other = record(tmp_path / "out/_safe_ckpt", [])
    assert event_log.find_events(tmp_path / "out") == (other,)


def test_only_the_last_events_are_read_and_that_is_said(tmp_path, monkeypatch):
    """Across rotated files, whatever the blocks they are read in; what is no event is counted, not fatal."""
    monkeypatch.setattr(event_log, "_BLOCK_BYTES", 7)
    older = record(tmp_path, [line("committed", at, step=at) for at in range(5)], "events.jsonl.1")
    newer = record(tmp_path, [line("committed", at, step=at) for at in range(5, 10)])
    with newer.open("ab") as file:
        file.write(
            b'\n{"event": "torn", "at": 18\n[1]\n\xff\xfe\n{"event": 3, "at": 1800000000}\n{"event": "x", "at": 1e400}\n'
        )
        file.write(b'{"event": "x", "at": ' + b"9" * 5000 + b"}\n" + b"[" * 60_000 + b"\n")
    everything = event_log.read_events((newer, older))
    assert [event.count("step") for event in everything.events] == list(range(10))
    assert (everything.skipped, everything.earlier) == (7, False)
    last = event_log.read_events((newer, older), most=7)
    assert [event.count("step") for event in last.events] == list(range(3, 10))
    assert last.earlier
    assert not event_log.read_events((newer, older), most=10).earlier


def test_a_line_without_an_end_takes_no_memory(tmp_path, monkeypatch):
    """Of a line longer than allowed a mark is kept: it counts as one that is no event, and those around it are read."""
    monkeypatch.setattr(event_log, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(event_log, "_MOST_LINE_BYTES", 256)
    path = record(tmp_path, [line("committed", 1, step=1)])
    with path.open("a") as file:
        file.write('{"event": "x", "pad": "' + "a" * 100_000 + '"}\n' + json.dumps(line("committed", 2, step=2)) + "\n")
    with path.open("rb") as stream:
        assert max(map(len, event_log._backward(stream))) < 600
    read = event_log.read_events((path,))
    assert [event.count("step") for event in read.events] == [1, 2]
    assert read.skipped == 1


def test_a_file_that_is_rotated_while_it_is_read_counts_once(tmp_path):
    """The same file under two names is read under the first only; one that is gone is passed over."""
    path = record(tmp_path, [line("committed", 1, step=1)])
    os.link(path, tmp_path / "events.jsonl.1")
    files = (tmp_path / "gone", path, tmp_path / "events.jsonl.1")
    assert len(event_log.read_events(files).events) == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_KINDS = [
    "run",
    "agreed",
    "snapshotted",
    "written",
    "committed",
    "failed",
    "removed",
    "retained",
    "resumed",
    "quarantined",
]
_KEYS = [
    "name",
    "step",
    "size_bytes",
    "stall_s",
    "seconds",
    "path",
    "error",
    "phase",
    "host",
    "pid",
    "versions",
    "rejected",
]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*_KINDS, "respawned", "stoprequested", "unknown"]),
            st.floats(0, 1e5),
            st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=8),
        ),
        max_size=12,
    )
)
@example([("run", 0.0, {"seconds": 63935510401})])  # begun before the year 1
def test_values_of_any_type_make_a_page(events):
    """Whatever the fields hold and in whatever order events come: a page of well-formed HTML, and JSON."""
    recorded = told([line(kind, at, **facts) for kind, at, facts in events])
    text = page.render(recorded, Subject(directory="/r", made_at=START))
    Elements().read(text)
    json.dumps(summary.total(recorded).__dict__, default=str)


def test_the_report_tells_what_became_of_each_save():
    """Committed, failed, cut short by a kill, in flight; stalls, throughput, work at risk and what lay on the disk."""
    events = [
        line("run", 0, pid=7, host="node", world_size=2, versions={"torch": "2.13"}),
        *a_save(10, 20),
        *a_save(20, 40, size=3000),
        line("removed", 40.1, path="/r/step-10"),
        line("retained", 40.1, kept=["step-20"], removed=["/r/step-10"], freed_bytes=1000, seconds=0.01),
        *a_save(30, 60, error="no space"),
        line("agreed", 70, name="step-40", step=40, seconds=0.5),
        line("run", 100, pid=8),
        line("resumed", 101, path="/r/step-20", step=20, seconds=1.0, rejected=1),
        {**line("committed", 105, name="step-x", step=1), "rank": 3},
        *a_save(30, 110),
        line("agreed", 119.5, name="step-40", step=40, seconds=0.5),
        line("novelty", 119.9),
    ]
    whole = told(events)
    assert [(save.step, save.run, save.outcome) for save in whole.saves] == [
        (10, 1, "committed"),
        (20, 1, "committed"),
        (30, 1, "failed"),
        (40, 1, "interrupted"),
        (30, 2, "committed"),
        (40, 2, "in flight"),
    ]
    assert [run.seconds for run in whole.runs] == [70, 19.5]
    assert (whole.runs[0].host, whole.runs[0].world_size, dict(whole.runs[0].versions)) == (
        "node",
        2,
        {"torch": "2.13"},
    )
    # From the call for step 10 to the commit of step 20; from the resume to the commit of step 30.
    assert [save.at_risk_s for save in whole.of("committed")] == [None, 22, 9]
    assert [save.kept_bytes for save in whole.of("committed")] == [1000, 4000, 4000]
    assert whole.saves[1].gbps == pytest.approx(3000 / 0.5 / 1e9)
    assert whole.saves[2].error == "no space"
    figures = summary.total(whole)
    assert (figures.committed, figures.failed, figures.interrupted, figures.in_flight) == (3, 1, 1, 1)
    # From the call for step 10 to the one for step 40, and from that for step 30 to that for step 40.
    assert figures.spanned_s == pytest.approx(69.5 - 18 + 119 - 108)
    assert figures.stall_share == pytest.approx(0.4 / figures.spanned_s)
    assert figures.at_risk_s == 70 - 38  # run 1 ended with saves after the last one that was committed
    assert (figures.removed, figures.freed_bytes) == (1, 1000)
    assert summary.verdict(figures) == "3 saves committed, 1 failed."
    assert summary.sentences(figures, START + 230)[0] == "Last committed: step 30, 2 minutes ago."
    assert "1 passed over" in whole.notices[0].text


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ([], None),
        ([(10, "")], "The mirror is 2 saves behind."),
        ([(10, ""), (20, "no answer"), (30, "no answer")], "The mirror is 2 saves behind."),
        ([(20, "no answer")], "The mirror is 3 saves behind."),
        ([(20, "no answer"), (30, "")], "The mirror has a copy of it."),
        ([(10, "no answer"), (20, ""), (30, "no answer")], "The mirror is 1 save behind."),
    ],
)
def test_how_far_a_mirror_is_behind_is_told(outcomes, says):
    """In the sentences of every view; that copies fail is told once, until one succeeds."""
    copies = [
        line("mirrored", 100 + at, path=f"/r/step-{step}", url=f"/far/step-{step}", error=error)
        for at, (step, error) in enumerate(outcomes)
    ]
    whole = told([*a_save(10, 20), *a_save(20, 30), *a_save(30, 40), *copies])
    found = [one for one in summary.sentences(summary.total(whole), START + 230) if "mirror" in one]
    assert found == ([says] if says else [])
    errors = [error for _, error in outcomes]
    begun = sum(bool(error) and not before for before, error in zip(["", *errors], errors, strict=False))
    assert [notice.kind for notice in whole.notices] == ["mirrored"] * begun


def test_what_a_killed_job_deleted_and_did_not_record_is_not_counted():
    """What retention kept is what is there; checkpoints in other folders are none of its business."""
    other = {**a_save(1, 5)[-1], "path": "/other/step-1"}
    kept = line("retained", 41, kept=["step-20", "step-30"], removed=[], freed_bytes=0, seconds=0.1)
    whole = told([other, *a_save(10, 20), *a_save(20, 30), *a_save(30, 40), kept, *a_save(40, 50)])
    assert [save.kept_bytes for save in whole.saves] == [1000, 2000, 3000, 4000, 4000]


def test_many_kept_ones_are_named_in_part():
    """``kept`` has the newest names, ``kept_count`` counts all: those beyond are there, as many as are counted and no more."""
    saves = [event for step in range(1, 6) for event in a_save(step, 10 * step)]
    for count, held in ((5, 6000), (3, 4000), (2, 3000)):
        kept = line("retained", 55, kept=["step-4", "step-5"], kept_count=count, removed=[], freed_bytes=0)
        assert told([*saves, kept, *a_save(6, 60)]).saves[-1].kept_bytes == held


def test_the_report_does_not_call_an_unknown_outcome_failed():
    """A save that may be committed is counted and told as that: verdict, timeline and failures do not say failed."""
    unknown = line("failed", 20, name="step-2", step=2, error="rank 0 was lost", outcome_unknown=True)
    history_ = told([*a_save(1, 10), unknown])
    figures = summary.total(history_)
    assert (figures.failed, figures.unknown, history_.saves[-1].outcome) == (0, 1, "outcome unknown")
    text = rendered([*a_save(1, 10), unknown])
    assert "1 save committed, none failed, 1 with an unknown outcome." in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "outcome unknown: rank 0 was lost" in text
    assert "not all is well" in text
    assert "not committed" not in text
    assert ": failed" not in text


def test_failures_in_a_row_are_one_entry():
    """Those that differ in numbers only, with no commit in between: the last text and how many they are."""
    full = [event for step in (10, 20, 30) for event in a_save(step, step, error=f"{step} bytes free")]
    text = rendered([*full, *a_save(40, 40), *a_save(50, 50, error="50 bytes free"), *a_save(60, 60, error="stalled")])
    seen = Elements().read(text)
    start = seen.texts.index("step 10 to step 30")
    assert seen.texts[start : start + 3] == ["step 10 to step 30", "3", "30 bytes free"]
    assert "20 bytes free" not in seen.texts
    assert {"50 bytes free", "stalled"} <= set(seen.texts)
    assert "5 failures, newest first." in text


def test_the_report_counts_an_export_as_no_checkpoint():
    """An export counts as a save, but neither as the last commit nor as work that is safe, nor as a checkpoint on the disk."""
    export = {**a_save(0, 50)[-1], "name": "weights", "weights_only": True}
    whole = told([*a_save(10, 20), *a_save(20, 40), export, *a_save(30, 60)])
    figures = summary.total(told([*a_save(10, 20), export]))
    assert (figures.committed, figures.last.step) == (2, 10)
    assert [save.at_risk_s for save in whole.saves] == [None, 22, None, 22]
    assert [save.kept_bytes for save in whole.saves] == [1000, 2000, None, 3000]


def test_runs_are_told_apart_in_older_records():
    """Without lines that say when a run begins, a resume does, once something was saved."""
    resumed = line("resumed", 0, path="/r/x", step=1, seconds=1.0, rejected=0)
    aside = line("quarantined", 29, path="/r/y", moved_to="z", reason="bits")
    events = [resumed, *a_save(2, 10), aside, {**resumed, "at": START + 30}, *a_save(2, 40), *a_save(3, 60)]
    assert [(run.number, run.seconds) for run in told(events).runs] == [(1, 30), (2, 31)]


def test_a_real_run_arrives_on_the_page_and_in_the_json(tmp_path):
    """Two runs of a Checkpointer: saves, retention, a quarantine and a resume arrive on the page and in the JSON."""
    config = CheckpointConfig(retention=Retention(keep_last=2))
    state = {"w": {"t": torch.ones(1000)}}
    with Checkpointer(tmp_path, config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state, metrics={"loss": 0.5}).result(timeout_s=20)
    flip_bit(tmp_path / "step-00000003/w.safetensors", 4100)
    with Checkpointer(tmp_path, config) as ckpt:
        assert ckpt.resume(state).step == 2
        ckpt.save(4, state).result(timeout_s=20)
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "4 saves committed, none failed." in done.output
    text = output.read_text()
    seen = Elements().read(text)
    assert {"step-00000004", "step-00000002", "loss 0.5", "quarantined: found damaged by a resume"} <= set(seen.texts)
    assert seen.texts.count("valid") == 2
    assert os.listdir(tmp_path / ".safe_ckpt/quarantine") == ["step-00000003"]
    data = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).stdout)
    assert data["totals"]["committed"] == 4
    assert data["totals"]["last"]["step"] == 4
    assert [notice["kind"] for notice in data["notices"]] == ["quarantined", "resumed"]
    assert all(save["stall_s"] > 0 and save["write_s"] > 0 for save in data["saves"])
    assert [os.path.basename(removal["path"]) for removal in data["removals"]] == ["step-00000001"]


def test_what_accelerate_keeps_is_listed(tmp_path, monkeypatch):
    """Below its project directory the checkpoints lie in ``checkpoints``; what cannot be listed is said."""
    with Checkpointer(tmp_path / "checkpoints") as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=20)
    rows, problem = list_existing(tmp_path)
    assert ([row.name for row in rows], problem) == (["checkpoints/step-00000001"], "")
    with monkeypatch.context() as newer, Checkpointer(tmp_path / "checkpoints") as ckpt:
        newer.setattr("safe_ckpt.core.formats.manifest.FORMAT_VERSION", 99)
        ckpt.save(2, {"x": 1}).result(timeout_s=20)
    assert "newer" in list_existing(tmp_path)[1]


def test_the_report_without_events_or_target_ends_with_status_1(tmp_path):
    """No events: status 1 and what to do. A page that cannot be written: status 1, and nothing half-written."""
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "record_events" in done.stderr
    record(tmp_path / ".safe_ckpt", a_save(1, 10))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "missing/page.html")])
    assert done.exit_code == 1
    assert "--output" in done.stderr
    assert os.listdir(tmp_path) == [".safe_ckpt"]
    assert CliRunner().invoke(app, ["report", str(tmp_path), "-o", "-"]).stdout.startswith("<!DOCTYPE html>")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "missing")]).exit_code == 2


class Elements(HTMLParser):
    """Reads a page and refuses what is not well-formed."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.texts, self._open = [], [], [], []

    def read(self, text):
        text.encode()
        self.feed(text)
        self.close()
        assert self._open == []
        return self

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def hostile_events():
    bad = dict.fromkeys(("name", "path", "error", "phase", "host", "reason", "ended", "signal", "moved_to"), HOSTILE)
    kinds = ("run", "agreed", "committed", "failed", "removed", "resumed", "quarantined", "respawned", "stoprequested")
    return [line(kind, 10 * at, **bad, versions={HOSTILE: HOSTILE}, seconds=1) for at, kind in enumerate(kinds)]


def test_nothing_that_was_recorded_breaks_out_of_the_page(tmp_path):
    """Hostile names, errors, versions and metrics are text: no element, attribute or escape sequence of theirs is there."""
    (tmp_path / "step-00000001\x1b<b>").mkdir()
    shutil.copytree(_checkpoint(tmp_path / "made"), tmp_path / "<script>alert(3)</script>".replace("/", "|"))
    existing, problem = list_existing(tmp_path)
    text = rendered(hostile_events(), directory=HOSTILE, existing=existing, problem=problem or HOSTILE)
    seen = Elements().read(text)
    assert any("<script>" in part for part in seen.texts)  # it is there, as text
    assert not {"script", "img", "iframe", "a", "link", "b"} & set(seen.tags)
    names = {name for _, name, _ in seen.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "href", "style", "xlink:href"}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", text)


def _checkpoint(folder):
    with Checkpointer(folder) as ckpt:
        return ckpt.save(1, {"x": 1}, metrics={HOSTILE: 1.0}).result(timeout_s=20).path


def test_the_policy_of_the_page_forbids_scripts_and_foreign_content():
    """Its policy forbids scripts and everything from elsewhere, and allows exactly the style sheet that it has."""
    text = rendered(a_save(1, 10))
    seen = Elements().read(text)
    policy = next(
        value for tag, name, value in seen.attributes if tag == "meta" and name == "content" and "src" in value
    )
    digest = base64.b64encode(hashlib.sha256(re.search("<style>(.*)</style>", text, re.DOTALL)[1].encode()).digest())
    assert policy == f"default-src 'none'; style-src 'sha256-{digest.decode()}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in page.CSS
    assert "http" not in text.replace("http-equiv", "")


def test_bars_begin_at_zero_and_failures_are_told_by_shape_and_text():
    """Heights are as the values are; a failed save is a cross with its name; the unit and the range stand in words."""
    values = [Bar(label=f"step {step}", value=step / 10) for step in (1, 2, 4)]
    text = drawn("Stall", "Note.", [*values, Bar(label="step 5", value=None, failed=1)], "seconds", "longest")
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', text)]
    assert heights == pytest.approx([heights[0], 2 * heights[0], 4 * heights[0]], rel=1e-3)
    assert 'class="mark failed"' in text
    assert "step 5: failed" in text
    assert 'aria-label="Stall, ms. 4 bars from 100 ms to 400 ms. Note."' in text
    assert text.count("<title>") == 4


def test_a_bar_that_is_cut_off_is_said():
    """One value far above the others does not flatten them: its bar ends at the top with a mark, and a sentence says so."""
    values = [Bar(label=f"step {step}", value=0.01) for step in range(50)]
    text = drawn("Stall", "Note.", [*values, Bar(label="step 50", value=9.0)], "seconds", "longest")
    assert "Cut off at the top, marked with a triangle: step 50 with 9 s." in text
    assert text.count('class="mark cut"') == 1
    assert page.fit([0.01] * 50 + [9.0], "seconds").top < 0.05


def test_many_saves_share_bars_that_show_the_worst():
    """Any number of saves makes at most 90 bars, each the worst of its saves, and a page of a size that can be sent."""
    values = [Bar(label=f"step {step}", value=1.0 + (step == 7)) for step in range(1000)]
    for worst, first in (("longest", "step 7: 2 s"), ("slowest", "step 0: 1 s")):
        text = drawn("Stall", "Note.", values, "seconds", worst)
        assert text.count("<rect") <= 90
        assert first in text
        assert f"A bar stands for 12 saves and shows the {worst} of them." in text
    events = [event for step in range(2000) for event in a_save(step, 10 * step)]
    assert len(rendered(events)) < 400_000


@pytest.mark.parametrize("count", [90, 91, 250])
def test_many_saves_share_bars_that_tell_every_failure(count):
    """However many saves share a bar: each chart tells of as many failures as there were, and where a run began."""
    saved = [a_save(step, 10 * step, error="OSError: full" if step % 3 else None) for step in range(count)]
    saved.insert(count // 2, [line("resumed", 10 * (count // 2) - 1, name="step-1", step=1)])
    figures = re.findall("<figure>.*?</figure>", rendered([event for events in saved for event in events]), re.DOTALL)
    assert len(figures) > 3
    for text in figures:
        many = re.findall(r"<title>around step \d+: (\d+) failed</title>", text)
        assert sum(map(int, many)) + text.count(": failed</title>") == sum(step % 3 > 0 for step in range(count))
        assert text.count('class="resumed"') == 1


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=200), st.sampled_from(sorted(page.UNITS)))
def test_every_axis_begins_at_zero_and_has_room(values, quantity):
    """Three ticks in even steps from zero; no value goes beyond the top but those that are far above the others."""
    axis = page.fit(values, quantity)
    places = [value for value, _ in axis.ticks]
    assert places[0] == 0
    assert places[2] == pytest.approx(2 * places[1])
    assert axis.top >= 0.99 * sorted(values)[int(0.95 * (len(values) - 1))]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (duration(0), "0 s"),
        (duration(0.00025), "250 µs"),
        (duration(0.01234), "12.3 ms"),
        (duration(0.9999), "1 s"),
        (duration(600), "10 min"),
        (duration(9000), "2.5 h"),
        (duration(None), ""),
        (age(0.5), "a moment"),
        (age(1), "1 second"),
        (age(7199), "1 hour"),
        (percent(0.00312), "0.31 %"),
        (percent(1e-6), "less than 0.01 %"),
        (percent(0), "0 %"),
        (rate(1.234), "1.23 GB/s"),
        (rate(0.0456), "45.6 MB/s"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_from("1.5 KiB"), 1536),
        (bytes_from("5GB"), 5 * 10**9),
        (bytes_from("2gib"), 2 << 30),
        (bytes_from("3 M"), 3 * 10**6),
        (bytes_from("7"), 7),
        (bytes_from("7B"), 7),
        (bytes_from("1TiB"), 1 << 40),
        (bytes_from("five"), 0),
        (counted(20000, "save"), "20\xa0000 saves"),
        (clean("a\nb\x1b[2J"), "a b�[2J"),
        (clean("x" * 5, most=3), "xxx…"),
    ],
)
def test_numbers_and_times_of_the_report_are_as_people_read_them(said, expected):
    """Numbers and times as people read them."""
    assert said == expected


def _colours(scheme):
    block = re.search(
        r"dark\)\{:root\{(.*?)\}" if scheme == "dark" else r"^:root\{(.*?)\}", page.CSS, re.DOTALL | re.MULTILINE
    )[1]
    return dict(re.findall(r"--(\w+):#([0-9a-f]+)", block))


def _contrast(one, other):
    def light(colour):
        parts = re.findall("..", colour if len(colour) == 6 else "".join(2 * digit for digit in colour))
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (int(p, 16) / 255 for p in parts)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((light(one), light(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_the_contrast_of_wcag_aa_light_and_dark(scheme):
    """Text has a contrast of 4.5 and more on what it stands on, marks of 3 and more: WCAG AA, light and dark."""
    colours = _colours(scheme)
    for text in ("text", "soft", "good", "bad", "note"):
        for ground in ("page", "card"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark, ground in (("bar", "card"), ("bar", "track"), ("bad", "track"), ("zero", "card")):
        assert _contrast(colours[mark], colours[ground]) >= 3, (mark, ground)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_in_a_browser_never_scrolls_sideways(tmp_path):
    """No width from 320 pixels on scrolls sideways, even with names that never end; in the dark the page is dark."""
    long = "x" * 900
    events = [
        *hostile_events(),
        *a_save(1, 100, error=long),
        *a_save(10**17, 200),
        line("resumed", 300, path=long, step=1),
    ]
    rows, _ = list_existing(_checkpoint(tmp_path / "made").parent)
    (tmp_path / "page.html").write_text(rendered(events, directory=long, existing=rows))
    (tmp_path / "frame.html").write_text(
        "<!DOCTYPE html><body>"
        + "".join(
            f'<iframe width={width} height=700 style="border:0" src=page.html></iframe>'
            for width in (320, 360, 768, 1280)
        )
        + """<pre></pre><script>onload = () => document.querySelector('pre').textContent = JSON.stringify(
        [...document.querySelectorAll('iframe')].map(f => [f.width, f.contentDocument.documentElement.scrollWidth,
        f.contentWindow.getComputedStyle(f.contentDocument.body).backgroundColor]))</script>"""
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path}/profile",
    ]
    dark = "--blink-settings=preferredColorScheme=0"
    command = [CHROMIUM, *flags, dark, "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    measured = json.loads(re.search("<pre>(.*)</pre>", done.stdout)[1])
    assert [int(wide) for _, wide, _ in measured] == [320, 360, 768, 1280]
    assert {colour for _, _, colour in measured} == {"rgb(14, 19, 24)"}
