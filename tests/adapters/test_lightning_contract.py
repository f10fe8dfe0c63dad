"""The private parts of Lightning that the adapter leans on: when one of these fails, the adapter needs a look."""

import dataclasses
import importlib
import inspect
import re

import pytest
import torch
from lightning_runs import PACKAGES, package

PACKAGE = pytest.mark.parametrize("name", PACKAGES)


@PACKAGE
def test_the_hooks_of_model_checkpoint_have_the_known_signatures(name):
    """The methods that are overridden still exist and take the same arguments."""
    kind = package(name).callbacks.ModelCheckpoint
    expected = {
        "_save_checkpoint": ["self", "trainer", "filepath"],
        "_remove_checkpoint": ["self", "trainer", "filepath"],
        "_link_checkpoint": ["trainer", "filepath", "linkpath"],
        "_save_topk_checkpoint": ["self", "trainer", "monitor_candidates"],
        "_save_last_checkpoint": ["self", "trainer", "monitor_candidates"],
        "_should_remove_checkpoint": ["self", "trainer", "previous", "current"],
        "_should_save_on_exception": ["self", "trainer"],
        "_find_last_checkpoints": ["self", "trainer"],
        "file_exists": ["self", "filepath", "trainer"],
        "_monitor_candidates": ["self", "trainer"],
        "_should_skip_saving_checkpoint": ["self", "trainer"],
        "_generate_state_key": ["self", "kwargs"],
    }
    for method, arguments in expected.items():
        assert list(inspect.signature(getattr(kind, method)).parameters) == arguments, method


@PACKAGE
def test_the_attributes_that_are_restored_exist(name):
    """Every field of the shadow is a field of a fresh ModelCheckpoint."""
    from safe_ckpt.lightning.callback_state import _FIELDS

    callback = package(name).callbacks.ModelCheckpoint()
    assert getattr(callback, "_defer_save_until_validation", False) is False  # older releases put no save off
    assert [field for field in _FIELDS if not hasattr(callback, field)] == []


@PACKAGE
def test_every_argument_of_model_checkpoint_is_ours_too(name):
    """Our constructor takes all of its arguments, in its order, typed for the command line, and adds ours behind them."""
    from safe_ckpt.lightning import SafeCheckpointCallback

    theirs = list(inspect.signature(package(name).callbacks.ModelCheckpoint.__init__).parameters)
    ours = inspect.signature(SafeCheckpointCallback.__init__).parameters
    assert list(ours) == [
        *theirs,
        "config",
        "resume",
        "async_save",
        "export_to",
        "export_max_shard_size",
        "hooks",
        "every",
    ]
    for argument in theirs[1:]:
        assert (
            ours[argument].default
            == inspect.signature(package(name).callbacks.ModelCheckpoint.__init__).parameters[argument].default
        )
        assert ours[argument].annotation is not inspect.Parameter.empty


@PACKAGE
def test_the_seams_of_the_trainer_exist(name):
    """Connector, loops and strategy offer what the resume and the I/O use."""
    pl = package(name)
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False)
    connector = trainer._checkpoint_connector
    assert next(iter(inspect.signature(connector._restore_modules_and_callbacks).parameters)) == "checkpoint_path"
    assert list(inspect.signature(connector.dump_checkpoint).parameters) == ["weights_only"]
    assert list(inspect.signature(trainer.save_checkpoint).parameters) == [
        "filepath",
        "weights_only",
        "storage_options",
    ]
    loop = trainer.fit_loop
    for method in ("on_advance_start", "reset", "setup_data"):
        assert not inspect.signature(getattr(loop, method)).parameters
    assert loop.epoch_loop._num_ready_batches_reached() in (True, False)
    assert list(inspect.signature(trainer.precision_plugin.convert_input).parameters) == ["data"]
    source = inspect.getsource(
        inspect.unwrap(type(loop.epoch_loop).advance)
    )  # nothing is done with a batch before that
    assert source.index("next(data_fetcher)") < source.index("convert_input(batch)") < source.index("increment_ready()")
    for method in ("on_run_start", "on_advance_end"):
        assert list(inspect.signature(getattr(loop.epoch_loop, method)).parameters) == ["data_fetcher"]
    assert hasattr(loop.epoch_loop, "_skip_next_val")
    assert loop.epoch_loop.restarted_on_train_batch_end is loop.epoch_loop.restarted_on_last is False
    assert loop.epoch_loop.val_loop.restarting is False
    assert callable(loop.epoch_loop.val_loop.run)
    assert loop.epoch_loop.val_loop._has_run is False
    assert callable(loop.epoch_loop.val_loop._on_evaluation_end)
    assert list(inspect.signature(loop.epoch_loop._should_check_val_fx).parameters) == ["data_fetcher"]
    assert not inspect.signature(loop.epoch_loop._should_accumulate).parameters
    assert hasattr(loop.epoch_loop, "_batches_that_stepped")
    saves = package(name).callbacks.ModelCheckpoint()
    assert (saves._every_n_train_steps, saves._train_time_interval, saves._every_n_epochs) == (0, None, 1)
    assert list(inspect.signature(saves._should_save_on_train_epoch_end).parameters) == ["trainer"]
    assert hasattr(loop, "min_epochs")
    assert hasattr(loop.epoch_loop, "min_steps")
    assert callable(trainer._signal_connector._sigterm_notifier_fn)
    assert list(inspect.signature(trainer._signal_connector._slurm_sigusr_handler_fn).parameters) == ["signum", "_"]
    assert connector._hpc_resume_path is None
    assert connector._ckpt_path is None
    assert connector._loaded_checkpoint == {}
    assert next(iter(inspect.signature(connector.restore).parameters)) == "checkpoint_path"
    assert list(inspect.signature(connector.hpc_save_path).parameters) == ["folderpath"]
    assert hasattr(trainer._accelerator_connector, "cluster_environment")
    slurm = importlib.import_module(f"{name}.plugins.environments").SLURMEnvironment
    assert {"auto_requeue", "requeue_signal"} <= set(inspect.signature(slurm).parameters)
    assert hasattr(loop.epoch_loop.batch_progress, "is_last_batch")
    assert hasattr(loop, "_combined_loader")
    assert type(loop) is importlib.import_module(f"{name}.loops.fit_loop")._FitLoop
    assert loop._combined_loader_states_to_load == []
    loads = "self._load_combined_loader_states()"  # before the first batch can be taken
    source = inspect.getsource(inspect.unwrap(type(loop).setup_data))
    assert source.index(loads) < source.index("iter(self._data_fetcher)")
    combined = pl.utilities.CombinedLoader([])
    assert list(inspect.signature(combined._load_state_dicts).parameters) == ["states"]
    assert type(trainer.strategy).save_checkpoint.__qualname__ == "Strategy.save_checkpoint"
    assert pl.strategies.DDPStrategy.save_checkpoint.__qualname__ == "Strategy.save_checkpoint"
    for sharded in ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"):
        assert getattr(pl.strategies, sharded).save_checkpoint.__qualname__ != "Strategy.save_checkpoint"


@PACKAGE
def test_the_fields_that_tell_a_loops_place_in_an_epoch_exist(name):
    """lightning/loop_state.py reads these of a running loop, and of the state of one."""
    pl = package(name)
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False)
    loop = trainer.fit_loop
    assert loop._data_fetcher is None
    assert loop._can_stop_early is True
    assert loop.epoch_loop.done is False
    assert vars(trainer)["should_stop"] is False
    state = loop.state_dict()
    counts = {"ready", "started", "processed", "completed"}
    for progress in ("epoch_progress", "epoch_loop.batch_progress"):
        assert set(state[progress]["total"]) == set(state[progress]["current"]) == counts
    assert state["epoch_loop.batch_progress"]["is_last_batch"] is False
    fetchers = importlib.import_module(f"{name}.loops.fetchers")
    assert fetchers._PrefetchDataFetcher().done is False


@PACKAGE
def test_what_the_start_of_an_epoch_sets_is_where_we_put_it_back(name):
    """lightning/beside/epoch_start.py: public names, too, where Lightning does not say what comes of them."""
    pl = package(name)
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False)
    loop = trainer.fit_loop
    assert vars(trainer)["accumulate_grad_batches"] == 1
    assert loop._skip_backward is False
    assert "trainer.fit_loop.max_batches" in inspect.getsource(type(trainer).num_training_batches.fget).replace(
        "self", "trainer"
    )
    averaging = pl.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=2)
    averaging._max_epochs = 4
    assert (averaging.swa_start, averaging.swa_end) == (1, 3)
    assert (averaging._scheduler_state, averaging._latest_update_epoch, averaging.momenta) == (None, -1, {})
    assert averaging._model_contains_batch_norm is None
    source = inspect.getsource(type(averaging).on_train_epoch_start)
    asked = {"optimizers", "max_epochs", "lr_scheduler_configs", "current_epoch", "fit_loop", "accumulate_grad_batches"}
    assert set(re.findall(r"trainer\.(\w+)", source)) == asked
    assert "self._accumulate_grad_batches = trainer.accumulate_grad_batches" in source
    restored = inspect.getsource(type(averaging).load_state_dict)
    assert 'self._scheduler_state = state_dict["scheduler_state"]' in restored


@PACKAGE
def test_the_iterators_that_train_and_the_epoch_of_a_loader_are_where_we_look(name):
    """lightning/dataloader.py tells who trains on a loader, lightning/loop_state.py says as of which epoch one is asked for."""
    pl = package(name)
    loaders = pl.utilities.CombinedLoader([[1], [2, 3]], "max_size_cycle")
    assert loaders._iterator is None
    begun = iter(loaders)
    assert [next(one) for one in begun._iterator.iterators] == [1, 2]
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False)
    trainer.fit_loop.epoch_progress.current.completed = 7
    assert trainer.current_epoch == 7
    trainer.reload_dataloaders_every_n_epochs = 2
    for loop, due in (
        (trainer.fit_loop, "_should_reload_train_dl"),
        (trainer.fit_loop.epoch_loop.val_loop, "_should_reload_val_dl"),
    ):
        assert getattr(loop, due)
        assert not inspect.signature(loop.setup_data).parameters
        assert f"self.{due}" in inspect.getsource(inspect.unwrap(type(loop).setup_data))
        assert "self.trainer.current_epoch - self._last_" in inspect.getsource(getattr(type(loop), due).fget)
    assert trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch == float("-inf")
    assert "epoch_progress.total" in inspect.getsource(type(trainer.fit_loop).update_restart_stage)
    assert "batch_progress.total" in inspect.getsource(type(trainer.fit_loop.epoch_loop).update_restart_stage)


@PACKAGE
def test_what_an_epoch_has_logged_is_where_we_find_it(name):
    """lightning/results.py reads the results of a running epoch and makes them again; it replaces what asks for one."""
    pl = package(name)
    stopping, saves = pl.callbacks.EarlyStopping("x"), pl.callbacks.ModelCheckpoint()
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", callbacks=[stopping, saves])
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    for shown in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        assert getattr(connector, f"_{shown}") == getattr(connector, shown) == {}
    assert connector._first_loop_iter is None
    assert connector.should_reset_tensors("x")
    module = importlib.import_module(f"{name}.trainer.connectors.logger_connector.result")
    assert type(loop._results) is type(loop.val_loop._results) is module._ResultCollection
    assert list(inspect.signature(loop._results.log).parameters)[:3] == ["fx", "name", "value"]
    assert list(inspect.signature(loop._results.update_metrics).parameters) == ["key", "value", "batch_size"]
    assert list(inspect.signature(loop._results.reset).parameters) == ["metrics", "fx"]
    source = inspect.getsource(inspect.unwrap(module._ResultCollection.log))
    assert 'key = f"{fx}.{name}"' in source
    assert "self.update_metrics(key, value, batch_size)" in source
    assert [one.name for one in dataclasses.fields(module._Metadata)][-2:] == ["metric_attribute", "_sync"]
    loop._results.log("step", "x", torch.ones(()), on_step=True)
    made = loop._results["step.x"]
    assert (made.is_tensor, made.has_reset, made._update_count, made._computed) == (True, False, 1, None)
    assert made._forward_cache == made.value == 1
    assert set(made._defaults) == {"value", "cumulated_batch_size"}
    assert (made.meta.sync.should, made.meta.sync.rank_zero_only, made.meta.reduce_fx) == (False, False, torch.mean)
    assert list(inspect.signature(module._ResultMetric).parameters) == ["metadata", "is_tensor"]
    assert list(inspect.signature(saves._save_topk_checkpoint).parameters) == ["trainer", "monitor_candidates"]
    assert stopping.strict is True
    assert trainer.early_stopping_callbacks == [stopping]
    assert pl.LightningModule().on_train_batch_end.__qualname__ == "ModelHooks.on_train_batch_end"
    source = inspect.getsource(type(loop).advance)  # what is done there is done before the batch counts as completed
    module, ended = '"on_train_batch_end", batch_output, batch, batch_idx)', "trainer._logger_connector.on_batch_end()"
    assert source.rindex(module) < source.index(ended) < source.index("self.batch_progress.increment_completed()")
    assert list(inspect.signature(loop.update_lr_schedulers).parameters) == ["interval", "update_plateau_schedulers"]


@PACKAGE
def test_the_trainers_save_and_lightnings_io_are_where_we_replace_them(name):
    """lightning/install.py replaces the save_checkpoint of the class that has it, and knows Lightning's own I/O by its name."""
    from safe_ckpt.lightning.install import _home, _writes_as_torch

    pl = package(name)
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False)
    assert _home(trainer) is pl.Trainer
    assert _writes_as_torch(trainer.strategy.checkpoint_io)
    assert not _writes_as_torch(importlib.import_module(f"{name}.plugins.io").AsyncCheckpointIO())


@PACKAGE
def test_the_callback_is_a_checkpoint_for_both_trainers(name):
    """A Trainer of either package recognises it, adds no second ModelCheckpoint, and keys its state as upstream does."""
    from safe_ckpt.lightning import SafeCheckpointCallback

    pl = package(name)
    callback = SafeCheckpointCallback(monitor="loss")
    trainer = pl.Trainer(callbacks=[callback], logger=False, enable_progress_bar=False, accelerator="cpu")
    assert trainer.checkpoint_callbacks == [callback]
    assert callback.state_key == pl.callbacks.ModelCheckpoint(monitor="loss").state_key
