"""``register`` in one process: what is written, what is read, what is refused, what is left behind."""

import copy
import gc
import json
import logging
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelerate_runs import (
    CONFIG,
    Tracker,
    Training,
    checkpoints,
    forget,
    fresh,
    make,
    names,
    registered,
    seed,
    shared_memory,
    stateful,
)
from safe_ckpt import CheckpointConfig, Retention, WriterConfig
from safe_ckpt.accelerate import SafeCheckpointPlugin, register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    DirectoryError,
    NotEnoughSpaceError,
    NoValidCheckpointError,
    StateError,
)
from support import flip_bit, needs_root, small_disk, writer_processes


@pytest.fixture(autouse=True)
def _alone():
    with fresh():
        yield


@pytest.mark.quick
def test_the_files_are_those_that_accelerate_writes(tmp_path):
    """Name by name, and a stock Accelerator restores everything from ours, generators included."""
    training = Training(make(tmp_path / "stock", dataloader_config=stateful()))
    training.epoch()
    training.accelerator.save_state()
    forget()
    with registered(tmp_path / "ours", dataloader_config=stateful()) as (accelerator, handle):
        ours = Training(accelerator)
        ours.epoch()
        path = accelerator.save_state()
        expected = ours.fingerprint()
        handle.wait()
    assert expected == training.fingerprint()
    stock = names(tmp_path / "stock/checkpoints/checkpoint_0")
    assert names(path) == sorted([*stock, "manifest.json"])
    verify_files(path, read_manifest(path))
    forget()
    reader = Training(make(None), number=5)
    reader.scramble()
    reader.accelerator.load_state(str(path))
    assert reader.fingerprint() == expected


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.quick
def test_a_fresh_accelerator_loads_every_bit_and_counts_on(tmp_path, safe):
    """With safetensors and with pickle: a fresh registered Accelerator has every bit again, and counts on from there."""
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator)
        for _ in range(2):
            training.epoch()
            accelerator.save_state(safe_serialization=safe)
        expected = training.fingerprint()
        training.epoch()  # the copy was complete when save_state returned
        handle.wait()
    forget()
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator, number=5)
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        assert accelerator.save_iteration == 2
        assert accelerator.save_state().name == "checkpoint_2"


def test_stock_checkpoints_are_loaded_with_a_warning(tmp_path, caplog):
    """What Accelerate itself wrote is taken when there is nothing of ours, unverified; ours come first, whatever the number."""
    training = Training(make(tmp_path, iteration=7))
    training.epoch()
    training.accelerator.save_state()
    expected = training.fingerprint()
    forget()
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator, number=5)
        training.scramble()
        with caplog.at_level(logging.WARNING):
            accelerator.load_state()
        assert training.fingerprint() == expected
        assert "without verification" in caplog.text
        assert accelerator.save_state().name == "checkpoint_8"
        handle.wait()
        os.rename(tmp_path / "checkpoints/checkpoint_7", tmp_path / "checkpoints/checkpoint_9")
        caplog.clear()
        accelerator.load_state()
        assert "without verification" not in caplog.text


@pytest.mark.quick
def test_resume_skips_what_is_not_committed(tmp_path):
    """An empty newest directory, a stock one cut off and a damaged one of ours are passed over; all bad is an error."""
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator)
        training.epoch()
        good = accelerator.save_state()
        expected = training.fingerprint()
        training.epoch()
        bad = accelerator.save_state()
        handle.wait()
    flip_bit(bad / "model.safetensors", 4100)
    (tmp_path / "checkpoints/checkpoint_8").mkdir()
    (tmp_path / "checkpoints/checkpoint_9").mkdir()
    (tmp_path / "checkpoints/checkpoint_9/model.safetensors").write_bytes(b"half")
    forget()
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator, number=5)
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        assert names(tmp_path / ".safe_ckpt/quarantine") == [bad.name]
        with pytest.raises(CorruptCheckpointError, match=r"bytes"):
            accelerator.load_state(tmp_path / ".safe_ckpt/quarantine" / bad.name)
        flip_bit(good / "optimizer.bin", 300)
        with pytest.raises(NoValidCheckpointError, match="checkpoint_9") as raised:
            accelerator.load_state()
        assert "checkpoints/" not in raised.value.rejected
        assert good.exists()


def test_a_fresh_run_has_nothing_to_load(tmp_path):
    """Upstream raises IndexError, or takes whatever lies there."""
    with registered(tmp_path) as (accelerator, _):
        with pytest.raises(NoValidCheckpointError, match="no checkpoint"):
            accelerator.load_state()
        with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
            accelerator.load_state(tmp_path / "nowhere")
    forget()
    with registered(None) as (accelerator, _):
        with pytest.raises(ConfigError, match="automatic_checkpoint_naming"):
            accelerator.load_state()
        with pytest.raises(ConfigError, match="automatic_checkpoint_naming"):
            accelerator.save_state()


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
@pytest.mark.quick
def test_total_limit_holds_after_each_commit_and_keeps_the_best(tmp_path, mode, best):
    """The limit holds after each commit and never before; keep_best keeps one more."""
    config = CheckpointConfig(timeouts=CONFIG.timeouts, retention=Retention(keep_best=1, metric="loss", mode=mode))
    with registered(tmp_path, config, limit=2) as (accelerator, handle):
        Training(accelerator)
        for loss in (3, 1, 5, 4, 2):
            accelerator.save_state(metrics={"loss": loss}, async_save=False)
        assert checkpoints(tmp_path) == [f"checkpoint_{best}", "checkpoint_3", "checkpoint_4"]
        with pytest.raises(StateError, match="loss"):
            accelerator.save_state(metrics={"loss": "low"})
        assert accelerator.save_iteration == 5


@pytest.mark.quick
def test_a_metric_that_no_save_has_keeps_all(tmp_path):
    """A typo in the settings deletes nothing, although the limit does without it."""
    rules = Retention(keep_best=1, metric="los")
    with registered(tmp_path, replace(CONFIG, retention=rules), limit=1) as (accelerator, _):
        Training(accelerator)
        for loss in (3, 1, 2):
            accelerator.save_state(metrics={"loss": loss}, async_save=False)
        assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


@needs_root
def test_a_save_that_fails_leaves_the_one_before(tmp_path):
    """total_limit=1 on a full disk: the error reaches the caller, the old checkpoint is whole and load_state restores it."""
    with small_disk(tmp_path / "disk", 8 << 20) as disk, registered(disk, limit=1) as (accelerator, handle):
        training = Training(accelerator, width=20_000)
        training.epoch()
        kept = accelerator.save_state(async_save=False)
        expected = training.fingerprint()
        (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - (1 << 20)))
        training.epoch()
        accelerator.save_state()
        with pytest.raises(NotEnoughSpaceError):
            handle.wait()
        assert checkpoints(disk) == [kept.name]
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        (disk / "filler").unlink()
        after = accelerator.save_state(async_save=False)
        assert checkpoints(disk) == [after.name]


@pytest.mark.quick
def test_an_error_nobody_saw_reaches_the_next_save_but_not_a_load(tmp_path):
    """Going back to the checkpoint before is what one does after a failure."""
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator)
        training.epoch()
        accelerator.save_state(async_save=False)
        expected = training.fingerprint()
        (tmp_path / ".safe_ckpt/pending").rmdir()
        (tmp_path / ".safe_ckpt/pending").write_text("in the way")
        accelerator.save_state()
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        (tmp_path / ".safe_ckpt/pending").unlink()
        (tmp_path / ".safe_ckpt/pending").mkdir()
        with pytest.raises(DirectoryError):
            accelerator.save_state()
        accelerator.save_state()
        handle.wait()


def test_a_save_that_is_skipped_leaves_nothing(tmp_path):
    """With on_busy="skip" neither a number is used up nor a folder of the hooks left; an export waits its turn."""
    config = CheckpointConfig(timeouts=CONFIG.timeouts, on_busy="skip", max_in_flight=1)
    with registered(tmp_path, config) as (accelerator, handle):
        accelerator.register_save_state_pre_hook(lambda *args: (Path(args[2]) / "more").write_text("more"))
        training = Training(accelerator, width=200_000)
        training.epoch()
        for _ in range(4):
            accelerator.save_state()
        handle.save_model(training.model, tmp_path / "weights")
        assert accelerator.save_iteration == len(checkpoints(tmp_path)) < 4
        assert list((tmp_path / ".safe_ckpt/pending").glob("*")) == []


@pytest.mark.quick
def test_hooks_are_called_as_accelerate_calls_them(tmp_path):
    """They get models, weights and a folder that exists; what they write is listed, verified and loaded from again."""
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator)
        calls = []

        def save_hook(models, weights, output_dir):
            calls.append((len(models), len(weights), Path(output_dir).is_dir()))
            os.makedirs(Path(output_dir) / "side")
            torch.save(weights.pop(), Path(output_dir) / "side/weights.pt")

        def load_hook(models, input_dir):
            models.pop().load_state_dict(torch.load(Path(input_dir) / "side/weights.pt"))

        kept = accelerator.register_save_state_pre_hook(save_hook)
        accelerator.register_load_state_pre_hook(load_hook)
        training.epoch()
        path = accelerator.save_state(async_save=False)
        expected = training.fingerprint()
        assert calls == [(2, 2, True)]
        assert "model_1.safetensors" not in names(path)
        assert "side/weights.pt" in [entry.path for entry in read_manifest(path).files]
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        flip_bit(path / "side/weights.pt", 100)
        with pytest.raises(CorruptCheckpointError, match="side/weights"):
            accelerator.load_state(path)
        kept.remove()

        def broken(models, weights, output_dir):
            (Path(output_dir) / "half").write_text("half")
            raise RuntimeError("the hook broke")

        accelerator.register_save_state_pre_hook(broken)
        with pytest.raises(RuntimeError, match="the hook broke"):
            accelerator.save_state()
        assert list((tmp_path / ".safe_ckpt/pending").glob("*")) == []
        assert checkpoints(tmp_path) == [path.name]


def test_trackers_hear_of_a_save_after_its_commit(tmp_path):
    """With the step that the caller gave; a tracker that fails harms nothing."""

    class Breaking(Tracker):
        def log(self, values, step=None, **_):
            self.heard.append((values, step, sorted(checkpoints(tmp_path))))
            if len(self.heard) == 2:
                raise RuntimeError("the tracker broke")

    tracker = Breaking()
    with registered(tmp_path, log_with=tracker) as (accelerator, handle):
        accelerator.init_trackers("project")
        Training(accelerator)
        accelerator.save_state(step=10)
        handle.wait()
        accelerator.save_state(step=20)
    assert [(values["ckpt/step"], there) for values, _, there in tracker.heard] == [
        (10, ["checkpoint_0"]),
        (20, ["checkpoint_0", "checkpoint_1"]),
    ]


def test_remove_leaves_no_method_thread_or_process(tmp_path):
    """Same bound methods, no attribute, no thread, no process, no shared memory, the directory free for others."""
    accelerator = make(tmp_path)
    before, attributes = threading.active_count(), set(vars(accelerator))
    methods = {name: getattr(accelerator, name) for name in ("save_state", "load_state", "end_training")}
    config = replace(CONFIG, writer=WriterConfig(inline_bytes=0))
    handle = SafeCheckpointPlugin(config).register(accelerator)
    assert accelerator.save_state != methods["save_state"]
    Training(accelerator, width=100_000)
    accelerator.save_state()
    assert writer_processes()
    handle.remove()
    handle.remove()
    assert {name: getattr(accelerator, name) for name in methods} == methods
    assert set(vars(accelerator)) == attributes
    assert checkpoints(tmp_path) == ["checkpoint_0"]
    assert writer_processes() == []
    gc.collect()  # what pytest keeps of an earlier test's exception may hold a mapping
    assert shared_memory() == []
    assert threading.active_count() == before
    register(accelerator, CONFIG).remove()


def test_end_training_finishes_what_is_in_flight(tmp_path):
    """It comes back when all is committed; what is called afterwards says what ended it, and what to do."""
    accelerator = make(tmp_path)
    handle = register(accelerator, CONFIG)
    training = Training(accelerator)
    accelerator.save_state()
    accelerator.end_training()
    assert checkpoints(tmp_path) == ["checkpoint_0"]
    accelerator.save_model(training.net, tmp_path / "stock")
    assert names(tmp_path / "stock") == ["model.safetensors"]
    for call in (accelerator.save_state, accelerator.load_state, lambda: handle.save_model(training.net, tmp_path)):
        with pytest.raises(ClosedError, match=r"end_training\(\) finished.*register\(accelerator\) again"):
            call()
    register(accelerator, CONFIG)
    accelerator.free_memory()
    with pytest.raises(ClosedError, match=r"save_state: free_memory.*register\(accelerator\) again"):
        accelerator.save_state()
    register(accelerator, CONFIG)
    second = make(tmp_path)
    handle = register(second, CONFIG)
    with pytest.raises(ClosedError, match="another Accelerator was registered for the same project"):
        accelerator.save_state()
    handle.remove()
    with pytest.raises(ClosedError, match=r"handle.remove\(\)"):
        handle.save_state()


class Holding:
    """A collate function that holds what a training holds."""

    def __init__(self, *held):
        self.held = held

    def __call__(self, batch):
        accelerator, handle = self.held
        ours = {"save_state", "save_model", "__getstate__", "_safe_ckpt"} & set(vars(accelerator))
        return sorted(ours), handle.closed, threading.active_count(), os.getpid()


def test_a_copy_is_a_stock_accelerator(tmp_path):
    """Pickled, copied, or sent to a spawned worker, it has nothing of ours; the registered one goes on."""
    accelerator = make(tmp_path)
    training = Training(accelerator)
    stock = set(vars(pickle.loads(pickle.dumps(accelerator))))
    with register(accelerator, CONFIG) as handle:
        accelerator.save_state()
        assert copy.deepcopy(accelerator) is accelerator  # as in stock
        for made in (pickle.loads(pickle.dumps(accelerator)), copy.copy(accelerator)):
            assert set(vars(made)) == stock
            assert made.save_state.__func__ is type(accelerator).save_state
        method = pickle.loads(pickle.dumps({"accelerator": accelerator, "save": accelerator.get_state_dict}))["save"]
        assert method.__self__.save_state.__func__ is type(accelerator).save_state
        loader = torch.utils.data.DataLoader(
            [1, 2], num_workers=1, multiprocessing_context="spawn", collate_fn=Holding(accelerator, handle)
        )
        (ours, closed, threads, pid), _ = loader
        assert (ours, closed, pid != os.getpid()) == ([], True, True)
        assert threads <= 2
        for other in (copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
            methods = (other.save_state, other.wait, other.end_training, other.free_memory, other.prepare_data_loader)
            for call in methods:
                with pytest.raises(ClosedError, match="copy of the handle"):
                    call()
            other.remove()
        training.epoch()
        accelerator.save_state(async_save=False)
    assert set(vars(accelerator)) == stock
    assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1"]


def test_an_exception_in_the_block_is_the_one_that_is_raised(tmp_path):
    """What is in flight is finished; the accelerator is as it was."""
    accelerator = make(tmp_path)
    with pytest.raises(KeyError, match="mine"), register(accelerator, CONFIG):
        Training(accelerator)
        accelerator.save_state()
        raise KeyError("mine")
    assert checkpoints(tmp_path) == ["checkpoint_0"]
    assert "save_state" not in vars(accelerator)


def test_settings_are_checked_at_registration(tmp_path, monkeypatch):
    """What is not covered or contradicts itself is refused with the remedy; the YAML file of the environment counts."""
    accelerator = make(tmp_path, limit=2)
    with pytest.raises(ConfigError, match="total_limit"):
        register(accelerator, CheckpointConfig(retention=Retention(keep_last=3)))
    assert "save_state" not in vars(accelerator)
    accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(ConfigError, match="save_on_each_node"):
        register(accelerator)
    accelerator.project_configuration.save_on_each_node = False
    (tmp_path / "settings.yaml").write_text("safe_ckpt:\n  timeouts:\n    barrier_s: '00:01:40'\n")
    monkeypatch.setenv("SAFE_CKPT_CONFIG", str(tmp_path / "settings.yaml"))
    with register(accelerator) as handle:
        assert handle.config.timeouts.barrier_s == 100
    accelerator.project_configuration.project_dir = None
    with pytest.raises(ConfigError, match="project_dir"):
        register(accelerator)


@pytest.mark.quick
def test_arguments_for_deepspeed_are_named_and_ignored(tmp_path, caplog):
    """As Accelerate ignores them without DeepSpeed; a misspelt one does not go unseen."""
    with registered(tmp_path) as (accelerator, _):
        Training(accelerator)
        with caplog.at_level(logging.WARNING):
            accelerator.save_state(metric=1, tag="a")
        assert "ignores metric (did you mean metrics?), tag: only DeepSpeed" in caplog.text


def test_after_the_end_one_may_register_again(tmp_path):
    """end_training closes the handle; the Accelerator is not lost for it, and an older handle cannot take the new one back."""
    accelerator = make(tmp_path)
    earlier = register(accelerator, CONFIG)
    Training(accelerator)
    accelerator.end_training()
    with register(accelerator, CONFIG):
        earlier.remove()
        accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_0"]


def test_a_tensor_that_cannot_be_saved_is_refused_by_name(tmp_path):
    """A tensor on the meta device, a dtype that safetensors has not: refused with the remedy, nothing is left behind."""
    with registered(tmp_path) as (accelerator, handle):
        odd = torch.nn.Module()
        odd.w = torch.nn.Parameter(torch.ones(2))
        odd.register_buffer("mask", torch.ones(2).to_sparse())
        accelerator.prepare(odd)
        with pytest.raises(StateError, match=r"mask.*safe_serialization=False"):
            accelerator.save_state()
        accelerator.save_state(safe_serialization=False, async_save=False)
        del odd.mask
        odd.w = torch.nn.Parameter(torch.ones(2, device="meta"))
        with pytest.raises(StateError, match=r"w.*offloaded"):
            accelerator.save_state()
        assert checkpoints(tmp_path) == ["checkpoint_0"]


ROWS = {
    "a row, and the whole": lambda whole: (whole[1], whole),  # stock keeps the first name, whatever it covers
    "the whole, and a row": lambda whole: (whole, whole[1]),
    "another shape": lambda whole: (whole, whole.view(4, 3)),
    "another dtype": lambda whole: (whole, whole.view(torch.int32)),
    "one and the same": lambda whole: (whole, whole),
    "turned, alone": lambda whole: (whole.t(), torch.ones(2)),
}
NEVER = {
    "two halves": lambda whole: (whole.view(-1)[:6], whole.view(-1)[6:]),
    "overlapping": lambda whole: (whole.view(-1)[:8], whole.view(-1)[4:]),
    "the whole, and turned": lambda whole: (whole, whole.t()),
    "two names of a part": lambda whole: (whole[1:], whole[1:]),
    "two rows apart": lambda whole: (whole[0], whole[2]),
}


def views(of):
    model = torch.nn.Module()
    model.far = torch.nn.Linear(2, 2)
    first, second = of(torch.arange(12.0).view(3, 4))
    model.register_buffer("first", first)
    model.register_buffer("second", second)
    return model


def test_memory_that_several_tensors_share_is_loaded_again_or_refused(tmp_path):
    """Of tensors in one memory the one that covers it is saved, as load_state wants it; where none does, they are named."""
    for number, (what, of) in enumerate([*ROWS.items(), *NEVER.items()]):
        accelerator = make(tmp_path / str(number))
        with register(accelerator, CONFIG) as handle:
            model = accelerator.prepare(views(of))
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            if what in NEVER:
                with pytest.raises(StateError, match=r"first, second: .*clone\(\).*safe_serialization=False"):
                    accelerator.save_state()
            else:
                accelerator.save_state()
                handle.wait()
                for value in model.state_dict().values():
                    value.zero_()
                accelerator.load_state()
                assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), what
            accelerator.save_state(safe_serialization=False, async_save=False)


def test_one_tensor_that_is_a_part_of_memory_is_refused(tmp_path):
    """A slice alone loads as little, as safetensors has it: it is named at the save."""
    with registered(tmp_path) as (accelerator, _):
        accelerator.prepare(views(lambda whole: (torch.ones(2), whole[1])))
        with pytest.raises(StateError, match=r"model 0: second: .*clone\(\)"):
            accelerator.save_state()
        assert checkpoints(tmp_path) == []


@pytest.mark.quick
def test_a_save_overlapped_with_training_holds_the_state_at_the_call(tmp_path):
    """The next step waits for the copy, through Accelerate's own optimizer wrapper: what is saved is what was at the call."""
    config = replace(CONFIG, snapshot="overlapped")
    with registered(tmp_path, config) as (accelerator, handle):
        training = Training(accelerator, width=100_000)
        training.epoch()
        accelerator.save_state()
        expected = training.fingerprint()
        training.epoch()
        handle.wait()
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected


def test_the_manifest_has_number_step_and_metrics(tmp_path):
    """Number, step and metrics can be read without unpickling anything."""
    with registered(tmp_path) as (accelerator, handle):
        Training(accelerator)
        path = accelerator.save_state(metrics={"loss": 1}, step=40, async_save=False)
    data = json.loads((path / "manifest.json").read_text())
    assert (data["step"], data["metrics"], data["notes"]) == (
        40,
        {"loss": 1.0},
        {"adapter": "accelerate", "iteration": 0},
    )


def test_errors_of_accelerate_stay_catchable(tmp_path):
    """A number of registered objects that does not fit is upstream's RuntimeError, still one."""
    with registered(tmp_path) as (accelerator, handle):
        Training(accelerator)
        accelerator.save_state(async_save=False)
        accelerator.register_for_checkpointing(type("More", (), {"state_dict": dict, "load_state_dict": dict})())
        with pytest.raises(RuntimeError, match="custom checkpoints") as raised:
            accelerator.load_state()
        assert pickle.loads(pickle.dumps(raised.value)).args is not None


@pytest.mark.quick
def test_a_save_takes_nothing_from_any_generator(tmp_path):
    """Saving takes nothing from any generator."""
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator)
        seed(3)
        before = training.fingerprint()
        accelerator.save_state(async_save=False)
        assert training.fingerprint() == before
