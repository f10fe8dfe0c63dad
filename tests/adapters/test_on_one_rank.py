"""Calls of all ranks that a script makes on one of them alone, such as ``if accelerator.is_main_process:``."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelerate_runs import CONFIG, make
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.accelerate import register
from safe_ckpt.core.coordination.reminder import Reminder
from safe_ckpt.errors import RendezvousTimeout

STALL_S, BARRIER_S = 1.6, 2.0
TIMEOUTS = replace(CONFIG.timeouts, peer_stall_s=STALL_S, barrier_s=BARRIER_S)


class Log(logging.Handler):
    """When each line came, from the last ``begin`` on."""

    def begin(self):
        self.begun, self.lines = time.monotonic(), []

    def emit(self, record):
        self.lines.append((time.monotonic() - self.begun, record.getMessage()))


def listening():
    log = Log(logging.WARNING)
    log.begin()
    logging.getLogger("safe_ckpt").addHandler(log)
    return log


def alone(log, rank, caller, call, name):
    """``call`` on ``caller`` alone: it is told so in time, the error names the call, and who calls later meets it, too."""
    if rank == caller:
        log.begin()
        with pytest.raises(RendezvousTimeout) as caught:
            call()
        other = 1 - caller
        assert (caught.value.missing, caught.value.call) == ((other,), name), caught.value
        assert f"alive and somewhere else: all processes must call {name}" in str(caught.value)
        (said,) = [(at, line) for at, line in log.lines if f"waiting for ranks [{other}]" in line]
        assert said[0] < STALL_S
        assert f"All processes must call {name}" in said[1]
    dist.barrier()  # the collective in which the other one is meanwhile
    if rank != caller:
        with pytest.raises(RendezvousTimeout):
            call()
    dist.barrier()


def accelerated(rank, folder):
    log = listening()
    accelerator = make(folder)
    dist.barrier()
    with register(accelerator, CheckpointConfig(timeouts=TIMEOUTS)):
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.save_state(async_save=False)
        alone(log, rank, 0, accelerator.save_state, "save_state")
        alone(log, rank, 1, accelerator.load_state, "load_state")
        alone(log, rank, 0, lambda: accelerator.save_model(model, f"{folder}/weights"), "save_model")
        accelerator.load_state()
        return accelerator.save_state(async_save=False).name


def test_accelerate_says_who_else_must_call(tmp_path):
    """Within ``peer_stall_s``, whichever rank calls alone; the calls that all make afterwards work."""
    assert len(set(values(spawn_ranks(accelerated, 2, str(tmp_path), timeout_s=120)))) == 1


def plain(rank, folder):
    log = listening()
    config = CheckpointConfig(timeouts=TIMEOUTS)
    state = {"w": torch.ones(2)}
    dist.barrier()
    with Checkpointer(folder, config) as checkpoints:
        checkpoints.save(1, state).result()
        alone(log, rank, 1, lambda: checkpoints.save(2, state), "save")
        alone(log, rank, 0, lambda: checkpoints.resume(state), "resume")
    if rank == 0:
        log.begin()
        with pytest.raises(RendezvousTimeout, match="first meeting"):
            Checkpointer(f"{folder}/other", config)
        assert any(at < STALL_S and "All processes must make this call" in line for at, line in log.lines)
    dist.barrier()
    return True


def test_plain_torch_says_who_else_must_call(tmp_path):
    """As under a framework; also where the ranks have never met."""
    assert values(spawn_ranks(plain, 2, str(tmp_path), timeout_s=120)) == [True, True]


def slow(rank, folder):
    log = listening()
    with Checkpointer(folder, CheckpointConfig(timeouts=Timeouts(peer_stall_s=STALL_S))) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}).result()
        said = Path(folder, "said")
        log.addFilter(lambda record: said.touch() or True)
        while rank == 1 and not said.exists():
            time.sleep(0.01)
        checkpoints.save(2, {"w": torch.ones(2)}).result()
    return [line.split(",", 1)[0] for _, line in log.lines if "waiting for" in line]


def test_a_rank_that_is_slow_is_waited_for(tmp_path):
    """It is said once that it is somewhere else, and when it comes the save is made."""
    assert values(spawn_ranks(slow, 2, str(tmp_path), timeout_s=120)) == [["save: waiting for ranks [1]"], []]


def late(rank, folder):
    log = listening()
    said = Path(folder, "said")
    log.addFilter(lambda record: said.touch() or True)
    while rank == 1 and not said.exists():
        time.sleep(0.01)
    Checkpointer(folder, CheckpointConfig(timeouts=Timeouts(peer_stall_s=STALL_S))).close()
    return [line for _, line in log.lines if "waiting for" in line]


def test_a_rank_that_comes_late_is_named_and_no_line_of_ours(tmp_path):
    """Where it is the first call of all: no line of the script keeps it away, and rank 0 alone is in ours that wait for it."""
    found = values(spawn_ranks(late, 2, str(tmp_path), timeout_s=120))
    assert [len(lines) for lines in found] == [1, 0]
    assert found[0][0].startswith(
        "first meeting of the ranks: waiting for ranks [1]. All processes must make this call"
    )
    assert "move the call" not in found[0][0]


def test_only_a_block_around_the_call_is_named(caplog):
    """What lets one rank alone pass beside the call, or before it, keeps nobody away."""
    rank = 0
    if rank == 0:
        Reminder("missing: %s", 0.0, 5.0)(lambda: [1])
    Reminder("missing: %s", 0.0, 5.0)(lambda: [1])
    around, beside = caplog.messages
    assert "test_on_one_rank.py" in around
    assert "if rank == 0: move the call out of this block" in around
    assert beside == "missing: [1]. Waiting for 5 s more"


def guarded(rank, folder):
    log = listening()
    accelerator = make(folder)
    dist.barrier()
    with register(accelerator, CheckpointConfig(timeouts=Timeouts(peer_stall_s=30 * STALL_S))):
        accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.save_state(async_save=False)
        said = Path(folder, "said")
        log.addFilter(lambda record: said.touch() or True)
        log.begin()
        if accelerator.is_main_process:
            # As in many scripts that save under a stock Accelerator.
            accelerator.save_state(
                async_save=False,
            )
        else:
            while not said.exists():
                time.sleep(0.01)
            accelerator.save_state(async_save=False)
    return [line for at, line in log.lines if "waiting for" in line and at < 10 * STALL_S]


def test_a_call_that_only_the_main_process_makes_is_found_in_the_script(tmp_path):
    """Within seconds, long before a rank that is merely slow is named: with the line of the script that lets one alone pass."""
    found = values(spawn_ranks(guarded, 2, str(tmp_path), timeout_s=120))
    assert [len(lines) for lines in found] == [1, 0]
    assert "test_on_one_rank.py" in found[0][0]
    assert "if accelerator.is_main_process: move the call out of this block" in found[0][0]
