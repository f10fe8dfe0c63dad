"""One word, ``resume``, at the start of a script that may run for the first time, in each door."""

import pytest
import torch
import torch.distributed.checkpoint as stock
from transformers import Trainer
from transformers_runs import Stop, fingerprint, trainer

from accelerate_runs import CONFIG, Training, checkpoints, fresh, make, registered
from safe_ckpt import CheckpointConfig, Mirror, dcp
from safe_ckpt.accelerate import register
from safe_ckpt.errors import CheckpointNotFoundError, ConfigError, NoValidCheckpointError
from support import flip_bit

pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _alone():
    with fresh():
        yield


def spoil(folder):
    """Damage the largest file of each checkpoint in a directory."""
    for one in folder.iterdir():
        if one.is_dir() and not one.name.startswith("."):
            flip_bit(max((path for path in one.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size), 700)


def test_accelerate_resumes_if_there_is_one(tmp_path):
    """``handle.resume()`` is None on a fresh run, then what was loaded, exactly; where all are damaged it raises."""
    with registered(tmp_path) as (accelerator, handle):
        training = Training(accelerator)
        assert handle.resume() is None
        training.epoch()
        accelerator.save_state(step=7)
        expected = training.fingerprint()
        handle.wait()
        training.scramble()
        info = handle.resume()
        assert (info.name, info.step, training.fingerprint()) == ("checkpoint_0", 7, expected)
        assert accelerator.project_configuration.iteration == 1
    spoil(tmp_path / "checkpoints")
    with registered(tmp_path) as (accelerator, handle):
        Training(accelerator)
        with pytest.raises(NoValidCheckpointError, match="checkpoint_0"):
            handle.resume()
    assert checkpoints(tmp_path) == ["checkpoint_0"]


def test_accelerate_resumes_by_the_directory_where_you_name_checkpoints_yourself(tmp_path):
    """``handle.resume("out")`` finds in a new process what ``save_state("out/step_2")`` saved, and stock's ``out/best``."""
    out = tmp_path / "out"
    with registered(None) as (accelerator, handle):
        training = Training(accelerator)
        assert handle.resume(out) is None
        assert not out.exists()
        for step in (1, 2):
            training.epoch()
            accelerator.save_state(out / f"step_{step}")
        expected = training.fingerprint()
    with registered(None) as (accelerator, handle):
        training = Training(accelerator, number=1)
        with pytest.raises(ConfigError, match="resume: directory: is missing"):
            handle.resume()
        with pytest.raises(CheckpointNotFoundError, match="step_2"):
            handle.resume(out / "step_3")
        assert handle.resume(out).name == "step_2"
        assert training.fingerprint() == expected
        assert handle.resume(out / "step_1").name == "step_1"
    spoil(out)
    with registered(None) as (accelerator, handle):
        Training(accelerator)
        for path in (out, out / "step_1"):
            with pytest.raises(NoValidCheckpointError, match="step_1"):
                handle.resume(path)
    plain = make(None)
    Training(plain)
    plain.save_state(str(tmp_path / "theirs/best"))
    with register(plain, CONFIG) as handle:
        for path in (tmp_path / "theirs", tmp_path / "theirs/best"):
            assert handle.resume(path).name == "best"
    mirrored = CheckpointConfig(mirror=Mirror(url=str(tmp_path / "far")))
    refused = pytest.raises(ConfigError, match="not looked for in the mirror")
    with register(plain, mirrored) as handle, refused:
        handle.resume(out)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_resumes_if_there_is_one(tmp_path):
    """``dcp.resume`` is None on a fresh run and changes nothing; a name that is not there, or damage, is no fresh run."""
    run, model = tmp_path / "run", torch.nn.Linear(64, 64)
    state = {"model": model, "step": 0}
    assert dcp.resume(state, checkpoint_id=run) is None
    assert not run.exists()
    dcp.save({**state, "step": 3}, checkpoint_id=run / "step-3")
    other = {"model": torch.nn.Linear(64, 64), "step": 0}
    info = dcp.resume(other, checkpoint_id=run)
    assert (info.name, info.step, other["step"]) == ("step-3", 3, 3)
    assert torch.equal(other["model"].weight, model.weight)
    with pytest.raises(CheckpointNotFoundError, match="step-3"):
        dcp.resume(other, checkpoint_id=run / "step-4")
    spoil(run)
    for path in (run, run / "step-3"):
        with pytest.raises(NoValidCheckpointError, match="step-3"):
            dcp.resume(other, checkpoint_id=path)
    stock.save({"step": 5}, checkpoint_id=tmp_path / "theirs/step-5", no_dist=True)
    found = {"step": 0}
    assert dcp.resume(found, checkpoint_id=tmp_path / "theirs").name == "step-5"
    assert found == {"step": 5}


def test_the_trainer_resumes_if_there_is_one(tmp_path):
    """``train(resume_from_checkpoint="auto")`` starts, goes on to the same end, and raises where all are damaged."""
    straight = trainer(tmp_path / "straight", Trainer)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", callbacks=[Stop(5)]).train(resume_from_checkpoint="auto")
    again = trainer(tmp_path / "run")
    again.train(resume_from_checkpoint="auto")
    assert fingerprint(again) == fingerprint(straight)
    assert again.state.global_step == 6
    spoil(tmp_path / "run")
    with pytest.raises(NoValidCheckpointError, match="checkpoint-6"):
        trainer(tmp_path / "run").train(resume_from_checkpoint="auto")
