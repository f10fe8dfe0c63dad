"""Going through the requests of two jobs that save to an object store one after the other: a fault at each, or a kill."""

import itertools
import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from dataclasses import dataclass

import object_job
from object_job import FIRST, SECOND, Store, Told, Watch, check, config_of, lead, outcome, said_in, train

from kit import patience
from kit.fault_proxy import FaultProxy

FAULTS = [
    (fault, when)
    for fault in ("drop", "reset", "timeout", "500", "503", "409", "truncated", "duplicate")
    for when in ("before", "after")
    if when == "after" or fault not in ("truncated", "duplicate")
]
_prefixes = itertools.count()


@dataclass(frozen=True)
class Point:
    """Where something goes wrong."""

    number: int
    fault: str
    when: str
    inline: bool = True


def new_store(server):
    """A fresh prefix."""
    return Store(server, f"t{next(_prefixes)}")


def two_jobs(server, proxy, points=(), match=None):
    """Both jobs, in this process, with faults at these points, perhaps of requests that match. What they said, and where."""
    store, said = new_store(server), []
    watch = Watch(store, lambda: list(said))
    proxy.reset()
    proxy.on_answer = watch.on_answer
    for point in points:
        proxy.plan(point.number, point.fault, when=point.when, match=match)
    config = config_of(server, proxy.endpoint, inline=all(point.inline for point in points))

    def say(*words):
        said.append(words)

    train(store.url, config, say, FIRST)
    train(store.url, config, say, SECOND, resumes=True)
    proxy.settle(20.0)
    proxy.on_answer = None
    return store, said, watch


def count_of(server, proxy):
    """How many requests the two jobs make."""
    store, said, watch = two_jobs(server, proxy)
    total = len(proxy.seen)
    assert watch.looks > 4, watch.looks
    assert check(store, said, problems=watch.problems) == SECOND[-1]
    store.wipe()
    return total


def fault_sweep(server, points, report=lambda point, error: None, match=None):
    """Go through them. Returns a Counter of outcomes; raises when a promise is broken, unless ``report`` takes the error."""
    outcomes = Counter()
    with FaultProxy(server.endpoint) as proxy:
        proxy.hold_s, proxy.later_s = 1.3, 0.1
        for point in points:
            try:
                store, said, watch = two_jobs(server, proxy, [point], match)
                hit = bool(proxy.hits)
                try:
                    check(store, said, problems=watch.problems)
                finally:
                    store.wipe()
            except Exception as error:
                error.add_note(f"at {point}")
                if not report(point, error):
                    raise
                outcomes["BROKEN"] += 1
                continue
            outcomes[outcome(said) if hit else "the request did not come"] += 1
    return outcomes


def sample(total, count, seed, faults=FAULTS):
    """Points of all kinds, chosen with this seed."""
    chance = random.Random(seed)
    return [Point(chance.randint(1, total), *chance.choice(faults), inline=chance.random() < 0.8) for _ in range(count)]


class Killer:
    """Kills the process that it is given at the n-th request that matches, and lets nothing of it pass any more."""

    def __init__(self, proxy, number, when, match=None):
        self._proxy, self._number, self._when = proxy, number, when
        self._match, self._seen, self._meant = match or (lambda _: True), 0, None
        self._lock = threading.Lock()
        self.pid = 0
        self.struck = False
        proxy.reset()
        proxy.on_request, proxy.on_answer = self._asked, self._answered

    def _asked(self, record):
        with self._lock:
            self._seen += bool(self._match(record))
            if self._meant is None and self._seen == self._number:
                self._meant = record
        if self._when == "before" and record is self._meant and self.pid:
            self._strike()
            return False
        return None

    def _answered(self, record):
        if self._when == "after" and record is self._meant and self.pid:
            self._strike()

    def _strike(self):
        self.struck = True
        os.kill(self.pid, signal.SIGKILL)


def start(url, config, lines, numbers, *, resumes=False):
    """A job in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["safe_ckpt.checkpointer", "object_job"])
    process = context.Process(target=lead, args=(url, config, str(lines), numbers, resumes))
    process.start()
    return process


def end_of(process, seconds=60.0):
    """Its exit code."""
    process.join(patience.scaled(seconds))
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("the job does not end")
    return process.exitcode


def kill_point(server, proxy, folder, number, when, *, in_job, match=None):
    """Kill the first or the second job at this request, of those that match.

    Job 2 comes after a job 1 that ended, or was killed within a save.

    Returns what was said and whether it was killed.
    """
    store = new_store(server)
    lines = folder / f"lines-{store.prefix}"
    config = config_of(server, proxy.endpoint, inline=False)
    watch = Watch(store, lambda: said_in(lines))
    struck = False
    if in_job == "sweep":  # what the second job finds there: a save that was announced and uploaded in part
        killer = Killer(proxy, 46, "after")
        process = start(store.url, config, lines, FIRST)
        killer.pid = process.pid
        end_of(process)
    elif in_job == "resume":
        train_here(store, server, lines)
    if in_job == "first":
        killer = Killer(proxy, number, when, match)
        process = start(store.url, config, lines, FIRST)
        killer.pid = process.pid
        code, struck = end_of(process), killer.struck
        assert code == (-signal.SIGKILL if struck else 0), (code, said_in(lines))
    killer = Killer(proxy, number if in_job != "first" else -1, when, match)
    process = start(store.url, config, lines, SECOND, resumes=True)
    killer.pid = process.pid
    code = end_of(process)
    assert code == (-signal.SIGKILL if killer.struck else 0), (code, said_in(lines))
    struck |= killer.struck
    proxy.on_request = proxy.on_answer = None
    said = said_in(lines)
    watch.look("after the kill")
    proxy.settle(20.0)
    refused = [words for words in said if words[0] == "REFUSED"]
    assert not refused, said
    if in_job == "first":
        before = said[: next(i for i, words in enumerate(said) if words[0] == "RESUMED")]
        (resumed,) = [words[1] for words in said if words[0] == "RESUMED"]
        assert resumed in Told(before).allowed, said
    number = check(store, said, problems=watch.problems)
    store.wipe()
    return struck


def train_here(store, server, lines):
    """The first job, in this process, without a proxy."""
    with open(lines, "a") as file:
        train(
            store.url,
            config_of(server),
            lambda *words: print(object_job.json.dumps(words), file=file, flush=True),
            FIRST,
        )


__all__ = [
    "FAULTS",
    "Point",
    "count_of",
    "end_of",
    "fault_sweep",
    "kill_point",
    "new_store",
    "sample",
    "start",
    "two_jobs",
]
