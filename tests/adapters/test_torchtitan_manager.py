"""``SafeCheckpointManager`` by itself, without a Trainer: what fails, what is refused, and what a save holds."""

import json
import os
import signal
import time

import pytest

pytest.importorskip("torchtitan")
import titan_runs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from kit import limits
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Retention, StorageConfig
from safe_ckpt.errors import (
    ConfigError,
    DesyncError,
    DirectoryInUseError,
    PeerLostError,
    RestoreError,
    SafeCheckpointError,
    SaveError,
    StateError,
)
from support import writer_processes

titan_runs.ready()
QUICK = CheckpointConfig(timeouts=limits.QUICK)


class Counted:
    """What is stateful, as an optimizer, a schedule or a loader of torchtitan's is; it may be told to fail."""

    def __init__(self, **state):
        self.state = state
        self.fails = False

    def state_dict(self):
        if self.fails:
            raise ValueError("its state cannot be had")
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


def build(base, width=8, **options):
    """A manager of a small model that all ranks have, and what it saves: model, optimizer, loader, trainer."""
    from safe_ckpt.torchtitan import SafeCheckpointManager

    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    parts = [torch.nn.Linear(64, width), Counted(exp_avg=torch.full((3,), 2.0)), Counted(), Counted(step=0)]
    parts[2].state = {f"dp_rank_{rank}": b"place", "world_size": 2}
    chosen = {
        "enable": True,
        "interval": 1,
        "last_save_model_only": False,
        "folder": "run",
        "settings": QUICK,
        **options,
    }
    manager = SafeCheckpointManager.Config(**chosen).build(
        dataloader=parts[2],
        model_parts=[parts[0]],
        optimizers=parts[1],
        lr_schedulers=Counted(last_epoch=3),
        states={"train_state": parts[3]},
        sd_adapter=None,
        base_folder=str(base),
    )
    return manager, *parts


def _changes_at_once(rank, folder, mode):
    titan_runs.on_cpu()
    manager, model, optimizer, loader, train_state = build(folder, async_mode=mode)
    saved = model.weight.detach().clone()
    train_state.state["step"] = 1
    assert manager.save(curr_step=1)
    manager.maybe_wait_for_staging()
    with torch.no_grad():
        model.weight.zero_()
    optimizer.state["exp_avg"].zero_()
    loader.state[f"dp_rank_{rank}"] = b"elsewhere"
    train_state.state["step"] = 7
    assert manager.load()
    told = torch.equal(model.weight, saved), optimizer.state["exp_avg"].tolist(), loader.state, train_state.state
    manager.close()
    return told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_an_asynchronous_save_holds_the_state_at_the_call(tmp_path, mode):
    """The state may change, and be loaded, as soon as an asynchronous save has returned; each rank has its loader's state."""
    for rank, told in enumerate(values(spawn_ranks(_changes_at_once, 2, tmp_path, mode))):
        assert told == (True, [2.0] * 3, {f"dp_rank_{rank}": b"place", "world_size": 2}, {"step": 1})
    assert writer_processes() == []


def _one_fails(rank, folder):
    titan_runs.on_cpu()
    manager, _, optimizer, _, _ = build(folder)
    manager.save(curr_step=1)
    optimizer.fails = rank == 1
    raised = []
    try:
        manager.save(curr_step=2)
    except SafeCheckpointError as error:
        raised.append(str(error))
    except ValueError as error:
        raised.append(str(error))
    optimizer.fails = False
    manager.save(curr_step=3)
    manager.close()
    return raised


@pytest.mark.timeout(120)
def test_a_state_that_fails_on_one_rank_fails_the_save_on_all(tmp_path):
    """No rank waits for one whose state cannot be had: all raise its error, nothing appears, and the next save works."""
    told = values(spawn_ranks(_one_fails, 2, tmp_path))
    assert all(len(raised) == 1 and "its state cannot be had" in raised[0] for raised in told), told
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-1", "step-3"]


def _one_dies(rank, folder):
    titan_runs.on_cpu()
    manager, *_ = build(folder)
    manager.save(curr_step=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        manager.save(curr_step=2)
    except SafeCheckpointError as error:
        return type(error), str(error), time.monotonic() - begun
    finally:
        manager.close()
    return None


@pytest.mark.timeout(120)
def test_a_killed_rank_is_named_by_a_save_within_seconds(tmp_path):
    """A save whose other rank was killed ends within seconds, and names it. What was committed stays."""
    kind, text, seconds = spawn_ranks(_one_dies, 2, tmp_path, expendable=[1])[0].value
    assert kind is PeerLostError, text
    assert "1" in text
    assert seconds < 20
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-1"]


def _asks_for_more(rank, folder):
    titan_runs.on_cpu()
    manager, model, optimizer, _, _ = build(folder)
    manager.save(curr_step=1)
    with torch.no_grad():
        model.weight.fill_(7.0)
    if rank == 1:
        optimizer.state["more"] = torch.zeros(2)
    try:
        manager.load()
    except SafeCheckpointError as error:
        return type(error), str(error), bool((model.weight == 7.0).all())
    finally:
        manager.close()
    return None


@pytest.mark.timeout(120)
def test_nothing_is_restored_where_one_rank_asks_for_what_is_not_there(tmp_path):
    """The ranks compare before any of them reads: all raise, and the model is as it was."""
    for kind, text, unchanged in values(spawn_ranks(_asks_for_more, 2, tmp_path)):
        assert kind is RestoreError
        assert "optimizer.more" in text
        assert unchanged


def _steps_differ(rank, folder):
    titan_runs.on_cpu()
    manager, *_ = build(folder)
    try:
        manager.save(curr_step=1 + rank)
    except DesyncError as error:
        return str(error)
    finally:
        manager.close()
    return ""


@pytest.mark.timeout(120)
def test_ranks_at_different_steps_are_told_so(tmp_path):
    """Two ranks that are at different steps, whose parts would have made one wrong checkpoint, both raise."""
    told = values(spawn_ranks(_steps_differ, 2, tmp_path))
    assert all("ranks [0]: 1; ranks [1]: 2" in text for text in told), told


@pytest.fixture
def cpu():
    titan_runs.on_cpu()


def test_settings_that_the_manager_cannot_honour_are_refused_by_name(tmp_path, cpu):
    """An address for a folder, rules of retention beside ``keep_latest_k``, and signals that nobody asks about."""
    with pytest.raises(ConfigError, match=r"checkpoint.folder.*mirror.url"):
        build(tmp_path, folder="s3://bucket/run")
    with pytest.raises(ConfigError, match=r"keep_latest_k"):
        build(tmp_path, settings=CheckpointConfig(retention=Retention(keep_last=3)))
    with pytest.raises(ConfigError, match=r"save_on_signals"):
        build(tmp_path, settings=CheckpointConfig(save_on_signals=("SIGTERM",)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_manager_at_a_time(tmp_path, cpu):
    """A second one is refused until the first one is closed; one that only loads holds nothing."""
    manager, *_ = build(tmp_path)
    manager.save(curr_step=1)
    with pytest.raises(DirectoryInUseError):
        build(tmp_path)
    reader, model, *_ = build(tmp_path, load_only=True)
    with torch.no_grad():
        model.weight.zero_()
    assert reader.load()
    assert model.weight.abs().sum() > 0
    assert not reader.save(curr_step=2)
    reader.close()
    manager.close()
    manager.close()
    build(tmp_path)[0].close()
    disabled, *_ = build(tmp_path, enable=False)
    assert not disabled.save(curr_step=1)
    assert not disabled.load()
    disabled.close()


def test_a_save_has_the_metrics_that_it_is_given(tmp_path, cpu):
    """``save(step, metrics=...)``, or the attribute ``metrics``, which torchtitan's own Trainer leaves to a subclass."""
    manager, *_ = build(tmp_path)
    manager.metrics = {"loss": 2.0}
    assert manager.save(curr_step=1)
    assert manager.save(curr_step=2, metrics={"loss": torch.tensor(1.0)})
    with pytest.raises(StateError, match="loss"):
        manager.save(curr_step=3, metrics={"loss": "low"})
    manager.close()
    told = {n: json.loads((tmp_path / f"run/step-{n}/manifest.json").read_text())["metrics"] for n in (1, 2)}
    assert told == {1: {"loss": 2.0}, 2: {"loss": 1.0}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_reads_what_is_saved_and_a_seed_is_the_model_alone(tmp_path, cpu):
    """DCP itself reads a checkpoint under torchtitan's names; a last save of the model alone has the type that is asked for."""
    manager, model, *_ = build(tmp_path, last_save_model_only=True, export_dtype="bfloat16", interval=2)
    manager.save(curr_step=0, last_step=True)
    manager.save(curr_step=2)
    manager.save(curr_step=3, last_step=True)
    manager.close()
    state = {"weight": torch.zeros(8, 64), "train_state": {"step": 5}, "optimizer": {"exp_avg": torch.zeros(3)}}
    dcp.load(state, checkpoint_id=str(tmp_path / "run/step-2"))
    assert torch.equal(state["weight"], model.weight)
    assert (state["train_state"], state["optimizer"]["exp_avg"].tolist()) == ({"step": 0}, [2.0] * 3)
    for step in (0, 3):
        known = dcp.FileSystemReader(tmp_path / f"run/step-{step}").read_metadata().state_dict_metadata
        assert {name: one.properties.dtype for name, one in known.items()} == dict.fromkeys(
            ["weight", "bias"], torch.bfloat16
        )
    again, *_ = build(tmp_path)
    assert again.load()
    with pytest.raises(RestoreError, match="Missing key"):  # the model alone, asked for by its step
        again.load(step=3)
    again.close()


def test_frozen_weights_are_written_once(tmp_path, cpu):
    """Weights that are frozen, as under an adapter of LoRA, go to a file of their own, which later checkpoints share."""
    manager, model, *_ = build(tmp_path, width=1 << 13)
    model.weight.requires_grad_(False)
    for step in (1, 2):
        manager.save(curr_step=step)
    manager.close()
    links = {path.name: path.stat().st_nlink for path in (tmp_path / "run/step-2").glob("*.distcp")}
    assert sorted(links.values()) == [1, 2], links
    reader, other, *_ = build(tmp_path, width=1 << 13, load_only=True)
    with torch.no_grad():
        other.weight.zero_()
    assert reader.load(step=2)
    assert torch.equal(other.weight, model.weight)
    reader.close()


def test_the_settings_reach_logs_without_secrets(cpu):
    """torchtitan writes its Config to logs and trackers as JSON: ours is in it, and no key of a store."""
    from safe_ckpt.torchtitan import SafeCheckpointManager

    storage = StorageConfig(options=("secret_access_key=hunter2",))
    config = SafeCheckpointManager.Config(settings=CheckpointConfig(lease_s=30, storage=storage))
    text = json.dumps(config.to_dict())
    assert "lease_s=30" in text
    assert "hunter2" not in text
    assert json.loads(json.dumps(SafeCheckpointManager.Config().to_dict()))["settings"] is None


def _full(rank, folder):
    titan_runs.on_cpu()
    manager, *_ = build(folder, async_mode="async")
    manager.save(curr_step=1)
    manager.maybe_wait_for_saving()
    (folder / "run/.safe_ckpt/pending").rmdir() if rank == 0 else None
    if rank == 0:
        (folder / "run/.safe_ckpt/pending").write_text("a file in its place")
    dist.barrier()
    manager.save(curr_step=2)
    raised = []
    try:
        manager.save(curr_step=3)
    except (SaveError, StateError, SafeCheckpointError) as error:
        raised.append(type(error).__name__)
    try:
        manager.close()
    except SafeCheckpointError as error:
        raised.append(type(error).__name__)
    return raised


@pytest.mark.timeout(120)
def test_an_asynchronous_save_that_failed_is_raised_by_the_next(tmp_path):
    """On every rank, once, and not at all by what comes after."""
    told = values(spawn_ranks(_full, 2, tmp_path))
    assert told[0] == told[1], told
    assert len(told[0]) == 1, told
    assert "step-1" in os.listdir(tmp_path / "run")
