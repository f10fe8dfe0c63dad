"""The hooks that come along: the record, the textfile, spans, and numbers for trackers."""

import errno
import json
import logging
import os
import re
import sys
import threading

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer, Telemetry
from safe_ckpt.errors import ConfigError
from safe_ckpt.events import (
    Agreed,
    Committed,
    Failed,
    Quarantined,
    Respawned,
    Resumed,
    Snapshotted,
    StopRequested,
    Unhealthy,
    Written,
)
from safe_ckpt.hooks import asked_for, event_log
from safe_ckpt.hooks.event_log import JsonlHook
from safe_ckpt.hooks.logging_hook import LoggingHook
from safe_ckpt.hooks.opentelemetry import OpenTelemetryHook
from safe_ckpt.hooks.prometheus import PrometheusHook
from safe_ckpt.hooks.scalars import ScalarsHook


def removed(number):
    return Quarantined(rank=0, path=f"step-{number}", moved_to="x" * 100, reason="")


def save(step, *, size=8_000_000, at=1000.0, failed=False, weights_only=False):
    """The events of one save that was called at ``at``, took 1 s to write, and was over after 3 s."""
    name = f"step-{step}"
    facts = {"rank": 0, "name": name, "step": step}
    story = [
        Agreed(at=at + 0.1, seconds=0.1, **facts),
        Snapshotted(at=at + 0.5, size_bytes=size, stall_s=0.5, **facts),
        Written(at=at + 2, size_bytes=size, seconds=1.0, **facts),
    ]
    if failed:
        return [*story, Failed(at=at + 3, error="the disk", phase="commit", seconds=3.0, missing=(1,), **facts)]
    ended = {"path": name, "sequence": step, "size_bytes": 2 * size, "seconds": 3.0, "weights_only": weights_only}
    return [*story, Committed(at=at + 3, **ended, **facts)]


def tell(hook, events):
    for event in events:
        hook(event)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_run_begins_with_a_line_of_its_own(tmp_path):
    """A report must tell runs apart: who, where, how many ranks, which versions."""
    path = tmp_path / "events.jsonl"
    for world_size in (1, 4):
        hook = JsonlHook(path, world_size=world_size)
        assert path.exists() == (world_size == 4), "nothing is written before something happened"
        tell(hook, save(1))
    found = lines(path)
    assert [line["event"] for line in found] == 2 * ["run", "agreed", "snapshotted", "written", "committed"]
    assert found[4] == {"event": "committed", **vars(save(1)[-1])}
    assert [found[at]["world_size"] for at in (0, 5)] == [1, 4]
    assert found[0]["pid"] == os.getpid()
    assert found[0]["rank"] == 0
    assert found[0]["versions"]["torch"] == torch.__version__
    assert {"host", "at"} <= set(found[0])


def test_a_torn_line_spoils_no_other(tmp_path):
    """What a job was writing when it was killed stays a line of its own."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "removed"}\n{"event": "comm')
    JsonlHook(path)(removed(1))
    found = path.read_text().splitlines()
    assert found[1] == '{"event": "comm'
    assert [json.loads(line)["event"] for line in (found[0], *found[2:])] == ["removed", "run", "quarantined"]


@pytest.mark.parametrize("files", [0, 1, 3])
def test_the_record_stays_within_its_bounds(tmp_path, files):
    """No file is larger than allowed, no more are kept, no line is torn, and what is there has no gap up to the last."""
    path = tmp_path / "events.jsonl"
    hook = JsonlHook(path, record_bytes=4096, record_files=files)
    tell(hook, map(removed, range(200)))
    names = [*(f"events.jsonl.{number}" for number in range(files, 0, -1)), "events.jsonl"]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert all((tmp_path / name).stat().st_size <= 4096 for name in names)
    numbers = [int(line["path"].removeprefix("step-")) for name in names for line in lines(tmp_path / name)]
    assert numbers == list(range(200 - len(numbers), 200))
    assert all(len(lines(tmp_path / name)) > 15 for name in names[:-1])


def test_threads_do_not_mix_their_lines(tmp_path):
    """The background and the thread that trains tell at the same time, also while the file is changed for a new one."""
    hook = JsonlHook(tmp_path / "events.jsonl", record_bytes=8192, record_files=100)
    threads = [threading.Thread(target=tell, args=(hook, [removed(each)] * 100)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [line["path"] for file in tmp_path.iterdir() for line in lines(file) if line["event"] != "run"]
    assert sorted(found) == sorted(f"step-{each}" for each in range(4) for _ in range(100))


def test_what_a_person_should_act_on_is_logged_as_a_sentence(caplog):
    """One for each event, what is unhealthy from one rank; a failed save has its error, and is not told twice."""
    unhealthy = {"name": "s", "step": 3, "path": "s", "what": "w has 1 NaN", "marked": True}
    story = [
        *save(1, failed=True),
        removed(2),
        Respawned(rank=1, pid=7, ended="was killed by SIGKILL", name="s"),
        *(Unhealthy(rank=rank, **unhealthy) for rank in range(2)),
        StopRequested(rank=1, signal="SIGTERM", by_rank=2, left_s=30.4, forecast_s=0.25),
    ]
    with caplog.at_level(logging.WARNING):
        tell(LoggingHook(), story)
    assert [record.getMessage() for record in caplog.records] == [
        f"step-2 was moved to {'x' * 100}: ",
        "s: the writer of rank 1 (process 7) was replaced: was killed by SIGKILL",
        "s is unhealthy: w has 1 NaN; it is resumed from by name alone",
        "SIGTERM on rank 2: every rank saves and stops after this step. 30 s are left, and a save should take 0.2 s",
    ]
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        tell(LoggingHook(), save(1, failed=True))
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "agreed",
        "snapshotted",
        "written",
        "failed",
    ]


def test_the_record_goes_on_when_the_disk_does(tmp_path, caplog):
    """A disk that refuses costs lines and one warning, not the record."""
    hook = JsonlHook(tmp_path / "later/events.jsonl")
    with caplog.at_level(logging.WARNING):
        tell(hook, [removed(1), removed(2)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / "later").mkdir()
    hook(removed(3))
    assert [line.get("path") for line in lines(tmp_path / "later/events.jsonl")] == [None, "step-3"]


def test_a_line_that_the_disk_takes_in_pieces_is_whole(tmp_path, monkeypatch):
    """Writing goes on where a write was short; a disk that then is full costs that line and a warning, and no other line."""
    path, write, room = tmp_path / "events.jsonl", os.write, [10**6]

    def short(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space")
        done = write(file, data[: min(7, room[0])])
        room[0] -= done
        return done

    hook = JsonlHook(path)
    monkeypatch.setattr(event_log.os, "write", short)
    tell(hook, save(1))
    assert [line["event"] for line in lines(path)] == ["run", "agreed", "snapshotted", "written", "committed"]
    room[0] = 10
    hook(removed(1))
    room[0] = 10**6
    hook(removed(2))
    found = path.read_text().splitlines()
    assert len(found[5]) == 10
    assert json.loads(found[6])["path"] == "step-2"


def test_a_run_does_not_begin_after_its_first_event(tmp_path):
    """Who sorts the lines by time finds the run's own first."""
    hook = JsonlHook(tmp_path / "events.jsonl")
    tell(hook, save(1))
    run, first, *_ = lines(tmp_path / "events.jsonl")
    assert run["at"] <= first["at"]


def samples(path):
    """Parses the text format strictly; name -> (type, value)."""
    found, types = {}, {}
    text = path.read_text()
    assert text.endswith("\n")
    for line in text.splitlines():
        if (declared := re.fullmatch(r"# (HELP|TYPE) (safe_ckpt_[a-z_]+) (.+)", line)) is not None:
            types.setdefault(declared[2], []).append(declared[1] if declared[1] == "HELP" else declared[3])
            continue
        sample = re.fullmatch(r'(safe_ckpt_[a-z_]+)\{run="exp"\} (\S+)', line)
        assert sample is not None, line
        what, kind = types[sample[1]]
        assert what == "HELP"
        found[sample[1].removeprefix("safe_ckpt_")] = (kind, float(sample[2]))
    assert len(types) == len(found)
    return found


def test_the_textfile_says_what_happened(tmp_path):
    """Gauges of the last checkpoint, counters of everything; a failure and an export change no gauge."""
    path = tmp_path / "exp.prom"
    hook = PrometheusHook(path)
    tell(hook, save(5))
    assert samples(path)["saves_committed_total"] == ("counter", 1)
    before = path.read_text()
    with path.open() as scrape:
        tell(hook, save(6, at=2000.0))
        assert scrape.read() == before, "it is replaced: a scrape that has begun sees the old one, whole"
    tell(hook, save(7, at=3000.0, failed=True))
    tell(hook, save(0, at=4000.0, weights_only=True))
    tell(hook, save(8, at=5000.0, size=0))  # another name for what is there
    tell(hook, [Respawned(rank=0, pid=1, ended="died"), removed(1), removed(2)])
    tell(hook, [Unhealthy(rank=0, name="step-6", step=6, path="x", what="w has 1 NaN", marked=True)])
    assert os.listdir(tmp_path) == ["exp.prom"]
    assert samples(path) == {
        "last_committed_step": ("gauge", 6),
        "last_committed_timestamp_seconds": ("gauge", 2003),
        "last_save_seconds": ("gauge", 3),
        "last_stall_seconds": ("gauge", 0.5),
        "last_write_bytes_per_second": ("gauge", 8e6),
        "saves_committed_total": ("counter", 3),
        "saves_failed_total": ("counter", 1),
        "bytes_written_total": ("counter", 48e6),
        "respawns_total": ("counter", 1),
        "quarantined_total": ("counter", 2),
        "unhealthy_total": ("counter", 1),
    }


def test_a_restarted_run_still_says_when_it_last_committed(tmp_path):
    """An alert on the time since the last commit holds while the first saves after a restart fail; counters begin anew."""
    path = tmp_path / "exp.prom"
    tell(PrometheusHook(path), save(6, at=2000.0))
    tell(hook := PrometheusHook(path), save(7, at=3000.0, failed=True))
    found = samples(path)
    assert found["last_committed_step"] == ("gauge", 6)
    assert found["last_committed_timestamp_seconds"] == ("gauge", 2003)
    assert (found["saves_committed_total"], found["saves_failed_total"]) == (("counter", 0), ("counter", 1))
    assert "last_save_seconds" not in found
    tell(hook, save(8, at=4000.0))
    assert samples(path)["last_committed_step"] == ("gauge", 8)


@pytest.mark.parametrize(
    "left",
    [
        b"\xff\x00",
        b'safe_ckpt_last_committed_step{run="other"} 5\n',
        b'safe_ckpt_last_committed_step{run="exp"} 5.5\nsafe_ckpt_last_committed_timestamp_seconds{run="exp"} 1e999\n',
        b'safe_ckpt_last_committed_step{run="exp"} soon\nsafe_ckpt_last_committed_timestamp_seconds{run="exp"} -+\n',
    ],
)
def test_a_textfile_with_other_content_is_passed_over(tmp_path, left):
    """Bytes of anybody, another run's numbers, and numbers that cannot be: neither an error nor a gauge."""
    path = tmp_path / "exp.prom"
    path.write_bytes(left)
    tell(PrometheusHook(path), save(7, failed=True))
    assert not [name for name in samples(path) if name.startswith("last_")]


def test_a_textfile_that_cannot_be_is_refused_at_once(tmp_path):
    """Not hours later, when somebody looks for the numbers."""
    with pytest.raises(ConfigError, match=r"prometheus_textfile: .*nowhere: is no directory"):
        asked_for(Telemetry(prometheus_textfile=str(tmp_path / "nowhere/exp.prom")))
    with pytest.raises(ConfigError, match=r"\.prom"):
        PrometheusHook(tmp_path / "exp.txt")


def test_the_settings_are_obeyed(tmp_path):
    """One Checkpointer with everything on: the record rotates, the textfile agrees with the events."""
    seen = []
    telemetry = Telemetry(record_bytes=4096, record_files=1, prometheus_textfile=str(tmp_path / "exp.prom"))
    config = CheckpointConfig(timeouts=QUICK, telemetry=telemetry)
    with Checkpointer(tmp_path / "runs", config, hooks=[seen.append]) as ckpt:
        for step in range(1, 11):
            ckpt.save(step, {"a": step}).result(timeout_s=20)
    committed = [event for event in seen if isinstance(event, Committed)]
    found = samples(tmp_path / "exp.prom")
    assert found["last_committed_step"] == ("gauge", 10)
    assert found["last_committed_timestamp_seconds"] == ("gauge", committed[-1].at)
    assert found["bytes_written_total"] == ("counter", sum(event.size_bytes for event in committed))
    records = sorted((tmp_path / "runs/.safe_ckpt").glob("events.jsonl*"))
    assert [record.name for record in records] == ["events.jsonl", "events.jsonl.1"]
    assert all(record.stat().st_size <= 4096 for record in records)
    assert [*lines(records[1]), *lines(records[0])][-2] == {"event": "committed", **vars(committed[-1])}


@pytest.fixture
def telemetry():
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider(metric_readers=[reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    yield OpenTelemetryHook(tracers, meters), exporter, reader
    tracers.shutdown()
    meters.shutdown()


def test_a_save_is_a_span_with_its_phases_below(telemetry):
    """At the moments at which it happened, though told afterwards; a root of its own, whatever the program is in."""
    hook, exporter, _ = telemetry
    tell(hook, save(5))
    hook(Resumed(rank=0, at=20.0, path="x", step=3, seconds=5.0, rejected=1))
    spans = {span.name.removeprefix("safe_ckpt."): span for span in exporter.get_finished_spans()}
    times = {name: (span.start_time / 1e9, span.end_time / 1e9) for name, span in spans.items()}
    assert times == {
        "save": (1000, 1003),
        "snapshot": (1000, 1000.5),
        "write": (1001, 1002),
        "commit": (1002, 1003),
        "resume": (15, 20),
    }
    assert spans["save"].parent is None
    assert all(spans[name].parent.span_id == spans["save"].context.span_id for name in ("snapshot", "write", "commit"))
    assert spans["save"].attributes["safe_ckpt.step"] == 5
    assert spans["save"].attributes["safe_ckpt.size_bytes"] == 16_000_000
    assert spans["save"].status.is_unset


def test_a_failed_save_is_a_span_with_an_error(telemetry):
    """With the message, the phase and the ranks that are missing; there is no commit."""
    hook, exporter, _ = telemetry
    tell(hook, save(5, failed=True))
    spans = {span.name.removeprefix("safe_ckpt."): span for span in exporter.get_finished_spans()}
    assert set(spans) == {"save", "snapshot", "write"}
    assert spans["save"].status.status_code.name == "ERROR"
    assert spans["save"].status.description == "the disk"
    assert spans["save"].attributes["safe_ckpt.phase"] == "commit"
    assert spans["save"].attributes["safe_ckpt.missing_ranks"] == (1,)


def test_the_meter_counts_saves_bytes_and_respawns(telemetry):
    """Saves by outcome, bytes, respawns, and how long it took."""
    hook, _, reader = telemetry
    tell(hook, [*save(5), *save(6), *save(7, failed=True), Respawned(rank=0, pid=1, ended="died")])
    (resource,) = reader.get_metrics_data().resource_metrics
    metrics = {metric.name: list(metric.data.data_points) for metric in resource.scope_metrics[0].metrics}
    outcomes = {point.attributes["outcome"]: point.value for point in metrics["safe_ckpt.saves"]}
    assert outcomes == {"committed": 2, "failed": 1}
    assert [point.value for point in metrics["safe_ckpt.bytes"]] == [32_000_000]
    assert [point.value for point in metrics["safe_ckpt.respawns"]] == [1]
    assert sum(point.sum for point in metrics["safe_ckpt.save.duration"]) == 9
    assert [(point.count, point.sum) for point in metrics["safe_ckpt.save.stall"]] == [(3, 1.5)]


def test_an_exporter_that_hangs_holds_up_no_other_event(telemetry):
    """Another thread's event is taken while a span is still being exported."""
    hook, going, on = telemetry[0], threading.Event(), threading.Event()
    hook._trace = lambda save: (going.set(), on.wait(30))
    committed = Committed(rank=0, name="a", step=1, path="a", sequence=1, size_bytes=3, seconds=1.0)
    hanging = threading.Thread(target=hook, args=[committed])
    hanging.start()
    assert going.wait(30)
    other = threading.Thread(target=hook, args=[Agreed(rank=0, name="b", step=2, seconds=0.1)])
    other.start()
    other.join(30)
    taken = not other.is_alive()
    on.set()
    hanging.join(30)
    assert taken


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch):
    """At construction, not at the first save."""
    assert [type(hook) for hook in asked_for(Telemetry(opentelemetry=True))] == [OpenTelemetryHook]
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "safe_ckpt.hooks.opentelemetry")
    with pytest.raises(ConfigError, match="opentelemetry-api"):
        asked_for(Telemetry(opentelemetry=True))
    assert asked_for(Telemetry()) == []


def test_scalars_are_kept_until_a_tracker_asks_for_them():
    """By name and once; counts go on; what nobody asks for does not pile up."""
    hook = ScalarsHook()
    tell(hook, [*save(1, failed=True), Respawned(rank=0, pid=1, ended="died"), *save(2), *save(3, size=0)])
    assert hook.take("step-3") is None, "another name for what is there is no save"
    found = hook.take("step-2")
    assert (found.name, found.step) == ("step-2", 2)
    assert found.values == {
        "ckpt/stall_s": 0.5,
        "ckpt/write_gbps": 0.008,
        "ckpt/seconds": 3.0,
        "ckpt/bytes": 16e6,
        "ckpt/failures": 1,
        "ckpt/respawns": 1,
    }
    assert hook.take("step-2") is None
    assert hook.take("step-1").values == {"ckpt/failures": 1, "ckpt/respawns": 0}
    for step in range(1000):
        tell(hook, save(step))
    assert hook.take("step-0") is None
    assert hook.take("step-999").step == 999
