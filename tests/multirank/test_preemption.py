"""A signal on one rank becomes one decision: all ranks save at the same step and stop."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from kit.inside import store_keys
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig
from safe_ckpt.errors import ConfigError, RendezvousTimeout, SaveError
from support import run_program

CONFIG = CheckpointConfig(
    save_on_signals=("SIGTERM", "SIGUSR1"),
    timeouts=Timeouts(barrier_s=20, peer_stall_s=5, shutdown_s=10),
)


def train(rank, folder, unlucky, number, step_s, coupled):
    seen = []
    signal.signal(number, lambda *_: seen.append(rank))
    events = []
    with Checkpointer(folder, CONFIG, hooks=[events.append]) as ckpt:
        state = {"w": torch.zeros(1000)}
        stopped = None
        for step in range(1, 100_000):
            state["w"] += 1
            if coupled:
                dist.all_reduce(torch.ones(1))
            time.sleep(step_s)
            if step == 40 and rank == unlucky:
                os.kill(os.getpid(), number)
            if ckpt.stop_requested:
                stopped = step
                handle = ckpt.save(step, state)
                break
        assert ckpt.stop_requested  # and it stays so
    after = signal.getsignal(number)
    after(number, None)
    told = [(event.signal, event.by_rank) for event in events if event.kind == "stoprequested"]
    return stopped, handle.result().step, seen, told


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize(("unlucky", "number"), [(0, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(tmp_path, unlucky, number, coupled):
    """Any rank's signal; ranks in step or on their own; the handler that was there before runs, and is put back."""
    found = values(spawn_ranks(train, 3, tmp_path, unlucky, number, 0.002, coupled))
    (step,) = {stopped for stopped, *_ in found}
    assert 40 <= step < 1000
    assert {saved for _, saved, *_ in found} == {step}
    for rank, (_, _, seen, told) in enumerate(found):
        assert seen == [rank] * (2 if rank == unlucky else 1)
        assert told == [(signal.Signals(number).name, unlucky)]


def ask_without_rank_0(rank, folder):
    config = CheckpointConfig(
        save_on_signals=("SIGTERM",), timeouts=Timeouts(barrier_s=1, peer_stall_s=1, shutdown_s=5)
    )
    with Checkpointer(folder, config) as ckpt:
        if rank == 0:
            ckpt.save(1, {"x": 1}).result(timeout_s=30)
            while os.path.exists(folder / "step-00000001"):
                time.sleep(0.01)
            return
        try:
            ckpt.save(1, {"x": 1}).result(timeout_s=30)
            for _ in range(1_000_000):
                _ = ckpt.stop_requested
        finally:
            os.rename(folder / "step-00000001", folder / "gone")


def test_a_rank_that_does_not_ask_for_a_signal_is_named(tmp_path):
    """Rank 0 never looks: the other one is not blocked beyond its deadline and says whom it waited for."""
    first, second = spawn_ranks(ask_without_rank_0, 2, tmp_path)
    assert first.error is None, first.error
    assert isinstance(second.error, RendezvousTimeout), second.error
    assert second.error.missing == (0,)
    assert second.error.phase == "stop_requested"


def many_askings(rank, folder, count):
    with Checkpointer(folder, CONFIG) as ckpt:
        for _ in range(count):
            dist.all_reduce(torch.ones(1))
            assert not ckpt.stop_requested
            if ckpt._engine._preemption._every > 4:
                ckpt._engine._preemption._every = 4  # so that decisions come thick and are tidied up
        if rank == 0:
            return store_keys(ckpt)
    return None


def test_keys_of_preemption_decisions_do_not_pile_up_in_the_store(tmp_path):
    """Thousands of decisions leave a bounded number of keys behind."""
    keys = values(spawn_ranks(many_askings, 2, tmp_path, 4000))[0]
    assert keys < 300


def asks_late(rank, folder, count):
    with Checkpointer(folder, CONFIG) as ckpt:
        if rank == 2:
            dist.barrier()
        for _ in range(count):
            assert not ckpt.stop_requested
            if ckpt._engine._preemption._every > 4:
                ckpt._engine._preemption._every = 4
        if rank != 2:
            dist.barrier()


def test_decisions_wait_for_the_slowest_rank(tmp_path):
    """A rank that is hundreds of decisions behind the others finds each: none is tidied up before all have read it."""
    assert values(spawn_ranks(asks_late, 3, tmp_path, 2000)) == [None] * 3


def test_a_plain_script_saves_and_leaves_its_loop_at_sigterm(tmp_path):
    """SIGTERM to a plain script: it saves, leaves its loop, and the default action does not end it."""
    done = run_program("saves_at_its_own_signal", str(tmp_path / "exp"))
    assert done.stdout.split() == ["3", "True"], done.stderr


def test_a_program_that_does_not_ask_can_still_be_terminated(tmp_path):
    """Signals without a reaction: the second one, some seconds later, does what it always did."""
    done = run_program("never_asks_for_signals", str(tmp_path / "exp"))
    assert done.stdout.split() == ["alive"], done.stderr
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("names", [["SIGKILL"], ["SIGNONSENSE"], "SIGTERM", [15]])
def test_a_name_that_is_no_signal_is_refused_by_key(names):
    """At construction, with the key."""
    with pytest.raises(ConfigError, match="save_on_signals"):
        CheckpointConfig.from_mapping({"save_on_signals": names})


def run_out_of_grace(rank, folder):
    slow = WriterConfig(chunk_bytes=4096, flush_every_bytes=4096, direct_io="off")
    config = replace(CONFIG, signal_grace_s=1.5, writer=slow)
    begun = time.monotonic()
    events = []
    with Checkpointer(folder, config, hooks=[events.append]) as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=20)
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)
        while not ckpt.stop_requested:
            time.sleep(0.001)
        handle = ckpt.save(2, {"m": {"w": torch.zeros(60_000_000)}})
        try:
            handle.result(timeout_s=30)
        except SaveError as error:
            said = str(error)
    stop = next(event for event in events if event.kind == "stoprequested")
    return said, time.monotonic() - begun, stop.left_s, stop.forecast_s


def test_a_save_that_outlasts_the_grace_is_given_up(tmp_path):
    """The job is about to be killed: the save ends with the grace, by name, on all ranks, and the one before stays."""
    for said, seconds, left_s, forecast_s in values(spawn_ranks(run_out_of_grace, 2, tmp_path)):
        assert "step-00000002" in said
        assert "signal_grace_s" in said
        assert seconds < 10
        assert 0 < left_s <= 1.5
        assert 0 < forecast_s < 5
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
