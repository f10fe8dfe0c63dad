"""Numbers that went bad: the checkpoint is committed and marked, nothing resumes from it, and the last healthy one stays."""

import math
import os
import sys

import pytest
import torch

import safe_ckpt
from kit import warm
from kit.manifests import rewrite
from safe_ckpt import CheckpointConfig, Checkpointer, Health, Mirror, Retention, WriterConfig, events
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import NoValidCheckpointError, UnhealthyStateError

PROCESS, THREAD = WriterConfig(inline_bytes=0), WriterConfig()


class Model(torch.nn.Module):
    """With a mask that is infinite by design, and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 20)
        self.frozen = torch.nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("mean", torch.zeros(4))


class Job:
    """A model, an optimizer, and a run that can be started again."""

    def __init__(self):
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.layer.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step()

    def step(self):
        self.model.layer(torch.randn(4, 20)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def poison(self, name="layer.weight", value=math.nan):
        with torch.no_grad():
            self.model.get_parameter(name).view(-1)[3] = value


def config(writer=THREAD, keep=2, **health):
    return CheckpointConfig(retention=Retention(keep_last=keep), writer=writer, health=Health(**health))


def names(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def steps(folder):
    return [int(name.removeprefix("step-")) for name in names(folder)]


@pytest.mark.parametrize("writer", [PROCESS, THREAD], ids=["process", "thread"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("snapshot", ["eager", "overlapped"])
def test_nothing_resumes_from_a_marked_one_and_the_healthy_ones_stay(tmp_path, writer, value, snapshot):
    """However many bad ones follow. By name it can be had, and what is saved after the resume counts as before."""
    job, seen = Job(), []
    settings = CheckpointConfig(retention=Retention(keep_last=2), writer=writer, snapshot=snapshot)
    with Checkpointer(tmp_path, settings, hooks=[seen.append]) as ckpt:
        for step in range(1, 4):
            assert not ckpt.save(step, job.state).result().marked
        job.poison(value=value)
        for step in range(4, 8):
            assert ckpt.save(step, job.state).result().marked
        assert steps(tmp_path) == [2, 3, 7]
        told = [event for event in seen if isinstance(event, events.Unhealthy)]
        assert [event.step for event in told] == [4, 5, 6, 7]
        assert "model.safetensors: layer.weight has 1" in told[0].what
        assert ckpt.resume(job.state).step == 3
        assert job.model.layer.weight.isfinite().all()
        assert not ckpt.save(8, job.state).result().marked
        assert not ckpt.save(9, job.state).result().marked
        assert steps(tmp_path) == [7, 8, 9]
        assert ckpt.resume(job.state, step=7).marked
        assert not job.model.layer.weight.isfinite().all()


def test_a_marked_one_is_loaded_where_it_is_named(tmp_path):
    """To look into a diverged run: ``load`` passes over it unless it is asked for, by its step or by its path."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        job.poison()
        ckpt.save(2, job.state).result()
    for where, named, step in ((tmp_path, {}, 1), (tmp_path, {"step": 2}, 2), (tmp_path / "step-00000002", {}, 2)):
        model = Model()
        info = safe_ckpt.load(where, {"model": model}, **named)
        assert (info.step, info.marked) == (step, step == 2)
        assert bool(model.layer.weight.isfinite().all()) == (step == 1)
    assert safe_ckpt.newest(tmp_path).step == 1


def test_an_infinite_number_in_the_optimizer_marks_the_checkpoint(tmp_path):
    """A second moment that is infinite stops the training of one weight for good, and no loss shows it."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        job.optimizer.state[job.model.layer.weight]["exp_avg_sq"][3, 4] = math.inf
        assert ckpt.save(2, job.state).result().marked
    facts = read_manifest(tmp_path / "step-00000002").health["files"]["optimizer.pt"]
    assert [row["name"] for row in facts["sick"]] == ["state.0.exp_avg_sq"]


def test_masks_that_are_infinite_by_design_are_no_alarm(tmp_path):
    """Masks and frozen weights are no alarm, also after a restart, until they change; a new NaN in a buffer is one."""
    for begin in (1, 3):
        job = Job()
        with Checkpointer(tmp_path, config()) as ckpt:
            ckpt.resume(job.state)
            for step in (begin, begin + 1):
                assert not ckpt.save(step, job.state).result().marked
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.resume(job.state)
        job.model.mask[5, 1] = -math.inf
        assert ckpt.save(5, job.state).result().marked
        ckpt.resume(job.state)
        job.model.mean[1] = math.inf
        assert ckpt.save(6, job.state).result().marked


def test_a_parameter_is_never_learnt(tmp_path):
    """It was bad before the first save: that one is marked, and nothing is there to resume from."""
    job = Job()
    job.poison(value=math.inf)
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.save(1, job.state).result().marked
        with pytest.raises(NoValidCheckpointError, match=r"it is unhealthy: model.safetensors: layer.weight has 1 Inf"):
            ckpt.resume(job.state)


def test_stop_ends_training_after_the_commit(tmp_path):
    """Also where failed saves only warn: going on would be pointless."""
    job = Job()
    settings = CheckpointConfig(on_failure="warn", health=Health(action="stop"))
    with Checkpointer(tmp_path, settings) as ckpt:
        ckpt.save(1, job.state).result()
        job.poison()
        ckpt.save(2, job.state)
        with pytest.raises(UnhealthyStateError, match=r"layer.weight has 1 NaN among 400 numbers") as caught:
            ckpt.wait()
        assert caught.value.step == 2
        assert steps(tmp_path) == [1, 2]
        assert ckpt.resume(job.state).step == 1


@pytest.mark.parametrize("action", ["warn", "off"])
def test_with_warnings_alone_bad_numbers_mark_no_checkpoint(tmp_path, action, caplog):
    """It counts like any other; with "off" the numbers are not looked at."""
    job = Job()
    with Checkpointer(tmp_path, config(action=action)) as ckpt:
        job.poison()
        assert not ckpt.save(1, job.state).result().marked
        assert ckpt.resume(job.state).step == 1
    assert bool(read_manifest(tmp_path / "step-00000001").health) is (action == "warn")
    assert ("layer.weight has 1 NaN" in caplog.text) is (action == "warn")


def test_a_norm_that_jumps_is_sick_where_that_is_asked_for(tmp_path):
    """A flipped bit of an exponent makes a number huge, not infinite."""
    for factor, marked in ((None, False), (10.0, True)):
        job = Job()
        with Checkpointer(tmp_path / str(factor), config(norm_jump=factor)) as ckpt:
            ckpt.save(1, job.state).result()
            job.poison(value=1e30)
            assert ckpt.save(2, job.state).result().marked is marked


def test_tensors_whose_names_are_ignored_raise_no_alarm(tmp_path):
    """By patterns of names within a file."""
    job = Job()
    with Checkpointer(tmp_path, config(ignore=("layer.*",))) as ckpt:
        job.poison()
        assert not ckpt.save(1, job.state).result().marked
        job.model.frozen.data.fill_(math.nan)
        assert ckpt.save(2, job.state).result().marked


def test_a_marked_one_does_not_replace_a_healthy_one_of_its_name(tmp_path):
    """A step that is saved again: the bad one gets a name of its own."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        job.poison()
        info = ckpt.save(1, job.state).result()
        assert info.marked
        assert info.path.name == "unhealthy-step-00000001"
        assert ckpt.save(1, job.state).result().path == info.path
        assert names(tmp_path) == ["step-00000001", "unhealthy-step-00000001"]
        assert ckpt.resume(job.state).step == 1
        assert job.model.layer.weight.isfinite().all()


def test_a_healthy_one_that_has_the_name_of_a_marked_one_stays(tmp_path):
    """A job that rolls back and saves the same steps again: each marked one may go, and nothing else."""
    job = Job()
    with Checkpointer(tmp_path, config(keep=1)) as ckpt:
        ckpt.save(3, job.state).result()
        for step in (4, 5):
            job.poison()
            assert ckpt.save(step, job.state).result().marked
            ckpt.resume(job.state)
            assert not ckpt.save(4, job.state).result().marked
        job.poison()
        assert ckpt.save(5, job.state).result().marked
        assert steps(tmp_path) == [4, 5]
        assert ckpt.resume(job.state).step == 4


def test_collecting_garbage_does_not_count_marked_ones(tmp_path):
    """``safe-ckpt gc --keep-last 1`` leaves the newest healthy one, whatever was saved after it."""
    job = Job()
    with Checkpointer(tmp_path, config(keep=None)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, job.state).result()
        job.poison()
        assert ckpt.save(4, job.state).result().marked
    command = [sys.executable, "-m", "safe_ckpt.tools.cli", "gc", str(tmp_path), "--keep-last", "1"]
    warm.run(command, check=True, capture_output=True, timeout=100)
    assert steps(tmp_path) == [3, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"healthy": "yes"},
        {"files": 3},
        {"files": {"model.safetensors": {"sick": [{}]}}},
        {"files": {"model.safetensors": {"learnt": [1, 2]}}},
        {"files": {"model.safetensors": {"norm": "big"}}},
    ],
)
def test_a_section_that_says_nonsense_is_a_damaged_manifest(tmp_path, change):
    """It is passed over for the one before, also where its digest is right."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        ckpt.save(2, job.state).result()
    rewrite(tmp_path / "step-00000002", lambda data: data["health"].update(change))
    with Checkpointer(tmp_path, config(norm_jump=10.0)) as ckpt:
        assert ckpt.resume(job.state).step == 1
        ckpt.save(3, job.state).result()


def test_infinite_parts_of_others_count_only_for_themselves(tmp_path):
    """A frozen twin whose parameters have the names of trained ones does not excuse these."""
    net, twin = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
    with torch.no_grad():
        net.weight[0, 0] = math.inf
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.save(1, {"net": net, "twin": twin}).result().marked


def test_a_mask_in_a_state_dict_of_ones_own_is_no_alarm(tmp_path):
    """No module says what it is: infinite from the first save on, it is by design."""
    state = {"model": Model().state_dict(), "best": torch.tensor(math.inf)}
    with Checkpointer(tmp_path, config()) as ckpt:
        assert not ckpt.save(1, state).result().marked
        assert not ckpt.save(2, state).result().marked
        state["model"]["layer.weight"][0, 0] = math.inf
        assert ckpt.save(3, state).result().marked


def test_nan_between_the_elements_of_a_view_is_no_alarm(tmp_path):
    """A column of a matrix whose other columns are NaN."""
    whole = torch.zeros(4, 4)
    whole[:, 1] = math.nan
    with Checkpointer(tmp_path, config()) as ckpt:
        assert not ckpt.save(1, {"column": whole[:, 0]}).result().marked


def test_a_structure_that_is_in_many_places_is_looked_at_once(tmp_path):
    """A list of two times a list of two times ...: a file of kilobytes, and a tree of billions."""
    nested = [torch.zeros(2)]
    for _ in range(40):
        nested = [nested, nested]
    with Checkpointer(tmp_path, config()) as ckpt:
        assert not ckpt.save(1, {"nested": nested, "odd": {1: 2}}).result(timeout_s=60).marked


def test_a_mirror_gets_healthy_ones_alone(bucket, tmp_path):
    """Bad ones would count there, and drive out good ones. A fresh directory goes on from the last healthy one."""
    job = Job()
    mirrored = CheckpointConfig(mirror=Mirror(url=bucket.url(), keep_last=2))
    with Checkpointer(tmp_path / "a", mirrored) as ckpt:
        ckpt.save(1, job.state).result()
        job.poison()
        for step in (2, 3, 4):
            ckpt.save(step, job.state).result()
    with Checkpointer(tmp_path / "b", mirrored) as ckpt:
        assert ckpt.resume(job.state).step == 1


def test_a_state_that_is_streamed_is_looked_at(tmp_path):
    """Larger than the memory that a snapshot may take."""
    job = Job()
    state = {**job.state, "large": {"t": torch.zeros(1 << 19)}}
    with Checkpointer(tmp_path, CheckpointConfig(max_host_bytes=1 << 20)) as ckpt:
        assert not ckpt.save(1, state).result().marked
        state["large"]["t"][1 << 18] = math.nan
        assert ckpt.save(2, state).result().marked
        assert ckpt.resume(state).step == 1


def test_bad_numbers_mark_a_checkpoint_in_an_object_store(bucket, tmp_path):
    """The same, with names that no other save has."""
    job = Job()
    with Checkpointer(bucket.url(), config()) as ckpt:
        ckpt.save(1, job.state).result()
        job.poison()
        for step in (1, 2, 3, 4):
            assert ckpt.save(step, job.state).result().marked
        assert ckpt.resume(job.state).step == 1
        assert job.model.layer.weight.isfinite().all()
        assert not ckpt.save(5, job.state).result().marked
    assert {key.split("/")[1].split(".")[0] for key in bucket.keys("run/") if "step-" in key} >= {
        "step-00000001",
        "step-00000004",
        "step-00000005",
    }
