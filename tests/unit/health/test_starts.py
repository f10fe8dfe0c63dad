"""Starts that end again and again: which checkpoint is passed over, and when nothing else is tried."""

import dataclasses
import json

import pytest

from safe_ckpt.core.health.starts import Log, Newest, Start, decide

A, B, C = (Newest(op_id=name, name=name, step=step) for name, step in (("a", 10), ("b", 20), ("c", 30)))


def starts(resumed, *ends):
    """Of ("exception", 7), or of a number for one that was killed there."""
    made = []
    for number, end in enumerate(ends):
        how, reached = end if isinstance(end, tuple) else ("", end)
        key = f"{number:032x}"
        made.append(
            Start(key=key, resumed=resumed, step=0, end=how, reached=reached, what="ValueError: x" if how else "")
        )
    return tuple(made)


def passed(log, newest=(C, B, A), tries=3, back=2):
    decision = decide(log, newest, tries=tries, back=back)
    return sorted(decision.because), decision.gave_up


ERROR = ("exception", None)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([ERROR] * 3, ["c"]),
        ([ERROR] * 2, []),
        ([31, 31, 31], ["c"]),  # killed at one step each time: by what it does there
        ([31, 32, 33], []),  # killed anywhere: by somebody
        ([None] * 5, []),  # killed, nobody knows where
        ([31, ERROR, 31, ("done", 40)], ["c"]),
        ([("signal", 31)] * 5, []),
        ([("done", 31)] * 5, []),
        ([ERROR, ("signal", 3), ERROR, ("done", 3), ERROR], ["c"]),
    ],
)
def test_what_counts(ends, expected):
    """Exceptions always; kills where another one came at the same step; neither signals nor an end as planned."""
    assert passed(Log(starts=starts("c", *ends))) == (expected, "")


def test_a_commit_in_between_begins_anew():
    """Starts from another checkpoint, which was saved meanwhile, are not of this row."""
    assert passed(Log(starts=(*starts("b", ERROR, ERROR), *starts("c", ERROR, ERROR)))) == ([], "")
    assert passed(Log(starts=(*starts("c", ERROR, ERROR), *starts("b", ERROR), *starts("c", ERROR, ERROR)))) == ([], "")


def test_a_start_that_saved_something_does_not_count():
    """What it saved was damaged since, so the next one begins where it did."""
    died = tuple(
        dataclasses.replace(start, saved=number > 0) for number, start in enumerate(starts("c", ERROR, ERROR, ERROR))
    )
    assert passed(Log(starts=died)) == ([], "")


def run(newest, tries=3, back=2):
    """Every start fails at once. Which checkpoints are tried, one after the other, until it gives up."""
    log, tried = Log(), []
    for _ in range(50):
        decision = decide(log, newest, tries=tries, back=back)
        if decision.gave_up:
            return tried, decision.gave_up
        log = decision.log
        first = next(one for one in newest if one.op_id not in decision.because)
        tried.append(first.op_id)
        start = Start(key=str(len(tried)), resumed=first.op_id, step=first.step, end="exception", what="ValueError: x")
        log = log.with_start(start)
    raise AssertionError(tried)


def test_it_goes_back_so_often_and_no_further():
    """Three tries each, back twice, then an end that names the last cause."""
    tried, why = run((C, B, A))
    assert tried == list("cccbbbaaa")
    assert why == "a: 3 starts from it ended before anything was saved, the last one with ValueError: x"
    assert run((C, B, A), back=1)[0] == list("cccbbb")
    assert run((C, B, A), back=0)[0] == list("ccc")
    assert run((C, B), back=5)[0] == list("cccbbb")


def test_what_is_saved_again_at_the_same_step_does_not_count_as_further():
    """It goes back, saves the same step, and fails there again: that must not go on for ever."""
    log, newest, tried = Log(), [C, B, A], []
    for number in range(50):
        decision = decide(log, newest, tries=2, back=2)
        if decision.gave_up:
            break
        log = decision.log
        first = next(one for one in newest if one.op_id not in decision.because)
        tried.append(first.step)
        start = Start(key=str(number), resumed=first.op_id, step=first.step, end="exception", what="E")
        log = log.with_start(start)
        if first.step == 20:
            newest.insert(0, Newest(op_id=f"again{number}", name="again", step=30))
    assert len(tried) < 12
    assert decision.gave_up


def test_beyond_what_it_failed_at_it_may_go_back_again():
    """Training has come further: another trouble later gets as many tries."""
    far = Newest(op_id="far", name="far", step=90)
    log = decide(Log(starts=starts("c", ERROR, ERROR, ERROR)), (C, B, A), tries=3, back=1).log
    log = dataclasses.replace(log, starts=(*log.starts, *starts("far", ERROR, ERROR, ERROR)))
    assert passed(log, (far, C, B, A), back=1) == (["c", "far"], "")


def test_the_log_is_plain_data():
    """There and back; what is gone from the disk is forgotten."""
    log = decide(Log(starts=starts("c", ERROR, ERROR, 7)), (C, B, A), tries=2, back=2).log
    assert Log.from_json(json.loads(json.dumps(log.to_json()))) == log
    assert [one.op_id for one in log.passed] == ["c"]
    assert decide(log, (B, A), tries=2, back=2).log.passed == ()


@pytest.mark.parametrize(
    "change",
    [
        {"starts": 3},
        {"starts": [3]},
        {"starts": [{"key": "/etc/x", "resumed": "c", "step": 1}]},
        {"starts": [{"key": "0" * 32, "resumed": "c", "step": "1"}]},
        {"starts": [{"key": "0" * 32, "resumed": "c", "step": 1, "end": "weird"}]},
        {"passed": [{"op_id": "c", "name": "c", "step": "3", "why": ""}]},
        {"backs": ["3"]},
        {"more": 1, "backs": None},
    ],
)
def test_what_is_no_log_is_refused(change):
    """By its types, before anything is made of it."""
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Log.from_json({"starts": [], "passed": [], "backs": [], **change})


DONE, SIGNAL, OTHER, OWN = (0, "done", ""), (1, "signal", "S"), (0, "other", "peer lost"), (1, "exception", "E")


@pytest.mark.parametrize(
    ("size", "rows", "end"),
    [
        (2, [OTHER], ""),  # rank 1 was killed: it left no word
        (2, [OTHER, (1, "other", "x")], "other"),
        (2, [OTHER, SIGNAL], "signal"),
        (2, [OTHER, OWN], "exception"),
        (2, [OWN, SIGNAL, OTHER], "exception"),  # a launcher stops the others then
        (2, [SIGNAL, OWN, OTHER], "signal"),
        (2, [DONE], "done"),
        (2, [], ""),
    ],
)
def test_how_a_start_of_several_ranks_ended(size, rows, end):
    """By what came first, its cause, and not by what that brought about on other ranks."""
    assert Start(key="0" * 32, resumed="c", step=1, size=size).ended(rows).end == end


def test_a_lone_checkpoint_is_tried_again():
    """There is nothing to go back to, and an error would only keep a job from starting whose mistake was mended."""
    decision = decide(Log(starts=starts("a", ERROR, ERROR, ERROR)), (A,), tries=3, back=2)
    assert (decision.because, decision.gave_up) == ({}, "")
    assert decision.stuck.startswith("3 starts from it ended")


def test_the_count_of_goings_back_outlives_the_checkpoints():
    """One of the same name is saved again and replaces what was passed over: that is no progress."""
    log, step, tried = Log(), 10, []
    for number in range(40):
        newest = (Newest(op_id=f"again{number // 3}", name="ten", step=10), Newest(op_id="nine", name="nine", step=9))
        decision = decide(log, newest, tries=2, back=2)
        if decision.gave_up:
            break
        log = decision.log
        first = next(one for one in newest if one.op_id not in decision.because)
        tried.append(first.step)
        key = f"{number:032x}"
        log = log.with_start(Start(key=key, resumed=first.op_id, step=first.step, end="exception", what="E"))
    assert decision.gave_up, (step, tried)
