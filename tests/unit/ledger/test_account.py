"""The ledger's arithmetic: right within one sign of life, and an interval that loses little."""

import random

import pytest

from safe_ckpt.ledger import account as ledger
from safe_ckpt.ledger import event_log, history, interval, words

START = 1_800_000_000.0
SIGN_S = 30.0


def told(events):
    parsed = [event_log.Recorded(kind=kind, at=START + at, rank=0, facts=facts) for at, kind, facts in events]
    return history.build_history(event_log.Recording(events=tuple(parsed)))


class Simulated:
    """Runs of one job with kills at known moments: what is recorded of them, and what is true."""

    def __init__(self, seed, *, every_s, stall_s=2.0, write_s=5.0, between_s=3000.0, runs=4):
        self.draw = random.Random(seed)
        self.every_s, self.stall_s, self.write_s = every_s, stall_s, write_s
        self.events, self.lost_s, self.lost_steps, self.kills = [], [], [], []
        self.kept_s, self.back_s, self.lives = 0.0, {}, []
        self.now, self.path, self.number = 0.0, None, 0
        for _ in range(runs):
            self.run(self.draw.expovariate(1 / between_s))
        self.wall_s = self.now

    def tell(self, at, kind, **facts):
        self.events.append((at, kind, facts))

    def run(self, lives_s):
        began, step_s = self.now, self.draw.uniform(0.5, 3.0)
        facts = {"pid": self.number, "host": "h", "began": START + began, "sign_s": SIGN_S}
        opened = began + self.draw.uniform(2, 9)
        self.tell(opened, "run", optimizer_steps=0, **facts)
        ready = opened + 4.0
        if self.path is not None:
            self.tell(ready, "resumed", path=self.path, step=1, seconds=4.0)
            self.back_s[self.number - 1] = ready - self.kills[-1]
        else:
            ready = opened
        killed = ready + lives_s
        at, steps, trained_s, safe_s, safe_steps = ready, 0, 0.0, 0.0, 0
        save_at, sign_at = ready + self.every_s, ready + SIGN_S
        flying = None
        while True:
            if at >= save_at and flying is None:
                flying = (at + self.stall_s + self.write_s, at, steps, trained_s)
                at, save_at = at + self.stall_s, at + self.stall_s + self.every_s
            if flying is not None and at >= flying[0] < killed:
                self.commit(flying)
                safe_s, safe_steps, flying = flying[3], flying[2], None
            while at >= sign_at and sign_at < killed:
                self.tell(sign_at, "alive", optimizer_steps=steps)
                sign_at += SIGN_S
            took = step_s * self.draw.uniform(0.95, 1.05)
            if at + took >= killed:
                break
            at, steps, trained_s = at + took, steps + 1, trained_s + took
        if flying is not None and flying[0] < killed:
            self.commit(flying)
            safe_s, safe_steps = flying[3], flying[2]
        while sign_at < killed:
            self.tell(sign_at, "alive", optimizer_steps=steps)
            sign_at += SIGN_S
        self.events.sort(key=lambda event: event[0])
        held = sum(1 for _, kind, facts in self.events if kind == "agreed" and facts["run"] == self.number)
        self.kills.append(killed)
        self.lives.append(lives_s)
        self.lost_s.append(max(0.0, killed - ready - held * self.stall_s - safe_s))
        self.lost_steps.append(steps - safe_steps)
        self.kept_s += safe_s
        self.now, self.number = killed + self.draw.uniform(20, 90), self.number + 1

    def commit(self, flying):
        done, called, steps, _ = flying
        self.path = f"/r/{self.number}-{steps}"
        named = {"name": self.path, "step": steps, "run": self.number}
        self.tell(called + 0.001, "agreed", seconds=0.001, optimizer_steps=steps, **named)
        self.tell(called + self.stall_s, "snapshotted", stall_s=self.stall_s, **named)
        self.tell(done, "committed", path=self.path, size_bytes=100, seconds=done - called, **named)


def test_the_ledger_is_right_within_a_sign_of_life():
    """200 runs with kills at known moments: each figure holds the truth, and spans no more than one sign of life."""
    killed = 0
    for seed in range(50):
        true = Simulated(seed, every_s=random.Random(seed).uniform(60, 900), runs=4)
        account = ledger.account(told(true.events), now=START + true.now + 1000)
        assert len(account.losses) == 4
        for number, loss in enumerate(account.losses):
            killed += 1
            in_flight = true.stall_s  # of a save that was cut short nothing is recorded
            assert loss.at.least - 0.01 <= START + true.kills[number] <= loss.at.most + 0.01
            # One that was killed before its first sign may have lived until the next one began.
            assert loss.at.most - loss.at.least <= (1.1 * SIGN_S + 0.01 if loss.lost_steps else SIGN_S + 95)
            assert loss.lost_s.least - 0.01 <= true.lost_s[number] + in_flight
            assert true.lost_s[number] <= loss.lost_s.most + 0.01
            assert loss.lost_steps is not None or true.lives[number] < SIGN_S
            assert (
                loss.lost_steps is None or loss.lost_steps.least <= true.lost_steps[number] <= loss.lost_steps.most + 1
            )
            assert (loss.resume_s is not None) == (number in true.back_s)
            if loss.resume_s is not None:
                assert loss.resume_s.least - 0.01 <= true.back_s[number] <= loss.resume_s.most + 0.01
        assert account.kept_s == pytest.approx(true.kept_s, rel=0.06, abs=SIGN_S)
    assert killed == 200


def lost_with(every_s, seed, *, cost_s=4.0, between_s=2500.0, total_s=400_000.0):
    """The time that a job of ``total_s`` of training loses to saves and to crashes, all drawn in advance."""
    draw, lost, done = random.Random(seed), 0.0, 0.0
    left = draw.expovariate(1 / between_s)
    while done < total_s:
        if left >= every_s + cost_s:
            left, done, lost = left - every_s - cost_s, done + every_s, lost + cost_s
        else:
            lost, left = lost + left, draw.expovariate(1 / between_s)
    return lost / done


def test_the_advised_interval_loses_little():
    """With the interval that a ledger of twelve crashes advises at most 10 % more time is lost than with the best of 20."""
    tried = [20 * 1.4**number for number in range(20)]
    best = min(sum(lost_with(every_s, seed) for seed in range(5)) for every_s in tried)
    for seed in range(5):
        runs = Simulated(seed, every_s=600.0, stall_s=4.0, between_s=2500.0, runs=12)
        account = ledger.account(told(runs.events), now=START + runs.now + 1000)
        assert account.cost_s == pytest.approx(4.0)
        assert sum(lost_with(account.best_s, seed) for seed in range(5)) <= 1.1 * best


def test_the_intervals_are_those_of_young_and_daly():
    """Young's is the root of twice the product; Daly's lies near it, and is the time between crashes for dear saves."""
    assert interval.young(2.0, 10_000.0) == pytest.approx(200.0)
    assert interval.daly(2.0, 10_000.0) == pytest.approx(200 * (1 + 0.01 / 3 + 0.0001 / 9) - 2)
    assert interval.daly(50.0, 20.0) == 20.0
    assert interval.share_lost(200, 2, 10_000) == pytest.approx(2 / 200 + 100 / 10_000, rel=0.05)
    assert interval.share_lost(0, 1, 1) == interval.share_lost(1e9, 1, 1) == 1.0
    tried = [interval.share_lost(10 * 1.2**number, 2, 10_000) for number in range(40)]
    assert interval.share_lost(interval.daly(2, 10_000), 2, 10_000) <= min(tried) + 1e-4
    assert interval.advised(2, 0, 0, least_s=60, most_s=3600, usual_s=86_400) == pytest.approx(588, abs=5)
    assert interval.advised(0.001, 0, 0, least_s=60, most_s=3600, usual_s=86_400) == 60
    assert interval.advised(9e9, 0, 0, least_s=60, most_s=3600, usual_s=86_400) == 3600


RUN = {"host": "h", "sign_s": SIGN_S, "optimizer_steps": 0}


def saved(at, step, run=1, **more):
    named = {"name": f"s{step}", "step": step}
    return [
        (at + 0.1, "agreed", {"seconds": 0.1, "optimizer_steps": step, **named}),
        (at + 1, "snapshotted", {"stall_s": 1.0, **named}),
        (at + 2, "committed", {"path": f"/r/s{step}", "size_bytes": 10, "seconds": 2.0, **named, **more}),
    ]


def test_what_a_kill_cost_is_said():
    """A kill between two signs of life: the steps, the time since the commit and until the resume, with their bounds."""
    events = [
        (5, "run", {**RUN, "pid": 1, "began": START}),
        *saved(100, 95),
        (130, "alive", {"optimizer_steps": 124}),
        (200, "run", {**RUN, "pid": 2, "began": START + 190}),
        (210, "resumed", {"path": "/r/s95", "step": 95, "seconds": 3.0}),
        *saved(300, 90),
        (310, "end", {"optimizer_steps": 90, "in_order": True}),
    ]
    account = ledger.account(told(events), now=START + 1000)
    (loss,) = account.losses
    assert (loss.run, loss.killed, loss.at) == (1, True, ledger.Between(least=START + 130, most=START + 163))
    assert loss.since_commit_s == ledger.Between(least=28, most=61)
    assert loss.lost_s == ledger.Between(least=29, most=62)
    assert (loss.lost_steps.least, loss.lost_steps.most) == (29, 62)
    assert loss.resume_s == ledger.Between(least=47, most=80)
    assert account.goodput == ledger.Between(least=(95 + 90) / 310, most=(95 + 90) / 310)
    assert words.of_loss(loss).startswith(
        "run 1 killed: between 29 and 62 s of training lost, between 29 and 62 steps lost"
    )
    text = " ".join(words.summed_up(account))
    assert "Goodput 60 %" in text
    assert "1 interruption cost between 29 and 62 s" in text


def test_a_run_that_saved_all_lost_nothing():
    """It ended in order behind its last save; a live run's unsaved work counts neither way."""
    events = [(5, "run", {**RUN, "pid": 1, "began": START}), *saved(100, 95)]
    done = [*events, (103, "end", {"optimizer_steps": 95, "in_order": True})]
    assert ledger.account(told(done), now=START + 500).losses == ()
    live = ledger.account(told([*events, (130, "alive", {"optimizer_steps": 120})]), now=START + 140)
    assert (live.is_live, live.losses, live.wall_s.least) == (True, (), 100)
    assert ledger.account(told([])) == ledger.Account()


def test_work_behind_an_unhealthy_checkpoint_is_lost():
    """No resume takes one: the kill cost all since the healthy one before it."""
    events = [
        (5, "run", {**RUN, "pid": 1, "began": START}),
        *saved(100, 95),
        *saved(200, 190),
        (202.1, "unhealthy", {"name": "s190", "path": "/r/s190", "marked": True, "what": "NaN"}),
        (210, "run", {**RUN, "pid": 2, "began": START + 209}),
        (220, "resumed", {"path": "/r/s95", "step": 95, "seconds": 3.0}),
    ]
    (loss,) = ledger.account(told(events), now=START + 221).losses
    assert loss.lost_steps.least == 95
    assert loss.lost_s.least == pytest.approx(202.1 - 100 - 2)


def test_a_checkpoint_of_weights_alone_saves_no_work():
    """Nothing resumes from one: the kill cost all since the whole one before it."""
    events = [
        (5, "run", {**RUN, "pid": 1, "began": START}),
        *saved(100, 95),
        *saved(200, 190, weights_only=True),
        (210, "run", {**RUN, "pid": 2, "began": START + 209}),
    ]
    (loss,) = ledger.account(told(events), now=START + 211).losses
    assert loss.lost_steps.least == 95
    assert loss.since_commit_s.least == pytest.approx(100, abs=1)


def test_a_resume_from_an_older_one_loses_what_came_behind_it():
    """The newest is not what the next run took: its path says where it went on."""
    events = [
        (5, "run", {**RUN, "pid": 1, "began": START}),
        *saved(100, 95),
        *saved(200, 190),
        (203, "end", {"optimizer_steps": 190, "in_order": True}),
        (210, "run", {**RUN, "pid": 2, "began": START + 209}),
        (220, "resumed", {"path": "/r/s95", "step": 95, "seconds": 3.0}),
    ]
    (loss,) = ledger.account(told(events), now=START + 221).losses
    assert (loss.killed, loss.lost_steps.least, loss.lost_steps.most) == (False, 95, 95)
    assert loss.lost_s.least == pytest.approx(203 - 100 - 1, abs=1.1)


def test_a_run_is_alive_until_two_signs_did_not_come():
    """One may be late; then it counts as killed."""
    events = [
        (5, "run", {**RUN, "pid": 1, "began": START}),
        *saved(100, 95),
        (130, "alive", {"optimizer_steps": 120}),
    ]
    for seconds, is_live in ((131, True), (130 + 2 * SIGN_S - 1, True), (130 + 2 * SIGN_S + 1, False)):
        found = ledger.account(told(events), now=START + seconds)
        assert (found.is_live, len(found.losses)) == (is_live, int(not is_live))


def test_an_error_that_lost_nothing_is_an_interruption_all_the_same():
    """A run that an exception ended right behind a save: it stopped, and has to be started again."""
    events = [(5, "run", {**RUN, "pid": 1, "began": START}), *saved(100, 95)]
    for in_order, number in ((True, 0), (False, 1)):
        end = (102.1, "end", {"optimizer_steps": 95, "in_order": in_order})
        assert len(ledger.account(told([*events, end]), now=START + 500).losses) == number
