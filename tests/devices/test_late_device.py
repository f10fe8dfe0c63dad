"""Programs on an accelerator whose streams run late; that accelerator itself; and bugs of order that the programs must find.

All run in processes of their own: torch has one accelerator in a process, for good.
"""

import json
import os
import subprocess
import sys

import pytest

from devices import runner
from kit import device
from kit.thorough import THOROUGH

pytestmark = pytest.mark.skipif(not device.HAS_COMPILER, reason="no g++, which builds the accelerator")

PROMISED = {
    "nothing_is_done_before_somebody_waits": [3, [3.0] * 4, 0],
    "other_streams_go_on_by_themselves_only": [1, [0.0] * 4, [1.0] * 4],
    "an_event_is_what_was_queued_before_it": [1, True],
    "memory_is_used_again_at_once": [True, 2.0],  # what reads it on another stream reads what is written next
    "recorded_memory_is_not": [1.0, True],  # before that stream is through
    "freed_memory_is_overwritten": [0xDB, 0xDB],
    "copies_to_pinned_memory_are_late": [
        [[1.0] * 4, [1.0] * 4],
        [0.0] * 4,
        [1.0] * 4,
        [2.0] * 4,
        [3.0] * 4,
        [True, False],
    ],
    "memory_is_registered_by_address": [[0, True], [1, False]],
    "a_thread_stands_on_device_0": [[0, 0], [2, True]],
    "the_host_dies_of_device_memory": True,
    "devices_are_not_mixed": True,
    "failures_come_on_demand": ["one", "queued", "failed", "failed", 1.0],
    "the_generator_is_each_devices_own": [True, True],
    "the_scheduler_lets_steps_go_on": [True, True],
}
COUNT, PARTS = (500, 4) if THOROUGH else (25, 4)


@pytest.fixture(scope="module")
def seen():
    """What the accelerator does, by name."""
    environment = {**os.environ, "PYTHONPATH": str(runner.TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, runner.TESTS / "programs/devices/late_behaviour.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("promise", PROMISED)
def test_the_accelerator_keeps_the_order_of_cuda(seen, promise):
    """Each stream is a queue that runs late; memory, threads and copies are as CUDA's; failures come when asked."""
    assert seen[promise] == PROMISED[promise]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_saved_from_a_late_device_is_what_the_cpu_has(part):
    """Trained, saved, freed, changed and stepped in any order, on several devices and streams: each checkpoint to the bit."""
    wrong = [f"seed {seed}: {what}" for seed, what in runner.many(part * COUNT, COUNT) if what]
    assert not wrong, "\n".join(wrong)
