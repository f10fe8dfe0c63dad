"""A mirror under each framework: the job is stopped, its disk is lost, and a fresh machine goes on to the same end."""

import contextlib
import dataclasses
import shutil
import threading

import pytest
from lightning_runs import QUICK, Stop, fingerprint, module_class, package, stop_at, trainer
from transformers_runs import SafeTrainer
from transformers_runs import Stop as StopTraining
from transformers_runs import fingerprint as trained
from transformers_runs import trainer as hugging_face

from accelerate_runs import CONFIG, Training, fresh, registered, stateful
from kit.far import FarDirectory, listed
from kit.fault_proxy import FaultProxy
from kit.patience import scaled, wait_until
from safe_ckpt import Mirror, StorageConfig, events
from safe_ckpt.core.formats.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.errors import CheckpointNotFoundError
from safe_ckpt.extensions.mirror.mirror import MirrorUploads as Uploads
from safe_ckpt.lightning import SafeCheckpointCallback
from safe_ckpt.tools.inspection.fetch import fetch
from support import flip_bit


@pytest.fixture(params=["a store", "a directory"])
def far(request, tmp_path_factory):
    """Where the copies go."""
    if request.param == "a store":
        return request.getfixturevalue("bucket")
    return FarDirectory(tmp_path_factory.mktemp("far") / "run")


def mirroring(config, bucket, **more):
    return dataclasses.replace(config, mirror=Mirror(url=bucket.url(), **more))


def mirrored(bucket):
    return sorted(one.manifest.name for one in listed(bucket))


def lightning(folder, config, *, seed, stop=None, name="lightning.pytorch", hooks=()):
    pl = package(name)
    pl.seed_everything(seed, verbose=False)
    module = module_class(pl)()
    callback = SafeCheckpointCallback(
        dirpath=folder,
        filename="{epoch}-{step}",
        resume="auto",
        save_top_k=-1,
        save_last="link",
        config=config,
        hooks=hooks,
    )
    with contextlib.suppress(Stop):
        trainer(pl, [callback, *([stop_at(pl, stop)] if stop else [])], folder).fit(module)
    return fingerprint(module)


def test_lightning_goes_on_with_an_empty_disk(tmp_path, far):
    """The single files of a callback come back from the mirror, and training ends bit for bit as if nothing had happened."""
    expected = lightning(tmp_path / "whole", QUICK, seed=1)
    config, seen = mirroring(QUICK, far), []
    lightning(tmp_path / "run", config, seed=1, stop=7)
    assert mirrored(far) == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]
    (newest,) = (one.path for one in listed(far) if one.manifest.name == "epoch=1-step=6.ckpt")
    by_command = fetch(newest, tmp_path / "got")
    assert by_command.read_bytes() == (tmp_path / "run" / "epoch=1-step=6.ckpt").read_bytes()
    shutil.rmtree(tmp_path / "run")
    found = lightning(tmp_path / "run", config, seed=77, hooks=[seen.append])
    assert found == expected
    fetched = [event for event in seen if isinstance(event, events.Fetched)]
    assert [event.path for event in fetched] == [str(tmp_path / "run" / "epoch=1-step=6.ckpt")]


def held_until(all_saved, seen, free):
    """A callback of Lightning's: at the end of training the store answers, once so many saves are committed."""

    class Free(package("lightning.pytorch").Callback):
        def on_train_end(self, *_):
            wait_until(lambda: sum(isinstance(event, events.Committed) for event in seen) == all_saved, 60, "the saves")
            free.set()

    return Free()


def test_a_slow_mirror_has_the_newest_of_each_of_two_callbacks(tmp_path, object_server, bucket, monkeypatch):
    """The first upload takes as long as training. What is passed over then gave way to a newer one of its own directory."""
    free, seen = threading.Event(), []
    with FaultProxy(object_server.endpoint) as proxy:
        proxy.on_request = lambda record: (
            (record.method, ".ckpt" in record.path) != ("PUT", True) or free.wait(scaled(60))
        )
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        slow = dataclasses.replace(mirroring(QUICK, bucket), storage=StorageConfig(request_timeout_s=100))
        pl = package("lightning.pytorch")
        every = {"filename": "{step}", "save_top_k": -1, "config": slow, "hooks": [seen.append]}
        callbacks = [
            SafeCheckpointCallback(tmp_path / "a", every_n_epochs=1, **every),
            SafeCheckpointCallback(tmp_path / "b", every_n_train_steps=3, **every),  # once in each epoch, too
        ]
        trainer(pl, [*callbacks, held_until(6, seen, free)], tmp_path).fit(module_class(pl)())
    there = {event.path for event in seen if isinstance(event, events.Mirrored) and not event.error}
    newest = {str(tmp_path / name / "step=9.ckpt") for name in ("a", "b")}
    assert newest <= there
    assert len(there) == 3


def test_accelerate_goes_on_with_an_empty_disk(tmp_path, far):
    """load_state() without a name takes the newest of the mirror where the project's folder is empty."""
    config = mirroring(CONFIG, far)
    with fresh(), registered(tmp_path / "whole", dataloader_config=stateful()) as (accelerator, handle):
        training = Training(accelerator)
        training.epoch()
        accelerator.save_state()
        training.epoch()
        expected = training.fingerprint()
    with fresh(), registered(tmp_path / "run", config, dataloader_config=stateful()) as (accelerator, handle):
        training = Training(accelerator)
        training.epoch()
        accelerator.save_state()
    assert mirrored(far) == ["checkpoint_0"]
    shutil.rmtree(tmp_path / "run")
    with fresh(), registered(tmp_path / "run", config, dataloader_config=stateful()) as (accelerator, handle):
        training = Training(accelerator, number=5)
        accelerator.load_state()
        training.epoch()
        assert training.fingerprint() == expected


def test_a_trainer_goes_on_with_an_empty_disk(tmp_path, far):
    """``resume_from_checkpoint=True`` takes the newest of the mirror, and the end is that of an uninterrupted run."""

    class Mirroring(SafeTrainer):
        checkpoint_config = mirroring(SafeTrainer.checkpoint_config, far)

    whole = hugging_face(tmp_path / "whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        hugging_face(tmp_path / "run", Mirroring, callbacks=[StopTraining(5)]).train()
    assert mirrored(far) == ["checkpoint-2", "checkpoint-4"]
    shutil.rmtree(tmp_path / "run")
    again = hugging_face(tmp_path / "run", Mirroring)
    again.train(resume_from_checkpoint=True)
    assert trained(again) == trained(whole)


def test_a_callback_takes_an_address(tmp_path, bucket):
    """``dirpath="s3://..."``: the files lie in the cache first; what save_top_k deletes goes in both places."""
    config = dataclasses.replace(QUICK, storage=StorageConfig(cache_dir=str(tmp_path / "cache")))
    expected = lightning(tmp_path / "whole", QUICK, seed=1)

    def run(**more):
        pl = package("lightning.pytorch")
        pl.seed_everything(more.pop("seed"), verbose=False)
        module = module_class(pl)()
        callback = SafeCheckpointCallback(
            dirpath=bucket.url(), filename="{epoch}-{step}", resume="auto", monitor="epoch", mode="max", config=config
        )
        stop = more.pop("stop", None)
        with contextlib.suppress(Stop):
            trainer(pl, [callback, *([stop_at(pl, stop)] if stop else [])], tmp_path / "root").fit(module)
        return fingerprint(module)

    run(seed=1, stop=7)
    assert mirrored(bucket) == ["epoch=1-step=6.ckpt"]
    shutil.rmtree(tmp_path / "cache")
    assert run(seed=77) == expected
    assert mirrored(bucket) == ["epoch=2-step=9.ckpt"]


def test_a_project_takes_an_address(tmp_path, bucket):
    """``ProjectConfiguration("s3://...")``, with automatic naming and a total_limit."""
    config = dataclasses.replace(CONFIG, storage=StorageConfig(cache_dir=str(tmp_path / "cache")))
    with fresh(), registered(bucket.url(), config, dataloader_config=stateful(), limit=1) as (accelerator, _):
        training = Training(accelerator)
        for _ in range(2):
            training.epoch()
            accelerator.save_state()
        training.epoch()
        expected = training.fingerprint()
    assert mirrored(bucket) == ["checkpoint_1"]
    shutil.rmtree(tmp_path / "cache")
    with fresh(), registered(bucket.url(), config, dataloader_config=stateful(), limit=1) as (accelerator, _):
        training = Training(accelerator, number=5)
        accelerator.load_state()
        training.epoch()
        assert training.fingerprint() == expected


def test_a_damaged_single_file_is_not_mirrored(tmp_path, far):
    """Its own digest is compared before the commit: the sound one that is in the mirror stays, and is the newest."""
    lightning(tmp_path / "run", QUICK, seed=1, stop=7)
    sound, damaged = sorted((tmp_path / "run").glob("*.ckpt"), key=lambda path: read_manifest(path).sequence)[:2]
    flip_bit(damaged, damaged.stat().st_size // 2)
    seen, home = [], FileHome(tmp_path / "run", lease_s=60)
    mirror = Uploads(mirroring(QUICK, far, keep_last=1), seen.append, "a test")
    for path in (sound, damaged):
        mirror.put(CheckpointInfo.of(read_manifest(path), path, path.stat().st_size), home)
        wait_until(lambda path=path: any(event.path == str(path) for event in seen), 60, f"what became of {path}")
    mirror.drain()
    mirror.close()
    assert [event.error == "" for event in seen] == [True, False]
    assert mirrored(far) == [sound.name]


def test_named_checkpoints_that_wait_do_not_push_each_other_out(tmp_path, monkeypatch):
    """Each that was saved by a name has its copy, however many wait; ``wait(mirrored=True)`` waits for all of them."""
    far = tmp_path / "far"
    far.write_text("no folder")
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(CONFIG, mirror=Mirror(url=str(far)))
    with fresh(), registered(tmp_path / "run", config, automatic=False) as (accelerator, handle):
        Training(accelerator)
        for name in ("gen/step_1", "disc/step_1", "gen/step_2"):
            accelerator.save_state(name)
            handle.wait()
        far.unlink()
        handle.wait(mirrored=True)
        copies = sorted(path.name for path in (far / "named").iterdir() if path.name.startswith(("gen", "disc")))
    assert copies == ["disc%2Fstep_1", "gen%2Fstep_1", "gen%2Fstep_2"]


def test_a_fresh_machine_fetches_a_checkpoint_named_in_accelerate(tmp_path, far, monkeypatch):
    """save_state and load_state with a path of one's own: a fresh machine fetches it, and equal last names do not mix."""
    config = mirroring(CONFIG, far)
    monkeypatch.chdir(tmp_path)
    with fresh(), registered(tmp_path / "run", config, automatic=False) as (accelerator, _):
        training = Training(accelerator)
        accelerator.save_state("gen/step_1")
        training.epoch()
        accelerator.save_state("disc/step_1")
        expected = training.fingerprint()
    shutil.rmtree(tmp_path / "gen")
    shutil.rmtree(tmp_path / "disc")
    with fresh(), registered(tmp_path / "run", config, automatic=False) as (accelerator, _):
        training = Training(accelerator, number=5)
        accelerator.load_state("disc/step_1")
        assert training.fingerprint() == expected
        with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
            accelerator.load_state("disc/step_2")
        accelerator.load_state(str(tmp_path / "gen" / "step_1"))
