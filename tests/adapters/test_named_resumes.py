"""A resume from a checkpoint that the script names is told like any other."""

import json

from transformers_runs import trainer

import safe_ckpt.events
from accelerate_runs import CONFIG, Counter, fresh, make
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import MANIFEST_NAME


def resumed(folder):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [(line["path"], line["step"]) for line in lines if line["event"] == "resumed"]


def test_load_state_of_a_path_is_in_the_record_of_the_run_that_goes_on(tmp_path):
    """The hook hears of it at once, and the record has it once the directory is held: loading alone writes nothing there."""
    heard = []
    for start in range(3):
        with fresh():
            accelerator = make()
            with register(accelerator, CONFIG, hooks=[heard.append]):
                if start:
                    before = (tmp_path / ".safe_ckpt/events.jsonl").read_bytes()
                    accelerator.load_state(str(tmp_path / "first"))
                    assert (tmp_path / ".safe_ckpt/events.jsonl").read_bytes() == before
                    assert isinstance(heard[-1], safe_ckpt.events.Resumed)
                accelerator.save_state(str(tmp_path / "first"))
        assert resumed(tmp_path / ".safe_ckpt") == [(str(tmp_path / "first"), number) for number in range(start)]


class Last(Counter):
    """It is restored last. Meanwhile somebody replaces the checkpoint, and writes to its manifest at this moment."""

    folder = None

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.folder is not None:
            (self.folder / MANIFEST_NAME).write_bytes(b"{")


def test_a_resume_that_was_made_is_one_although_its_step_cannot_be_told(tmp_path):
    """Reading its manifest again may fail on one rank alone, and the others go on."""
    heard, last = [], Last(7)
    for folder in (None, tmp_path / "run"):
        with fresh():
            accelerator = make(folder)
            accelerator.register_for_checkpointing(last)
            with register(accelerator, CONFIG, hooks=[heard.append]):
                if folder is None:
                    accelerator.save_state(str(tmp_path / "step-3"), async_save=False)
                else:
                    last.folder, last.count = tmp_path / "step-3", 0
                    accelerator.load_state(str(tmp_path / "step-3"))
    assert (last.count, heard[-1].step) == (7, -1)


def test_a_trainers_resume_from_a_path_is_in_the_record(tmp_path):
    """As one from the newest is, once each."""
    trainer(tmp_path, max_steps=2).train()
    trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer(tmp_path, max_steps=6).train(resume_from_checkpoint=True)
    assert resumed(tmp_path / "_safe_ckpt") == [(str(tmp_path / f"checkpoint-{step}"), step) for step in (2, 4)]
