"""A job that watches for signals gives their handlers back."""

import signal

import pytest
import torch

from safe_ckpt import CheckpointConfig, Checkpointer


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None], ids=["default", "ignored", "own"])
def test_after_the_end_a_signal_goes_where_it_went_before(tmp_path, before):
    """Also where a signal came meanwhile: the handler of the script, or the end of the process, is the next one's again."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    outer = {number: signal.signal(number, before) for number in numbers}
    try:
        config = CheckpointConfig(save_on_signals=("SIGTERM", "SIGUSR1"))
        with Checkpointer(tmp_path, config) as ckpt:
            assert not ckpt.stop_requested
            assert all(signal.getsignal(number) is not before for number in numbers)
            ckpt.save(1, {"w": torch.zeros(3)}).result(timeout_s=60)
        assert [signal.getsignal(number) for number in numbers] == [before, before]
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)


def test_each_signal_goes_to_the_handler_of_the_script_as_well(tmp_path):
    """Also the first one: what the script does at a signal, it does beside a job that saves at it."""
    heard = []
    outer = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with Checkpointer(tmp_path, CheckpointConfig(save_on_signals=("SIGUSR1",))) as ckpt:
            for count in (1, 2):
                signal.raise_signal(signal.SIGUSR1)
                assert heard == [signal.SIGUSR1] * count
            assert ckpt.stop_requested
    finally:
        signal.signal(signal.SIGUSR1, outer)
