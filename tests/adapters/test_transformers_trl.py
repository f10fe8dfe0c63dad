"""TRL's SFTTrainer with the mixin. TRL brings 290 MiB of other packages: ``pip install trl`` to run this."""

import pytest

pytest.importorskip("trl")
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers_runs import CONFIG, Stop, data, fingerprint, model, names
from trl import SFTConfig, SFTTrainer

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.transformers import SafeCheckpointMixin

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's own, for what it uses of Transformers


class SafeSFTTrainer(SafeCheckpointMixin, SFTTrainer):
    checkpoint_config = CONFIG


def made(folder, kind, callbacks=()):
    words = Tokenizer(models.WordLevel({"<end>": 0, "<pad>": 1, "<unknown>": 2}, unk_token="<unknown>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )
    settings = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "save_steps": 2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "logging_steps": 100, "learning_rate": 1e-2, "bf16": False,
    }  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in data()]})
    return kind(
        model=model(),
        args=SFTConfig(**settings),
        train_dataset=rows,
        processing_class=tokenizer,
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
    assert {file.name for file in path.iterdir()} == there | {"manifest.json"}
    verify(path, read_manifest(path))
    stock = made(tmp_path / "broken", SFTTrainer)
    stock.train(resume_from_checkpoint=str(tmp_path / "broken/checkpoint-4"))
    assert fingerprint(stock) == fingerprint(straight)
