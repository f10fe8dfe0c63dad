"""The contract of adapters, by way of Accelerate and of a ``Checkpointer``."""

import pytest
import torch

from accelerate_runs import forget, make
from safe_ckpt import Checkpointer
from safe_ckpt.accelerate import register
from safe_ckpt.testing.contracts import AdapterContract


class Loop:
    """What both programs share."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def train(self):
        self.optimizer.zero_grad()
        self.net(torch.ones(2, 40)).square().mean().backward()
        self.optimizer.step()

    def weights(self):
        return self.net.state_dict()


class WithAccelerate(Loop):
    def __init__(self, folder):
        super().__init__()
        forget()
        accelerator = make(folder)
        self.net, self.optimizer = accelerator.prepare(self.net, self.optimizer)
        self.accelerator, self.handle = accelerator, register(accelerator)

    def save(self):
        self.accelerator.save_state()

    def resume(self):
        return self.handle.resume() is not None

    def close(self):
        self.handle.remove()


class WithCheckpointer(Loop):
    def __init__(self, folder):
        super().__init__()
        self.ckpt, self.step = Checkpointer(folder), 0
        self.state = {"net": self.net, "optimizer": self.optimizer}

    def save(self):
        self.step += 1
        self.ckpt.save(self.step, self.state)

    def resume(self):
        info = self.ckpt.resume(self.state)
        self.step = 0 if info is None else info.step
        return info is not None

    def close(self):
        self.ckpt.close()


class TestPrograms(AdapterContract):
    """Both."""

    @pytest.fixture(autouse=True, params=[WithAccelerate, WithCheckpointer])
    def which(self, request):
        self.start = request.param


def test_the_contract_finds_an_adapter_that_forgets(tmp_path):
    """One that leaves the optimizer out comes back with the same weights, and trains on with others."""

    class Forgets(WithCheckpointer):
        def __init__(self, folder):
            super().__init__(folder)
            del self.state["optimizer"]

    contract = AdapterContract()
    contract.start = Forgets
    contract.test_what_is_saved_is_what_was_there(tmp_path / "same")
    with pytest.raises(AssertionError):
        contract.test_a_resume_goes_on_as_if_nothing_had_stopped(tmp_path / "on")
