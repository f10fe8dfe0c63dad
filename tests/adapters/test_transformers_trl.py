"""TRL's SFTTrainer with the mixin. TRL brings 290 MiB of other packages: ``pip install trl`` to run this."""

import pytest
import torch

pytest.importorskip("trl")
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers_runs import CONFIG, Stop, data, fingerprint, model, names
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.transformers import SafeCheckpointMixin

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's own, for what it uses of Transformers


class SafeSFTTrainer(SafeCheckpointMixin, SFTTrainer):
    checkpoint_config = CONFIG


class SafeDPOTrainer(SafeCheckpointMixin, DPOTrainer):
    checkpoint_config = CONFIG


def tokenizer():
    words = {f"w{number}": number for number in range(3, 32)}
    level = models.WordLevel({"<end>": 0, "<pad>": 1, "<unknown>": 2, **words}, unk_token="<unknown>")
    known = Tokenizer(level)
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>")


def settings(folder):
    return {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "save_steps": 2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "logging_steps": 100, "learning_rate": 1e-2, "bf16": False,
    }  # fmt: skip


def preferring(folder, callbacks=()):
    """A reference model that follows the trained one."""
    answers = [" ".join(f"w{3 + (7 * row + column) % 29}" for column in range(6)) for row in range(48)]
    rows = {"prompt": answers[:24], "chosen": answers[24:], "rejected": answers[:24][::-1]}
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
    return SafeDPOTrainer(
        model=model(),
        ref_model=model(),
        args=DPOConfig(**settings(folder), **follows, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def made(folder, kind, callbacks=()):
    rows = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in data()]})
    return kind(
        model=model(),
        args=SFTConfig(**settings(folder)),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def test_an_sft_trainer_goes_on_exactly(tmp_path):
    """Stopped and resumed it ends as a stock one, with the files that a stock one writes, the model card included."""
    straight = made(tmp_path / "straight", SFTTrainer)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "broken", SafeSFTTrainer, [Stop(5)]).train()
    resumed = made(tmp_path / "broken", SafeSFTTrainer)
    resumed.train(resume_from_checkpoint=True)
    assert fingerprint(resumed) == fingerprint(straight)
    assert names(tmp_path / "broken") == names(tmp_path / "straight")
    assert (tmp_path / "broken/README.md").exists()
    path = tmp_path / "broken/checkpoint-6"
    there = {file.name for file in (tmp_path / "straight/checkpoint-6").iterdir()}
    assert {file.name for file in path.iterdir()} == there | {"manifest.json", "train_loader_0.pth"}
    verify_files(path, read_manifest(path))
    stock = made(tmp_path / "broken", SFTTrainer)
    stock.train(resume_from_checkpoint=str(tmp_path / "broken/checkpoint-4"))
    assert fingerprint(stock) == fingerprint(straight)


def test_a_reference_model_that_follows_the_trained_one_goes_on(tmp_path, caplog):
    """``sync_ref_model``: stopped and resumed, both models end as without the stop; a checkpoint without it is said."""
    straight = preferring(tmp_path / "straight")
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        preferring(tmp_path / "broken", [Stop(5)]).train()
    resumed = preferring(tmp_path / "broken")
    resumed.train(resume_from_checkpoint=True)
    assert fingerprint(resumed) == fingerprint(straight)
    for name, tensor in straight.ref_model.state_dict().items():
        assert torch.equal(resumed.ref_model.state_dict()[name], tensor), name
    assert "no weights of the reference model" not in caplog.text
    path = tmp_path / "broken/checkpoint-6"
    (path / "reference_model.pth").unlink()
    (path / "manifest.json").unlink()  # as a stock trainer leaves it
    preferring(tmp_path / "broken").train(resume_from_checkpoint=str(path))
    assert "no weights of the reference model" in caplog.text
