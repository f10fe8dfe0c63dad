"""A resume from a checkpoint that the script names is told like any other."""

import json

from transformers_runs import trainer

import safe_ckpt.events
from accelerate_runs import CONFIG, fresh, make
from safe_ckpt.accelerate import register


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


def test_a_trainers_resume_from_a_path_is_in_the_record(tmp_path):
    """As one from the newest is, once each."""
    trainer(tmp_path, max_steps=2).train()
    trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer(tmp_path, max_steps=6).train(resume_from_checkpoint=True)
    assert resumed(tmp_path / "_safe_ckpt") == [(str(tmp_path / f"checkpoint-{step}"), step) for step in (2, 4)]
