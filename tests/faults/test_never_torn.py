"""What is read back is what was there at the save, by hash, whatever the program does in the next moment."""

from collections import Counter

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from programs import Program, digest
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, WriterConfig
from support import share_copies

SAVES = 5


@pytest.fixture(autouse=True)
def shared_copies(monkeypatch):
    """Every copy is cut into many pieces and shared by two threads, as those of a large state are."""
    share_copies(monkeypatch, piece_bytes=1024, locked_below_bytes=600)


def check_program(seed, folder):
    """Save, change, save, change, ...; then read all of it back. Returns how many saves were exact, and met a change."""
    program, expected, found = Program(seed), {}, Counter()
    config = CheckpointConfig(record_events=False, writer=WriterConfig(inline_bytes=(2 << 20) * (seed % 2)))
    with Checkpointer(folder, config) as ckpt:
        ckpt.resume(program.state)
        for step in range(1, SAVES + 1):
            expected[step] = digest(program.state)
            handle = ckpt.save(step, program.state)
            program.change()
            found["met a change"] += digest(program.state) != expected[step]  # NaN stays NaN
            handle.result(timeout_s=60)
            program.train()
        for step, was in expected.items():
            ckpt.resume(program.state, step=step)
            assert digest(program.state) == was, (seed, step, program.changes)
            found["exact"] += 1
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.thorough)], ids=["20", "180 more"]
)
def test_a_state_changed_right_after_its_save_is_not_torn(tmp_path, matrix, seeds):
    """Through .data, numpy and C, in hooks, helpers and closures, on threads, by averages, swaps and rivals: with the default
    snapshot no save is torn, and none fails.
    """
    found = Counter()
    for seed in seeds:
        found += check_program(seed, tmp_path / str(seed))
    assert found["met a change"] > 0.9 * found["exact"]
    matrix(f"{len(seeds)} programs that change their state", "snapshot: auto", {"exact": found["exact"]})


class Tensors:
    """Twelve tensors and their momentum, of sizes that fit no page, which every step changes."""

    def __init__(self):
        torch.manual_seed(0)
        sizes = [1, 37, 255, 1025, 4096, 5000, 12_345, 20_000]
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size)) for size in sizes)
        for parameter in self.model:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.step()

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def digest(self):
        momentum = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.model]
        return self._hash(list(self.model)), self._hash(momentum)

    @classmethod
    def digest_of(cls, folder):
        weights = load_file(folder / "model.safetensors")
        states = torch.load(folder / "optimizer.pt")["state"]
        return (
            cls._hash([weights[str(number)] for number in range(len(weights))]),
            cls._hash([states[number]["momentum_buffer"] for number in range(len(states))]),
        )

    @staticmethod
    def _hash(tensors):
        found = xxhash.xxh3_128()
        for tensor in tensors:
            found.update(tensor.detach().numpy())
        return found.hexdigest()

    def change(self, snapshot_mode):
        """As fast as it can be: all of it, where it may change at once; else by the step that waits at the gate."""
        if snapshot_mode == "eager":
            with torch.no_grad():
                torch._foreach_add_(list(self.model), 1.0)
                torch._foreach_zero_([self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.model])
        self.optimizer.step()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("inline", [True, False], ids=["writer thread", "writer process"])
@pytest.mark.parametrize("mode", ["eager", "overlapped"])
@pytest.mark.parametrize("saves", [100, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_a_state_changed_after_each_of_thousands_of_saves_is_not_torn(tmp_path, matrix, mode, inline, saves):
    """The state changes in the moment in which it may, in thousands of saves that use the same memory again: none is torn."""
    config = CheckpointConfig(
        snapshot=mode,
        record_events=False,
        retention=Retention(keep_last=2),
        writer=WriterConfig(inline_bytes=(2 << 20) * inline),
    )
    training = Tensors()
    with Checkpointer(tmp_path, config) as ckpt:
        before = None
        for step in range(1, saves + 1):
            expected = training.digest()
            handle = ckpt.save(step, training.state)
            training.change(mode)
            assert training.digest() != expected
            if before is not None:  # it is read while this one is written
                path, was = before
                assert training.digest_of(path) == was, step
            before = handle.result(timeout_s=60).path, expected
        assert training.digest_of(before[0]) == before[1]
    matrix("saves of a state that changes at once", f"snapshot: {mode}", {"exact": saves})
