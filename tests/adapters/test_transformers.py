"""``SafeCheckpointMixin``: a tiny randomly initialised model, trained by a real Trainer."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, ProjectConfiguration
from transformers import (
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers_runs import CONFIG, SafeTrainer, Stop, fingerprint, names, trainer

from kit import warm
from safe_ckpt import CheckpointConfig, Retention, events
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import ConfigError, CorruptCheckpointError, NotEnoughSpaceError, NoValidCheckpointError
from safe_ckpt.transformers import SafeCheckpointMixin, strategies
from safe_ckpt.transformers.saver import candidates
from support import flip_bit, kill_all, needs_root, program_path, small_disk, writer_processes


def test_the_files_are_those_that_the_trainer_writes(tmp_path):
    """Name by name, with equal tensors; and a stock Trainer resumes from ours to the same end, and ours from a stock one's."""
    stock = trainer(tmp_path / "stock", Trainer)
    stock.train()
    ours = trainer(tmp_path / "ours")
    ours.train()
    assert fingerprint(ours) == fingerprint(stock)
    assert names(tmp_path / "ours") == names(tmp_path / "stock") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in names(tmp_path / "ours"):
        there = {p.name for p in (tmp_path / "stock" / name).iterdir()}
        own = {"manifest.json", "train_loader_0.pth"}
        assert {p.name for p in (tmp_path / "ours" / name).iterdir()} == there | own
        verify_files(tmp_path / "ours" / name, read_manifest(tmp_path / "ours" / name))
    for kind, folder in ((Trainer, "ours"), (SafeTrainer, "stock")):
        again = trainer(tmp_path / folder, kind)
        again.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-4"))
        assert fingerprint(again) == fingerprint(stock), (kind, folder)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "ours/checkpoint-6")
    assert all(a.equal(b) for a, b in zip(loaded.state_dict().values(), ours.model.state_dict().values(), strict=True))
    assert writer_processes() == []


@pytest.mark.quick
def test_a_stopped_trainer_goes_on_exactly(tmp_path):
    """In the middle of an epoch and between two saves: resume_from_checkpoint=True ends as an uninterrupted run."""
    straight = trainer(tmp_path / "straight", max_steps=10)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "broken", max_steps=10, callbacks=[Stop(5)]).train()
    resumed = trainer(tmp_path / "broken", max_steps=10)
    resumed.train(resume_from_checkpoint=True)
    assert fingerprint(resumed) == fingerprint(straight)
    assert names(tmp_path / "broken") == names(tmp_path / "straight")


@pytest.mark.quick
def test_a_trainer_passes_over_damaged_and_half_checkpoints(tmp_path, caplog):
    """A damaged newest one, an empty one and half a stock one: the one before is taken; a path to a damaged one is an error."""
    trainer(tmp_path).train()
    flip_bit(tmp_path / "checkpoint-6/optimizer.pt", 200)
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8/model.safetensors").write_bytes(b"half")
    cut_off = tmp_path / "checkpoint-9/global_step9/mp_rank_00_model_states.pt"
    cut_off.parent.mkdir(parents=True)
    cut_off.write_bytes(b"half")
    (tmp_path / "checkpoint-9/trainer_state.json").write_text("{}")
    (problem,) = [found.problem for found in candidates(tmp_path) if found.path.name == "checkpoint-9"]
    assert "mp_rank_00_model_states.pt was not written to its end" in problem
    shutil.copytree(tmp_path / "checkpoint-6", tmp_path / "copy")
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            seen.append(state.global_step)

    trainer(tmp_path, callbacks=[Look()]).train(resume_from_checkpoint=True)
    assert seen == [4]
    assert [p.name for p in (tmp_path / "_safe_ckpt/quarantine").iterdir()] == ["checkpoint-6"]
    with pytest.raises(CorruptCheckpointError, match="optimizer"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "copy"))
    with pytest.raises(NoValidCheckpointError, match="no checkpoint"):
        trainer(tmp_path / "fresh").train(resume_from_checkpoint=True)


@pytest.mark.quick
def test_rotation_keeps_the_best_and_the_newest(tmp_path):
    """With a limit of 1 and a best one that is not the newest both stay, at every moment and at the end; the best is loaded."""

    class Scored(SafeTrainer):
        def evaluate(self, *args, **kwargs):
            return {"eval_loss": {2: 3.0, 4: 1.0}.get(self.state.global_step, 2.0)}

    made = trainer(
        tmp_path, Scored, max_steps=8, save_total_limit=1, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    made.train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    state = json.loads((tmp_path / "checkpoint-8/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-4")
    state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-4")
    best = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4").state_dict()
    assert all(a.equal(b) for a, b in zip(best.values(), made.model.state_dict().values(), strict=True))


LOSSES = {2: 1.0, 4: 5.0, 6: 2.0}


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (1, {"metric_for_best_model": "eval_loss", "greater_is_better": False}, {2, 6}),
        (2, {"metric_for_best_model": "eval_loss", "greater_is_better": True}, {4, 6}),
        (1, {"lr_scheduler_type": "reduce_lr_on_plateau"}, {2, 6}),
    ],
)
@pytest.mark.quick
def test_a_limit_keeps_the_best_that_is_not_loaded_at_the_end(tmp_path, limit, best, kept):
    """With a ``metric_for_best_model``, or a scheduler that follows one, at every moment, as with a plain Trainer. The metrics
    of a save are those of an evaluation at its step: a save without one has none.
    """
    told, there = {}, []

    def look(event):
        if isinstance(event, events.Committed):
            told[event.step] = read_manifest(Path(event.path)).metrics.get("eval_loss")

    class Scored(SafeTrainer):
        checkpoint_hooks = (look,)

        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": LOSSES[self.state.global_step]}
            self.log(metrics)
            return metrics

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            made._safe_saver.wait()
            there.append(state.best_global_step is None or f"checkpoint-{state.best_global_step}" in names(tmp_path))

    made = trainer(
        tmp_path, Scored, save_steps=1, save_total_limit=limit, eval_strategy="steps", eval_steps=2, callbacks=[Look()], **best
    )  # fmt: skip
    made.train()
    assert names(tmp_path) == [f"checkpoint-{step}" for step in sorted(kept)]
    assert there == [True] * 6
    assert told == {step: LOSSES.get(step) for step in range(1, 7)}


@pytest.mark.quick
def test_the_best_of_a_trainer_that_saves_only_the_best_is_known(tmp_path):
    """With ``save_strategy="best"`` as with a plain Trainer: what is saved, which one is the best, and that one is loaded."""
    found = []
    for kind in (Trainer, SafeTrainer):

        class Scored(kind):
            def evaluate(self, *args, **kwargs):
                loss = {2: 3.0, 4: 1.0}.get(self.state.global_step, 2.0)
                metrics = {"eval_loss": loss}
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
                return metrics

        folder = tmp_path / kind.__name__
        made = trainer(
            folder, Scored, max_steps=8, save_strategy="best", eval_strategy="steps", eval_steps=2,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
        )  # fmt: skip
        made.train()
        told = [json.loads((folder / name / "trainer_state.json").read_text()) for name in names(folder)]
        best = LlamaForCausalLM.from_pretrained(folder / "checkpoint-4").state_dict()
        assert all(a.equal(b) for a, b in zip(best.values(), made.model.state_dict().values(), strict=True))
        found.append((names(folder), [Path(state["best_model_checkpoint"]).name for state in told]))
        assert made.state.best_model_checkpoint == str(folder / "checkpoint-4")
    assert found[0] == found[1] == (["checkpoint-2", "checkpoint-4"], ["checkpoint-2", "checkpoint-4"])


@needs_root
def test_a_full_disk_loses_nothing(tmp_path):
    """The error ends the training with its name; with a limit of 1 the checkpoint before is whole and is resumed from."""

    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                made._safe_saver.wait()
                (Path(args.output_dir) / "filler").write_bytes(
                    b"x" * (os.statvfs(args.output_dir).f_bavail * 4096 - 50_000)
                )

    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        made = trainer(disk, hidden=128, callbacks=[Fill()], save_total_limit=1)
        with pytest.raises(NotEnoughSpaceError):
            made.train()
        assert names(disk) == ["checkpoint-2"]
        (disk / "filler").unlink()
        again = trainer(disk, hidden=128, save_total_limit=1)
        again.train(resume_from_checkpoint=True)
        assert names(disk) == ["checkpoint-6"]
        straight = trainer(tmp_path / "straight", hidden=128)
        straight.train()
        assert fingerprint(again) == fingerprint(straight)


def test_methods_that_users_override_are_honoured(tmp_path):
    """A Trainer that writes more in save_model: all of it is in the checkpoint, listed and verified."""

    class Mine(SafeTrainer):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call)
            torch.save({"mine": torch.ones(3)}, os.path.join(output_dir, "mine.pt"))
            (Path(output_dir) / "notes.txt").write_text("mine")
            torch.save({}, os.path.join(output_dir, "dummy.bin"))  # as Transformers before 5 with ZeRO 3
            (Path(output_dir) / "dummy.bin").unlink()

    trainer(tmp_path, Mine).train()
    path = tmp_path / "checkpoint-2"
    listed = {entry.path for entry in read_manifest(path).files}
    assert {"mine.pt", "notes.txt"} <= listed
    assert "dummy.bin" not in listed
    assert torch.load(path / "mine.pt")["mine"].tolist() == [1, 1, 1]
    verify_files(path, read_manifest(path))


def test_classes_between_the_mixin_and_the_trainer_are_called(tmp_path):
    """TRL's do more in ``_save_checkpoint``; what is pushed to the hub is committed; hooks hear of each save."""
    stock, pushed, heard = Trainer._save_checkpoint, [], []

    class WithCards(Trainer):
        def _save_checkpoint(self, model, trial):
            (Path(self.args.output_dir) / f"card-{self.state.global_step}").touch()
            super()._save_checkpoint(model, trial)

        def _push_from_checkpoint(self, checkpoint_folder):
            verify_files(Path(checkpoint_folder), read_manifest(Path(checkpoint_folder)))
            pushed.append(Path(checkpoint_folder).name)

    class Mine(SafeCheckpointMixin, WithCards):
        checkpoint_config = CONFIG
        checkpoint_hooks = (heard.append,)

    made = trainer(tmp_path, Mine)
    made.args.push_to_hub = True
    made.train()
    assert sorted(path.name for path in tmp_path.glob("card-*")) == ["card-2", "card-4", "card-6"]
    assert pushed == names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert [event.step for event in heard if isinstance(event, events.Committed)] == [2, 4, 6]
    assert Trainer._save_checkpoint is stock


def test_a_trainer_that_writes_checkpoints_itself_gets_a_warning(tmp_path, caplog):
    """A class that writes checkpoints itself keeps doing so, and a warning says that they are not safe."""

    class Own(Trainer):
        def _save_checkpoint(self, model, trial):
            self.save_model(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    class Mine(SafeCheckpointMixin, Own):
        checkpoint_config = CONFIG

    trainer(tmp_path, Mine, max_steps=2).train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert not (tmp_path / "checkpoint-2/manifest.json").exists()
    assert "Mine._save_checkpoint did not call Trainer's" in caplog.text


def test_a_seq2seq_trainer_goes_on_exactly(tmp_path):
    """The mixin before ``Seq2SeqTrainer``: stopped in mid-epoch and resumed, it ends as a stock one."""

    class Safe(SafeCheckpointMixin, Seq2SeqTrainer):
        checkpoint_config = CONFIG

    straight = trainer(tmp_path / "straight", Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "broken", Safe, arguments=Seq2SeqTrainingArguments, callbacks=[Stop(5)]).train()
    resumed = trainer(tmp_path / "broken", Safe, arguments=Seq2SeqTrainingArguments)
    resumed.train(resume_from_checkpoint=True)
    assert fingerprint(resumed) == fingerprint(straight)


def test_settings_that_contradict_the_trainers_are_refused_before_training(tmp_path, monkeypatch):
    """Retention beside the Trainer's own rules, and what is not covered: an error with the remedy, before training."""

    class Ruled(SafeTrainer):
        checkpoint_config = CheckpointConfig(retention=Retention(keep_last=1))

    with pytest.raises(ConfigError, match=r"^retention: .*save_total_limit.*; remove the Retention"):
        trainer(tmp_path, Ruled).train()

    class FromTheEnvironment(SafeTrainer):
        checkpoint_config = None

    monkeypatch.setenv("SAFE_CKPT__RETENTION__KEEP_LAST", "3")
    with pytest.raises(ConfigError, match=r"^SAFE_CKPT__RETENTION__KEEP_LAST: .*save_total_limit.*take the rules"):
        trainer(tmp_path, FromTheEnvironment).train()
    monkeypatch.delenv("SAFE_CKPT__RETENTION__KEEP_LAST")
    with pytest.raises(ConfigError, match=r'save_on_each_node.*mirror\.near = "per-host"'):
        trainer(tmp_path, save_on_each_node=True).train()
    assert names(tmp_path) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("form", "refused"),
    [
        ("SHARDED_STATE_DICT", None),
        ("FULL_STATE_DICT", "which nobody watches"),
        ("LOCAL_STATE_DICT", "LOCAL_STATE_DICT"),
    ],
)
def test_forms_of_fsdp1_that_are_not_covered_are_refused_by_name(form, refused):
    """Before training, with the form that is covered. (The attributes that are asked are put together here.)"""
    plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name=form))
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP,
        is_fsdp2=False,
        state=SimpleNamespace(fsdp_plugin=plugin),
        project_configuration=ProjectConfiguration(),
        project_dir=None,
    )
    asked = SimpleNamespace(is_fsdp_enabled=True, is_deepspeed_enabled=False, accelerator=accelerator, model=None)
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext() as raised:
        strategies.check(asked, CONFIG)
    if refused:
        assert "SHARDED_STATE_DICT" in str(raised.value)


def test_outside_of_train_the_trainers_methods_are_its_own(tmp_path):
    """save_model and the parts that are replaced meanwhile work as ever."""
    save = torch.save
    made = trainer(tmp_path)
    made.train()
    made.save_model(tmp_path / "final")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "final").config.hidden_size == 16
    assert torch.save is save


@pytest.mark.timeout(200)
def test_a_trainer_killed_twice_goes_on_bit_for_bit(tmp_path):
    """A save at every step, two SIGKILLs: the end is that of an uninterrupted run."""

    def start(folder):
        command = [sys.executable, str(program_path("trains_with_transformers")), str(tmp_path / folder), *sys.path]
        return warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(folder):
        output, _ = start(folder).communicate(timeout=100)
        return [line for line in output.splitlines() if line.startswith("END")] or output

    expected = end("straight")
    for count in (3, 5):
        process, saves = start("broken"), count
        for line in process.stdout:
            saves -= line.startswith("SAVED")
            if not saves:
                break
        kill_all()
        process.wait()
        process.stdout.close()
    assert end("broken") == expected
    assert len(expected) == 1
    assert names(tmp_path / "broken") == ["checkpoint-29", "checkpoint-30"]
