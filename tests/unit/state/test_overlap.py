"""Overlapped snapshots: what is written is the state at the moment of ``save``, whatever the optimizer does afterwards."""

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from kit.inside import copy_after
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.state import overlap
from safe_ckpt.core.state.items import expected_state_bytes
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.errors import SaveError

OVERLAPPED = CheckpointConfig(snapshot="overlapped", record_events=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.first = nn.Linear(16, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.frozen(self.first(self.norm(self.embedding(x))).relu()))


def loss_of(net):
    return net(torch.randint(0, 8, (32,))).square().mean()


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


def trained():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    return net, optimizer


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def states(state):
    return {name: copy.deepcopy(value.state_dict()) for name, value in state.items()}


@pytest.fixture
def late(monkeypatch):
    """Copies begin only when a step stands at the gate: without a gate they would never begin, or see what comes after."""
    reached = threading.Event()
    passing, copying = StagingCopy.pass_gate, StagingCopy.run_deferred

    def pass_gate(self, timeout_s):
        reached.set()
        passing(self, timeout_s)

    def run_deferred(self):
        assert reached.wait(30)
        copying(self)

    monkeypatch.setattr(StagingCopy, "pass_gate", pass_gate)
    monkeypatch.setattr(StagingCopy, "run_deferred", run_deferred)
    return reached


def saved(folder, state, go_on):
    """Save, go on, and return whether what comes back is what was there at the save."""
    with Checkpointer(folder, OVERLAPPED) as ckpt:
        expected = states(state)
        handle = ckpt.save(1, state)
        go_on()
        handle.result(timeout_s=60)
        assert not same(states(state), expected), "nothing has changed: this proves nothing"
        ckpt.resume(state)
    return same(states(state), expected)


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam for-loop": lambda p: torch.optim.Adam(p, foreach=False, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_step_waits_for_the_copy(tmp_path, late, name):
    """Fused, foreach and plain: no step changes what is still to be copied; buffers and frozen parameters are right too."""
    net = Net()
    optimizer = OPTIMIZERS[name]([p for p in net.parameters() if p.requires_grad])
    train(net, optimizer)
    assert saved(tmp_path, {"model": net, "optimizer": optimizer}, lambda: train(net, optimizer, 3))


def test_forward_and_backward_do_not_wait(tmp_path, late):
    """While the copy has not begun, any number of backward passes run: gradients may be accumulated. The step waits."""
    net, optimizer = trained()

    def go_on():
        for _ in range(4):
            loss_of(net).backward()
        assert not late.is_set()
        optimizer.step()

    assert saved(tmp_path, {"model": net, "optimizer": optimizer}, go_on)


@pytest.mark.parametrize(
    "step", [lambda one, closure: one.step(closure), lambda one, closure: one.step(closure=closure)]
)
def test_a_closure_is_evaluated_before_the_wait(tmp_path, late, step):
    """Optimizers that are given forward and backward as a closure, as Lightning does, wait behind it and not before."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer)
    seen = []

    def closure():
        seen.append(late.is_set())
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    assert saved(tmp_path, {"model": net, "optimizer": optimizer}, lambda: step(optimizer, closure))
    assert seen == [False]


def test_an_optimizer_that_nobody_knows_waits_at_its_entry(tmp_path, late):
    """One that may change parameters before it evaluates its closure waits first; its own parameters are copied at once."""

    class Sam(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1.0)
            return super().step(closure)

    net = Net()
    known = torch.optim.AdamW(net.first.parameters())
    sam = Sam(net.last.parameters(), lr=0.1)
    loss_of(net).backward()
    known.step()

    def go_on():
        sam.step(lambda: loss_of(net))
        known.step()

    state = {"model": net, "known": known, "sam": sam}
    assert saved(tmp_path, state, go_on)
    assert late.is_set()


def test_two_optimizers_that_step_in_turn_wait_for_the_whole_copy(tmp_path, late):
    """Whichever steps first waits for all of the copy."""
    one, other = Net(), Net()
    first, second = torch.optim.AdamW(one.parameters()), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(one, first)
    train(other, second)

    def go_on():
        train(other, second)
        train(one, first)

    assert saved(tmp_path, {"g": one, "d": other, "g_opt": first, "d_opt": second}, go_on)


def test_averages_and_swaps_are_not_deferred(tmp_path, late):
    """An averaged copy of the model belongs to no optimizer: it is copied at once, and may be updated before the step."""
    net, optimizer = trained()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(net)
    train(net, optimizer)

    def go_on():
        average.update_parameters(net)
        assert not late.is_set()
        train(net, optimizer)

    assert saved(tmp_path, {"model": net, "average": average, "optimizer": optimizer}, go_on)


def test_optimizers_that_step_within_backward_defer_nothing(tmp_path, late):
    """An optimizer per parameter, stepped by a hook while gradients are made: nothing of it is deferred."""
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in trained}

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step_now)
    whole = torch.optim.SGD(trained, lr=0.1)
    assert not OverlapPlan([net], [whole])
    assert saved(tmp_path, {"model": net, "whole": whole}, lambda: loss_of(net).backward())


def test_steps_of_a_gradient_scaler_and_scheduler_pass_the_gate(tmp_path, late):
    """Steps that come through a GradScaler or a wrapped method pass the gate as well."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    train(net, optimizer)

    def go_on():
        optimizer.zero_grad()
        scaler.scale(loss_of(net)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    assert saved(tmp_path, {"model": net, "optimizer": optimizer, "scheduler": scheduler}, go_on)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_passes_the_gate(tmp_path, late):
    """``torch.compile`` of the step keeps the gate, also when it was compiled while nothing was being copied."""
    net, optimizer = trained()
    step = torch.compile(optimizer.step, backend="eager")
    loss_of(net).backward()
    step()
    assert saved(tmp_path, {"model": net, "optimizer": optimizer}, step)


@pytest.mark.parametrize(
    "edit",
    [
        lambda net: net.first.weight.data.mul_(2),
        lambda net: net.first.weight.detach().zero_(),
        lambda net: net.load_state_dict(Net().state_dict()),
    ],
    ids=["through .data", "in place", "load_state_dict"],
)
def test_an_edit_past_the_gate_fails_the_save(tmp_path, monkeypatch, edit):
    """Parameters that are changed by hand while they are copied: the save fails and says which, and nothing is committed."""
    edited = threading.Event()
    copy_after(monkeypatch, edited)
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        edit(net)
        edited.set()
        with pytest.raises(SaveError, match=r"parameter .* changed while it was copied"):
            handle.result(timeout_s=60)
        ckpt.save(2, {"model": net, "optimizer": optimizer}).result(timeout_s=60)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != ".safe_ckpt"] == [
        "step-00000002"
    ]


@pytest.mark.parametrize("edited_one", ["first", "second"])
def test_an_edit_of_one_of_two_equal_modules_fails_the_save(tmp_path, monkeypatch, edited_one):
    """Twin critics with an optimizer each: every tensor that is copied later is watched, also where names are the same."""
    edited = threading.Event()
    copy_after(monkeypatch, edited)
    nets = {"first": Net(), "second": Net()}
    optimizers = {name: torch.optim.AdamW(net.parameters()) for name, net in nets.items()}
    for name, net in nets.items():
        train(net, optimizers[name])
    state = {**nets, **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}}
    number = 1 + list(nets).index(edited_one)
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        handle = ckpt.save(1, state)
        nets[edited_one].first.weight.data.clamp_(-0.01, 0.01)
        edited.set()
        with pytest.raises(SaveError, match=rf"parameter first.weight of module {number} of 2 changed"):
            handle.result(timeout_s=60)
        edited.clear()
        handle = ckpt.save(2, state)
        state_now = optimizers[edited_one].state[nets[edited_one].last.weight]["exp_avg"]
        state_now.data.zero_()
        edited.set()
        with pytest.raises(SaveError, match=rf"exp_avg of parameter \d+ of optimizer {number} of 2 changed"):
            handle.result(timeout_s=60)


def test_an_edit_of_the_last_file_fails_the_save_too(tmp_path, monkeypatch):
    """The file that is written last does not end on a page: it must not be complete before the witness was heard."""
    edited = threading.Event()
    copy_after(monkeypatch, edited)
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(1 << 11, 1 << 11, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        handle = ckpt.save(1, {"optimizer": optimizer, "model": net})
        with torch.no_grad():
            net[0].weight.add_(1.0)
        edited.set()
        with pytest.raises(SaveError, match="changed while it was copied"):
            handle.result(timeout_s=60)
    assert not (tmp_path / "step-00000001").exists()


def test_a_save_that_fails_at_once_holds_no_step(tmp_path, monkeypatch):
    """The save is given up while its copy is about to begin: the next step does not wait for a copy that never comes."""
    running = StagingCopy.run

    def run(self, *args):
        left = running(self, *args)
        self.fail(SaveError(name="x", cause="elsewhere"))
        return left

    monkeypatch.setattr(StagingCopy, "run", run)
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        began = time.monotonic()
        train(net, optimizer)
        assert time.monotonic() - began < 20  # barrier_s is 300
        with pytest.raises(SaveError):
            handle.result(timeout_s=60)


def test_without_threads_to_be_had_the_copy_is_made_at_once(tmp_path, monkeypatch):
    """The limit of threads is reached: no overlap, and nothing else."""
    net, optimizer = trained()
    starting, refused = threading.Thread.start, []

    def start(self):
        if self.name == "safe_ckpt-copy":
            refused.append(self)
            raise RuntimeError("can't start new thread")
        starting(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result(timeout_s=60)
        assert refused
        expected = states({"model": net, "optimizer": optimizer})
        handle = ckpt.save(2, {"model": net, "optimizer": optimizer})
        train(net, optimizer)
        handle.result(timeout_s=60)
        ckpt.resume({"model": net, "optimizer": optimizer})
        assert same(states({"model": net, "optimizer": optimizer}), expected)


def hang_once(monkeypatch):
    """The next copy that is made beside training hangs in its middle, until what is returned is set."""
    until, copying, left = threading.Event(), StagingCopy._copy, [True]

    def copy_late(self, moves, held, *, aside):
        if aside and left:
            left.clear()
            until.wait(60)
        copying(self, moves, held, aside=aside)

    monkeypatch.setattr(StagingCopy, "_copy", copy_late)
    return until


def test_a_copy_that_never_ends_does_not_hold_training_for_ever(tmp_path, monkeypatch):
    """After barrier_s the step goes on; the save has failed, since its copy was not complete."""
    stuck = hang_once(monkeypatch)
    net, optimizer = trained()
    config = CheckpointConfig.from_mapping({"snapshot": "overlapped", "timeouts": {"barrier_s": 0.5}})
    with Checkpointer(tmp_path, config) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        train(net, optimizer)
        stuck.set()
        with pytest.raises(SaveError, match="not complete after"):
            handle.result(timeout_s=60)


@pytest.mark.slow
def test_a_copy_that_hangs_does_not_hold_up_the_next_saves(tmp_path, monkeypatch):
    """A copy that does not come back, from a mount or a device that hangs, costs its own save, not those after it."""
    hanging = hang_once(monkeypatch)
    net, optimizer = trained()
    config = {"snapshot": "overlapped", "timeouts": {"barrier_s": 5, "shutdown_s": 2}}
    with Checkpointer(tmp_path, CheckpointConfig.from_mapping(config)) as ckpt:
        failed = ckpt.save(1, {"model": net, "optimizer": optimizer})
        train(net, optimizer)
        with pytest.raises(SaveError, match="not complete after"):
            failed.result(timeout_s=60)
        handle = ckpt.save(2, {"model": net, "optimizer": optimizer})
        train(net, optimizer)
        assert handle.result(timeout_s=60).step == 2
        hanging.set()


def test_a_thread_that_does_not_come_to_run_holds_no_step(tmp_path, monkeypatch):
    """On a busy machine the thread that copies may wait for a core: at the gate another one begins in its place."""
    starved = threading.Event()
    copy_after(monkeypatch, starved, thread="safe_ckpt-copy", seconds=60)
    net, optimizer = trained()

    def go_on():
        train(net, optimizer)
        assert not starved.is_set()
        starved.set()

    assert saved(tmp_path, {"model": net, "optimizer": optimizer}, go_on)


def interrupt_once(monkeypatch, name, *, after):
    """Ctrl-C in the start of the thread of that name: once it runs, or before it does."""
    starting, left = threading.Thread.start, [True]

    def start(self):
        if self.name != name or not left:
            return starting(self)
        left.clear()
        if after:
            starting(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("after", [True, False], ids=["as it runs", "before it runs"])
@pytest.mark.parametrize("name", ["safe_ckpt-copy", "safe_ckpt-save"])
def test_ctrl_c_while_a_thread_starts_leaves_nothing_waiting(tmp_path, monkeypatch, name, after):
    """An interrupt in the first save: its copy and its handle come to an end, the step goes on, the next save works."""
    before = set(threading.enumerate())
    interrupt_once(monkeypatch, name, after=after)
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, {"model": net, "optimizer": optimizer})
        begun = time.monotonic()
        train(net, optimizer)
        with pytest.raises(SaveError, match="interrupted"):
            ckpt.wait()
        assert ckpt.save(2, {"model": net, "optimizer": optimizer}).result(timeout_s=60).step == 2
        assert time.monotonic() - begun < 20
    assert not (tmp_path / "step-00000001").exists()
    for thread in set(threading.enumerate()) - before:
        if thread.name == name:
            thread.join(10)
            assert not thread.is_alive()


def test_a_closed_checkpointer_keeps_no_snapshot_memory(tmp_path):
    """A Checkpointer that is closed but still held, and no further step: no snapshot's memory stays mapped."""
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result(timeout_s=60)
        (buffer,) = ckpt._engine._stager._free
        mapped = weakref.ref(buffer.memory)
        assert mapped() is not None
    gc.collect()
    assert mapped() is None
    ckpt.close()


def test_no_thread_for_a_save_fails_that_save_alone(tmp_path, monkeypatch):
    """Where the system gives no more threads the save has failed and says why; the next one works, and nothing waits."""
    starting, refused = threading.Thread.start, []

    def start(self):
        if self.name == "safe_ckpt-save" and not refused:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        starting(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        with pytest.raises(SaveError, match="can't start new thread"):
            handle.result(timeout_s=10)
        assert ckpt.save(2, {"model": net, "optimizer": optimizer}).result(timeout_s=60).step == 2


def test_tensors_that_forward_may_change_are_copied_at_once():
    """Buffers, frozen parameters, renormed embeddings and what is tied to one, counters: none of them is deferred."""
    net = Net()
    net.bag, net.plain = nn.EmbeddingBag(8, 16, max_norm=1.0), nn.EmbeddingBag(8, 16)
    net.embedding.max_norm = 1.0
    net.tied = nn.Linear(16, 8, bias=False)
    net.tied.weight = net.embedding.weight
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    train(net, optimizer)
    found = OverlapPlan([net], [optimizer])
    assert found.covers(net.first.weight)
    assert found.covers(net.plain.weight)
    assert found.covers(optimizer.state[net.first.weight]["exp_avg"])
    assert found.covers(optimizer.state[net.first.bias]["exp_avg"])
    for tensor in (net.embedding.weight, net.bag.weight, net.tied.weight, net.frozen.weight, net.norm.running_mean):
        assert not found.covers(tensor)
    assert not found.covers(optimizer.state[net.first.weight]["step"])


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.LBFGS,
        lambda p: torch.optim.AdamW(p, capturable=True),
        type("Mine", (torch.optim.AdamW,), {}),
    ],
    ids=["LBFGS", "capturable", "a subclass"],
)
def test_optimizers_that_are_not_known_defer_nothing(optimizer):
    """Several closures, steps captured in a graph, code of the user's: everything is copied at once."""
    net = Net()
    assert not OverlapPlan([net], [optimizer(list(net.first.parameters()))])


def test_state_dicts_are_copied_at_once(tmp_path, late):
    """Without the module and the optimizer themselves nothing is known of who changes what: nothing is left for later, also
    behind a save that was given both.
    """
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        known = ckpt.save(1, {"model": net, "optimizer": optimizer})
        train(net, optimizer)
        known.result(timeout_s=60)
        late.clear()
        expected = states({"model": net, "optimizer": optimizer})
        handle = ckpt.save(2, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        handle.wait_snapshot(timeout_s=0)
        assert overlap._pending == ()
        for tensor in (*net.parameters(), *(one for state in optimizer.state.values() for one in state.values())):
            tensor.data.zero_()
        handle.result(timeout_s=60)
        ckpt.resume({"model": net, "optimizer": optimizer})
    assert same(states({"model": net, "optimizer": optimizer}), expected)


def test_the_size_after_the_first_step_is_known_before_it():
    """Host memory can be made ready before an optimizer has any state."""
    net = Net()
    for make in OPTIMIZERS.values():
        optimizer = make([p for p in net.parameters() if p.requires_grad])
        before = expected_state_bytes(optimizer)
        train(net, optimizer)
        after = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())
        if not isinstance(optimizer, torch.optim.RMSprop):
            assert before == after
        assert expected_state_bytes(optimizer) >= after


def test_no_tensor_is_kept_alive_by_a_finished_save(tmp_path):
    """Neither the gate nor a handle holds on to what was saved."""
    net, optimizer = trained()
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result(timeout_s=60)
        train(net, optimizer)
        assert overlap._pending == ()
        gone = []
        torch.utils.weak.weakref.finalize(net, lambda: gone.append(1))
        del net, optimizer
        gc.collect()
        assert gone


def test_a_gate_that_nobody_passes_keeps_nothing_of_the_saves_before(tmp_path):
    """Where no optimizer of torch steps, as where a framework steps it itself, copies that are over are let go of."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with Checkpointer(tmp_path, OVERLAPPED) as ckpt:
        for step in range(1, 9):
            ckpt.save(step, {"net": net, "optimizer": optimizer}).result()
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is StagingCopy]
        assert len(alive) <= 2
