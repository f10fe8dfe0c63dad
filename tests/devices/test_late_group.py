"""The process group of the late accelerator; programs of two ranks on it; and bugs of order that those must find."""

import json
import os
import signal
import subprocess
import sys

import pytest

from devices import planted, runner
from kit import device
from kit.thorough import THOROUGH

pytestmark = [
    pytest.mark.skipif(not device.HAS_COMPILER, reason="no g++, which builds the accelerator"),
    pytest.mark.slow,
]
COUNT = 200 if THOROUGH else 2


def _both(name, folder, expendable=()):
    """Run a function of the program on two ranks. Returns what each printed, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(runner.TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, runner.TESTS / "programs/devices/late_group.py", name]
    ranks = [
        subprocess.Popen([*command, str(rank), folder / "meeting"], env=environment, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    told = {}
    try:
        for rank in sorted(range(2), key=lambda rank: rank in expendable):
            if rank in expendable:
                ranks[rank].kill()
            told[rank] = ranks[rank].communicate(timeout=200)
    finally:
        for process in ranks:
            process.kill()
    said = [[json.loads(line) for line in told[rank][0].splitlines()] for rank in range(2)]
    return said, [process.returncode for process in ranks], told


@pytest.mark.timeout(300)
def test_its_collectives_are_queued_in_the_order_of_the_streams(tmp_path):
    """Device tensors alone; on a stream of their own behind the current one; waiting is the stream's, not the host's."""
    said, codes, told = _both("promises", tmp_path)
    assert codes == [0, 0], told
    for rank in range(2):
        assert all(all(rest) for _, *rest in said[rank]), said[rank]
        assert len(said[rank]) == 6


@pytest.mark.timeout(300)
def test_who_waits_for_a_rank_that_does_not_come_is_ended(tmp_path):
    """As NCCL's watchdog does it: the process aborts, with a line that says which collective it was in."""
    said, codes, told = _both("nobody_comes", tmp_path, expendable=[1])
    assert said[0] == []
    assert codes[0] == -signal.SIGABRT
    assert "allreduce: other ranks did not come in time" in told[0][1]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_rank_that_is_lost_in_a_reduction_on_a_device_is_named(tmp_path):
    """A reduction that is queued on a device is not over: the others look around meanwhile, and do not wait in the device."""
    said, codes, told = _both("lost_in_a_reduction", tmp_path)
    assert said[0] == [["PeerLostError", [1], True]], told
    assert codes == [0, -signal.SIGKILL]


@pytest.mark.timeout(300)
def test_the_timeout_of_any_backend_is_raised_and_put_back(tmp_path):
    """Also of one that has torch's ``set_timeout`` alone."""
    said, codes, told = _both("longer_timeouts", tmp_path)
    assert codes == [0, 0], told
    assert said == [[[False, 30.0, 300.0, 30.0]]] * 2


@pytest.mark.timeout(1800)
def test_what_two_ranks_save_and_gather_from_late_devices_is_what_the_cpu_has():
    """DDP and FSDP2: saved, stepped, freed, gathered, exported and resumed, on several devices and streams, to the bit."""
    wrong = [f"seed {seed}: {what}" for seed, what in runner.many(0, COUNT, "pair") if what]
    assert not wrong, "\n".join(wrong)


SEEDS_OF_PLANTED = {
    "a round is neither polled nor waited for": 5,
    "a reduction begins before what the trainer has queued": 1,
    "a reduction stands on the device of another": 1,
    "the caller's stream is taken for a new one": 1,
    "what rank 0 has itself is copied on another stream": 1,
    "a part is sent from a stream that does not wait": 5,
    "the bytes of a round are copied and not waited for": 5,
    "host tensors travel on the group of the devices": 5,
}
"""A seed that found each; which rank comes first is no choice of a seed, so the test goes on from there."""
TRIED = 30
SAMPLE = list(SEEDS_OF_PLANTED) if THOROUGH else []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_of_order_between_ranks_is_found(name):
    """A wait, a stream or a device of a gather is left out or is another one: some program of two ranks is wrong then."""
    assert runner.first_wrong(name, TRIED, "pair", SEEDS_OF_PLANTED[name]) is not None


def test_every_planted_bug_between_ranks_fits_and_has_a_seed():
    """Each changes the module that it is for, as that is today, and some program finds it."""
    for name in planted.OF_PAIRS:
        planted.check(name)
    assert SEEDS_OF_PLANTED.keys() == planted.OF_PAIRS.keys()
