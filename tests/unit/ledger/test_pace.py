"""When a save is due: from the costs of this directory, between bounds, with few meetings."""

import json
import logging

import pytest

from safe_ckpt import events
from safe_ckpt.errors import ConfigError
from safe_ckpt.ledger import interval
from safe_ckpt.ledger.pace import Pace


class Alone:
    """An engine of one rank, which counts its meetings; its clock is moved by hand."""

    def __init__(self):
        self.rank, self.met, self.hooks, self.now = 0, 0, [], 1000.0
        self.emit = self

    def add(self, hook):
        self.hooks.append(hook)

    def agree(self, kind, decide):
        assert kind == "due"
        self.met += 1
        return json.loads(json.dumps(decide({})))

    def clock(self):
        return self.now

    def saved(self, stall_s, seconds=5.0, **more):
        facts = {"rank": 0, "name": "a", "step": 1, "size_bytes": 1}
        self.hooks[0](events.Snapshotted(**facts, stall_s=stall_s))
        self.hooks[0](events.Committed(**facts, path="/a", sequence=1, seconds=seconds, **more))

    def train(self, pace, steps, step_s):
        """The moments of saves, in seconds from the start."""
        begun, due = self.now, []
        for _ in range(steps):
            self.now += step_s
            if pace.due():
                due.append(self.now - begun)
        return due


def test_a_first_save_comes_early_and_the_others_as_daly_says():
    """The first after the least interval; then Daly's, with a crash a day as long as none is known; few looks are meetings."""
    engine = Alone()
    pace = Pace(engine, None, clock=engine.clock)
    assert engine.train(pace, 70, 1.0) == [pytest.approx(60, abs=2)]
    engine.saved(stall_s=2.0)
    expected = interval.daly(2.0, 86_400 + 70)
    met = engine.met
    due = engine.train(pace, 1200, 1.0)
    gaps = [b - a for a, b in zip([-10.0, *due], due, strict=False)]
    assert len(due) == 2
    assert all(gap == pytest.approx(expected, rel=0.03) for gap in gaps)
    assert engine.met - met < 120  # of 1200 looks


def test_the_interval_lies_between_its_bounds():
    """Also where a save costs nothing or very much; and it is no shorter than a save takes to be durable."""
    engine = Alone()
    pace = Pace(engine, None, least_s=100.0, most_s=500.0, clock=engine.clock)
    assert pace.every_s() == 100.0
    engine.saved(stall_s=0.0001)
    assert pace.every_s() == 100.0
    engine.saved(stall_s=1e6)
    engine.saved(stall_s=1e6)
    assert pace.every_s() == 500.0
    engine.saved(stall_s=0.0001, seconds=300.0)
    for _ in range(5):
        engine.saved(stall_s=0.0001)
    assert pace.every_s() == 300.0
    with pytest.raises(ConfigError, match="least_s"):
        Pace(engine, None, least_s=2, most_s=1)


def test_the_latest_saves_say_what_one_costs():
    """A model that grew: what its first saves cost counts no more behind 50 others."""
    engine = Alone()
    pace = Pace(engine, None, least_s=1.0, most_s=1e6, clock=engine.clock)
    for stall_s, seconds in ((0.01, 900.0), (4.0, 5.0)):
        for _ in range(50):
            engine.saved(stall_s=stall_s, seconds=seconds)
    assert pace.every_s() == pytest.approx(interval.daly(4.0, 86_400))


def test_a_save_of_weights_alone_does_not_say_how_long_one_takes():
    """It is another save than the one that is due."""
    engine = Alone()
    pace = Pace(engine, None, least_s=10.0, clock=engine.clock)
    engine.saved(stall_s=0.0001, seconds=20.0)
    engine.saved(stall_s=0.0001, seconds=300.0, weights_only=True)
    assert pace.every_s() == 20.0


def test_a_meeting_is_well_ahead_of_the_moment_at_which_a_save_is_due():
    """Steps that become twice as slow between two meetings delay a save by less than half of what was left."""
    engine = Alone()
    pace = Pace(engine, None, least_s=20.0, clock=engine.clock)
    engine.train(pace, 10, 1.0)
    (late,) = engine.train(pace, 10, 1.4)[:1]
    assert late <= 20.0 - 10.0 + 1.4


def test_steps_that_become_slow_delay_a_save_by_half_a_minute_of_looks():
    """A meeting is at most half a minute of usual steps ahead."""
    engine = Alone()
    pace = Pace(engine, None, least_s=1000.0, clock=engine.clock)
    engine.train(pace, 1000, 0.1)
    (late,) = engine.train(pace, 301, 10.0)[:1]
    assert late <= 301 * 10


def test_crashes_of_this_directory_shorten_it(tmp_path):
    """Four kills in the record of the runs before; a record that cannot be read does not count, and that is said."""
    lines, at = [], 1_800_000_000.0
    for run in range(5):
        began = at + 1000 * run
        facts = {"rank": 0, "pid": run, "host": "h", "began": began, "sign_s": 30.0, "optimizer_steps": 0}
        lines.append({"event": "run", "at": began + 5, **facts})
        named = {"rank": 0, "name": "a", "step": 1}
        lines.append({"event": "snapshotted", "at": began + 800, "stall_s": 2.0, **named})
        lines.append({"event": "committed", "at": began + 801, "path": "/a", "size_bytes": 1, "seconds": 2.0, **named})
        lines.append({"event": "alive", "rank": 0, "at": began + 900, "optimizer_steps": 900})
    (tmp_path / ".safe_ckpt").mkdir()
    record = tmp_path / ".safe_ckpt/events.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = Alone()
    known = Pace(engine, tmp_path, clock=engine.clock).every_s()
    assert known == pytest.approx(interval.daly(2.0, (86_400 + 4 * 900) / 5), rel=0.1)


def test_a_record_that_cannot_be_read_is_no_error(tmp_path, monkeypatch, caplog):
    """Earlier runs are not known then, which is said."""
    from safe_ckpt.ledger import event_log

    def refuse(_):
        raise PermissionError("no")

    monkeypatch.setattr(event_log, "find_events", refuse)
    with caplog.at_level(logging.WARNING):
        assert Pace(Alone(), tmp_path).every_s() == 60.0
    assert "earlier runs are not known" in caplog.text
