"""Two jobs after each other that save to an object store: a fault at any request, a kill at any request."""

import os
import random
from collections import Counter

import pytest
from hub_faults import HUB_FAULTS, lives
from object_sweep import FAULTS, Point, count_of, fault_sweep, kill_point, sample

from kit import object_servers
from kit.fault_proxy import FaultProxy
from kit.hub_gateway import HubGateway
from kit.thorough import THOROUGH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SAMPLED, KILLED = 5, 3
STRUCK = "killed, the next start goes on"
thorough = pytest.mark.thorough
rarely = {"moto"}  # the slowest; what it does MiniStack does as well
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[thorough] if kind in rarely else []) for kind in object_servers.KINDS]
)
s3 = pytest.mark.parametrize("kind", ["ministack", pytest.param("moto", marks=thorough)])


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Starts a server of a kind, once."""
    started = {}

    def of(kind):
        if why := object_servers.missing(kind):
            pytest.skip(why)
        if kind not in started:
            started[kind] = object_servers.start(kind, tmp_path_factory.mktemp(kind))
        return started[kind]

    yield of
    for one in started.values():
        one.stop()


def seed():
    """Printed, so that a run can be had again."""
    chosen = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    print(f"SAFE_CKPT_KILL_SEED={chosen}")
    return chosen


def total_of(server):
    with FaultProxy(server.endpoint) as proxy:
        return count_of(server, proxy)


@kinds
@pytest.mark.skipif(THOROUGH, reason="the sweep goes through all of them")
def test_a_fault_at_any_request_loses_no_reported_checkpoint(kind, server, matrix):
    """What was reported as committed is there, whole; nothing is deleted before its successor is; nothing is left over."""
    points = sample(total_of(server(kind)), SAMPLED, seed())
    matrix(f"a request fails, {kind}", "a sample of them", fault_sweep(server(kind), points))


@thorough
@kinds
@pytest.mark.parametrize(("fault", "when"), FAULTS)
def test_a_fault_at_each_request_loses_no_reported_checkpoint(kind, fault, when, server, matrix):
    """The same for every request of the two jobs; every seventh time with a writer process."""
    points = [Point(number, fault, when, number % 7 > 0) for number in range(1, total_of(server(kind)) + 1)]
    matrix(f"a request fails, {kind}", f"{fault} {when} it reached the server", fault_sweep(server(kind), points))


def test_faults_at_requests_to_hugging_face_buckets_lose_no_reported_checkpoint(server, matrix):
    """Its gateway and what it redirects to fail twelve times in the life of two jobs: what was reported is there, whole.

    Wrong bytes are among the faults. The 2,000 are this test with ``--all``, or ``hub_faults``.
    """
    found = Counter()
    with HubGateway(server("ministack").new_bucket()) as hub:
        for came, word in lives(hub, 2000 if THOROUGH else 6, seed(), each=12 if THOROUGH else 6):
            assert {*came} <= {fault for fault, _ in HUB_FAULTS}
            found[word] += 1
        assert hub.redirects > 0
    matrix("requests fail, Hugging Face's gateway", "twelve in a life", found)


REQUESTS = {"first": 75, "resume": 50, "sweep": 65}
"""At most so many requests are there to be killed at; the number differs between kinds of servers."""


def kills(server, folder, points, match=None):
    found = {STRUCK: 0}
    with FaultProxy(server.endpoint) as proxy:
        for in_job, number, when in points:
            try:
                struck = kill_point(server, proxy, folder, number, when, in_job=in_job, match=match)
            except Exception as error:
                error.add_note(f"at {in_job}, request {number}, {when}")
                raise
            name = STRUCK if struck else "the request did not come"
            found[name] = found.get(name, 0) + 1
    return found


@kinds
@pytest.mark.skipif(THOROUGH, reason="the sweep goes through all of them")
def test_a_kill_at_any_request_loses_no_reported_checkpoint(kind, server, tmp_path, matrix):
    """The job and its writer process are killed: the next start goes on at what was reported, with nothing left over."""
    chance = random.Random(seed())
    jobs = [chance.choice(list(REQUESTS)) for _ in range(KILLED)]
    points = [(job, chance.randint(1, REQUESTS[job] - 10), chance.choice(("before", "after"))) for job in jobs]
    matrix(f"a job is killed at a request, {kind}", "a sample of them", kills(server(kind), tmp_path, points))


@thorough
@kinds
@pytest.mark.parametrize("job", REQUESTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_each_request_loses_no_reported_checkpoint(kind, job, when, server, tmp_path, matrix):
    """The same for every request of the first job, of the second, and of one that finds what a killed one left."""
    points = [(job, number, when) for number in range(1, REQUESTS[job] + 1)]
    matrix(f"a job is killed at a request, {kind}", f"{job}, {when}", kills(server(kind), tmp_path, points))


@kinds
def test_a_fault_or_kill_at_a_copy_within_the_store_loses_nothing(kind, server, tmp_path):
    """The request with which the store copies what is not trained fails in any way, or the job is killed at it."""

    def copies(record):
        return any("copy-source" in name for name in record.headers)

    kinds = [*FAULTS, ("501", "before")]
    if not THOROUGH:
        kinds = [("501", "before"), *random.Random(seed()).sample(FAULTS, 3)]
    points = [Point(1 + number % 5, fault, when) for number, (fault, when) in enumerate(kinds)]
    found = fault_sweep(server(kind), points, match=copies)
    assert "the request did not come" not in found
    assert kills(server(kind), tmp_path, [("first", 2, "before"), ("first", 3, "after")], match=copies) == {STRUCK: 2}


@s3
@pytest.mark.parametrize("fault", ["500", "duplicate"])
def test_an_upload_that_was_begun_twice_does_no_harm(kind, fault, server):
    """The answer to its beginning was lost, or the request came twice: what is committed is whole."""

    def begins(record):
        return record.method == "POST" and "uploads" in record.path

    found = fault_sweep(server(kind), [Point(5, fault, "after"), Point(6, fault, "after")], match=begins)
    assert "the request did not come" not in found


@kinds
def test_an_object_for_trying_out_the_store_is_not_left(kind, server, tmp_path):
    """The request that makes it comes once more later, or the job is killed before it deletes it."""

    def tries(record):
        return record.method == "PUT" and "probe" in record.path

    found = fault_sweep(server(kind), [Point(number, "duplicate", "after") for number in (1, 3)], match=tries)
    assert "the request did not come" not in found
    assert kills(server(kind), tmp_path, [("first", 1, "after")], match=tries) == {STRUCK: 1}


@kinds
def test_a_replaced_step_left_by_a_kill_is_deleted_by_a_later_save(kind, server, tmp_path):
    """The job is killed when the step is saved again, before the earlier one is deleted: a later save deletes it."""

    def commits(record):
        return record.method == "PUT" and "/step-00000002." in record.path and "manifest.json" in record.path

    def comes_next():
        seen = []

        def match(record):
            past = len(seen) >= 2
            seen.extend([record] * commits(record))
            return past

        return match

    assert kills(server(kind), tmp_path, [("first", 2, "after")], match=commits) == {STRUCK: 1}
    assert kills(server(kind), tmp_path, [("first", 1, "after")], match=comes_next()) == {STRUCK: 1}
