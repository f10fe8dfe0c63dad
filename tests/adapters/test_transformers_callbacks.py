"""What callbacks and classes find that look at a Trainer's checkpoint right after its save."""

import inspect
import os
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import transformers
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers_runs import CONFIG, SafeTrainer, names, trainer

from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Timeouts
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import RendezvousTimeout, SafeCheckpointError
from safe_ckpt.transformers import SafeCheckpointMixin
from safe_ckpt.transformers.lookers import JUDGED, anyone_looks, looks


def is_whole(folder):
    """Whether a checkpoint is there, with all that its manifest lists."""
    if not (folder / "manifest.json").is_file():
        return False
    verify_files(folder, read_manifest(folder))
    return True


def newest(args, state):
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class Copy(TrainerCallback):
    """Copies each checkpoint in ``on_save``, and writes a file of its own into it."""

    def __init__(self):
        self.found = []

    def on_save(self, args, state, control, **_):
        folder = newest(args, state)
        self.found.append(is_whole(folder))
        shutil.copytree(folder, folder.parent / f"copy-{state.global_step}")
        (folder / "uploaded").touch()


def test_a_callback_that_overrides_on_save_finds_a_committed_folder(tmp_path):
    """It may copy the folder and add to it; what it does of its own accord is not asked: its own ``on_save`` is enough."""
    callback = Copy()
    trainer(tmp_path, callbacks=[callback]).train()
    assert callback.found == [True] * 3
    for step in (2, 4, 6):
        assert is_whole(tmp_path / f"copy-{step}")
        assert (tmp_path / f"checkpoint-{step}/uploaded").is_file()
    trainer(tmp_path, max_steps=8).train(resume_from_checkpoint=True)
    assert names(tmp_path)[-1] == "checkpoint-8"


def reports(**facts):
    """An integration's library that is told of folders: the paths it was given, and whether a checkpoint was there."""
    seen = []

    def given(*args, **named):
        paths = [*args, *named.values(), *(named.get("artifacts") or {}).values()]
        folders = [Path(path) for path in paths if isinstance(path, str) and os.sep in path]
        seen.extend((folder.name, any(folder.rglob("manifest.json"))) for folder in folders)

    return seen, given


def bare(name, **attributes):
    """An integration of Transformers without its library: that is not installed, and its ``on_save`` needs a stand-in only."""
    kind = getattr(integration_utils, name)
    quiet = {
        event: lambda *_, **__: None
        for event in vars(TrainerCallback)
        if event.startswith("on_") and event != "on_save"
    }
    made = object.__new__(type(name, (kind,), {**quiet, "__del__": lambda _: None, "setup": quiet["on_log"]}))
    vars(made).update(_initialized=True, **attributes)
    return made


def wandb(on):
    seen, given = reports()
    made = MagicMock(summary={}, **{"Artifact.return_value.add_dir": given})
    level = integration_utils.WandbLogModel.CHECKPOINT if on else integration_utils.WandbLogModel.END
    return seen, bare("WandbCallback", _wandb=made, _log_model=level)


def mlflow(on, name="MLflowCallback"):
    seen, given = reports()
    library = MagicMock(**{"pyfunc.log_model": given})
    return seen, bare(name, _ml_flow=library, _log_artifacts=on, _auto_end_run=False)


def dagshub(on):
    return mlflow(on, "DagsHubCallback")


def clearml(on):
    seen, given = reports()
    library = MagicMock(**{"OutputModel.return_value.update_weights_package": given})
    more = {"_clearml": library, "_clearml_task": object(), "_checkpoints_saved": []}
    return seen, bare("ClearMLCallback", _log_model=on, **more)


def flyte(on):
    seen, given = reports()
    return seen, bare("FlyteCallback", cp=SimpleNamespace(save=given), sync_checkpoints=on)


def dvclive(on):
    seen, given = reports()
    return seen, bare("DVCLiveCallback", live=SimpleNamespace(log_artifact=given), _log_model="all" if on else True)


def neptune(on):
    seen, given = reports()
    made = bare("NeptuneCallback", _log_checkpoints="same" if on else None, _should_upload_checkpoint=on)
    made._log_model_checkpoint = lambda source, checkpoint: given(os.path.join(source, checkpoint))
    return seen, made


LOOK = {
    "WandbCallback": wandb,
    "MLflowCallback": mlflow,
    "DagsHubCallback": dagshub,
    "ClearMLCallback": clearml,
    "FlyteCallback": flyte,
    "DVCLiveCallback": dvclive,
    "NeptuneCallback": neptune,
}
NEVER_LOOK = {"TrackioCallback", "SwanLabCallback"}


def source(name):
    return inspect.getsource(getattr(integration_utils, name))


def test_every_integration_with_an_on_save_is_judged():
    """Of the installed Transformers: each is one that looks at the folder when it is told to, or one that never does."""
    kinds = {
        kind.__name__
        for kind in vars(integration_utils).values()
        if isinstance(kind, type) and issubclass(kind, TrainerCallback) and kind.on_save is not TrainerCallback.on_save
    }
    assert kinds <= LOOK.keys() | NEVER_LOOK, "Transformers has more: see what they do, and name them here"
    own = {name for name in kinds if "on_save" in vars(getattr(integration_utils, name))}
    assert own == {name for name in JUDGED if hasattr(integration_utils, name)}
    for name, switch in JUDGED.items():
        told = f"transformers/lookers.py: {name} has another switch"
        assert name not in kinds or switch is None or f"self.{switch[0]}" in source(name), told
    for name in NEVER_LOOK & kinds:
        assert not looks(object.__new__(getattr(integration_utils, name))), name


@pytest.mark.parametrize("name", LOOK)
def test_an_integration_that_uploads_checkpoints_finds_them(tmp_path, name):
    """Switched on, what it uploads is committed; switched off, nothing is waited for; a subclass with its own is waited for."""
    if not hasattr(integration_utils, name):
        pytest.skip(f"this release has no {name}")
    assert not looks(LOOK[name](False)[1])
    seen, callback = LOOK[name](True)
    made = trainer(tmp_path, max_steps=2, callbacks=[callback])
    made.train()
    assert seen, "it was not told of a folder"
    assert all(there for _, there in seen), seen
    kind = type("Mine", (type(callback),), {"on_save": lambda *_, **__: None})
    assert looks(object.__new__(kind))
    vars(callback).clear()  # of a release that calls its switch otherwise
    assert looks(callback)


def test_a_trainer_whose_callbacks_look_at_no_folder_waits_for_no_save(tmp_path, monkeypatch):
    """Transformers' own callbacks and those without an ``on_save`` leave the save in the background."""
    waited = []
    made = trainer(tmp_path, callbacks=[wandb(False)[1], TrainerCallback()])
    monkeypatch.setattr(
        "safe_ckpt.transformers.saver.TransformersSaver.wait", lambda _: waited.append(made.state.global_step)
    )
    made.train()
    assert set(waited) <= {6}  # the end of train() waits
    assert not any(looks(one) for one in made.callback_handler.callbacks)


def test_a_class_of_the_users_finds_the_folder_behind_its_save(tmp_path):
    """Below the mixin or above: what it does behind ``super()._save_checkpoint`` it does to a committed folder."""
    found = []

    class Above(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            found.append(("above", is_whole(newest(self.args, self.state))))

    class Safe(SafeCheckpointMixin, Above):
        checkpoint_config = CONFIG

    class Below(SafeTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            found.append(("below", is_whole(newest(self.args, self.state))))

    trainer(tmp_path / "above", Safe, max_steps=2).train()
    trainer(tmp_path / "below", Below, max_steps=2).train()
    assert found == [("above", True), ("below", True)]


@pytest.mark.parametrize("name", ["trl_runs", "transformers_ext", "safe_ckpt_runs.own"])
@pytest.mark.quick
def test_a_class_of_the_users_is_known_by_its_whole_package(tmp_path, name):
    """A module whose name begins like that of TRL, Transformers or this one is the user's: its folders are committed, too."""
    found = []

    class Mine(SafeTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            found.append(is_whole(newest(self.args, self.state)))

    Mine._save_checkpoint.__module__ = name  # as if it were written there
    made = trainer(tmp_path, Mine, max_steps=2)
    assert anyone_looks(made)
    made.train()
    assert found == [True]


@pytest.mark.parametrize("name", ["trl.trainer.sft_trainer", "transformers.trainer", "safe_ckpt.transformers.mixin"])
@pytest.mark.quick
def test_classes_of_these_packages_look_at_no_folder(tmp_path, name):
    """What TRL, Transformers and this package do is known: no save is waited for because of it."""

    class Theirs(SafeTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)

    Theirs._save_checkpoint.__module__ = name
    assert not anyone_looks(trainer(tmp_path, Theirs))


def test_a_jit_checkpoint_at_sigterm_is_saved_without_the_trainers_mark(tmp_path):
    """``enable_jit_checkpoint`` puts a mark into the folder, saves, and takes the mark away: it is not in the checkpoint."""
    jit = pytest.importorskip("transformers.trainer_jit_checkpoint")

    class Ask(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                manager.is_checkpoint_requested = True

    before = signal.getsignal(signal.SIGTERM)
    try:
        made = trainer(tmp_path, max_steps=6, save_steps=100, enable_jit_checkpoint=True, callbacks=[Ask()])
        (manager,) = [
            one.jit_manager for one in made.callback_handler.callbacks if isinstance(one, jit.JITCheckpointCallback)
        ]
        made.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    (name,) = names(tmp_path)
    assert is_whole(tmp_path / name)
    assert not (tmp_path / name / "checkpoint-is-incomplete.txt").exists()


class Limit(TrainerCallback):
    """From step 4 on no file of this process may be larger than a few kilobytes: the optimizer's cannot be written."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _one_rank_looks(rank, folder):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    callback = Copy()
    callbacks = [callback] if rank else [Limit()]
    made = trainer(folder, SafeTrainer, callbacks=callbacks, ddp_backend="gloo")
    with pytest.raises(SafeCheckpointError) as raised:
        made.train()
    return callback.found, made.state.global_step, type(raised.value).__name__


@pytest.mark.timeout(120)
def test_a_callback_on_one_rank_is_waited_for_by_all(tmp_path):
    """It finds the folder, and a save that fails ends training on both ranks at the step of that save."""
    found = values(spawn_ranks(_one_rank_looks, 2, tmp_path, init=False, timeout_s=90))
    assert [one[0] for one in found] == [[], [True]]
    assert [one[1] for one in found] == [4, 4]


class Preempted(TrainerCallback):
    """Transformers' own callback, of one process of several, is told to save."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            self.manager.is_checkpoint_requested = True


def _one_rank_is_preempted(rank, folder):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    callback = Preempted()
    limits = Timeouts(barrier_s=4, peer_stall_s=20)
    kind = type("Limited", (SafeTrainer,), {"checkpoint_config": CheckpointConfig(timeouts=limits, lease_s=1)})
    made = trainer(folder, kind, ddp_backend="gloo", enable_jit_checkpoint=True)
    if rank == 0:
        asked = made.callback_handler.callbacks
        callback.manager = next(one.jit_manager for one in asked if getattr(one, "jit_manager", None) is not None)
        asked.append(callback)
    with pytest.raises(RendezvousTimeout if rank == 0 else Exception) as raised:
        made.train()
    return str(raised.value)


@pytest.mark.timeout(120)
def test_a_process_that_is_preempted_alone_waits_no_longer_than_it_may(tmp_path):
    """``enable_jit_checkpoint`` asks each process alone. One that saves at a step of its own names the others, and ends."""
    pytest.importorskip("transformers.trainer_jit_checkpoint")
    found = values(spawn_ranks(_one_rank_is_preempted, 2, tmp_path, init=False, timeout_s=90))
    assert "_save_checkpoint" in found[0]
    assert "missing ranks: [1]. They are alive and somewhere else" in found[0]
    assert is_whole(tmp_path / "checkpoint-2")


def test_every_trainer_can_be_made_safe_by_assigning_the_class(tmp_path, monkeypatch):
    """To both names of Transformers: what is built by either name, and a class below it, saves safely and resumes."""

    class Safe(SafeCheckpointMixin, Trainer):
        checkpoint_config = CONFIG

    monkeypatch.setattr(transformers, "Trainer", Safe)
    monkeypatch.setattr(transformers.trainer, "Trainer", Safe)

    class Below(transformers.Trainer):
        pass

    for name, kind in {"one": transformers.Trainer, "other": transformers.trainer.Trainer, "below": Below}.items():
        trainer(tmp_path / name, kind, max_steps=2).train()
        assert is_whole(tmp_path / name / "checkpoint-2"), name
    made = trainer(tmp_path / "one", transformers.Trainer, max_steps=4)
    made.train(resume_from_checkpoint=True)
    assert names(tmp_path / "one") == ["checkpoint-2", "checkpoint-4"]
