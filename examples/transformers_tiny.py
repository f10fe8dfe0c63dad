"""Train a tiny, randomly initialised language model with the Trainer. Kill it at any moment, start it again: it continues.

python examples/transformers_tiny.py runs/transformers
"""

import hashlib
import os
import sys

import torch
from sklearn.datasets import load_digits
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from safe_ckpt.transformers import SafeCheckpointMixin

STEPS = int(os.environ.get("STEPS", "40"))


class SafeTrainer(SafeCheckpointMixin, Trainer):
    """The mixin is the only change."""


def make_trainer(directory: str) -> SafeTrainer:
    # The model learns to draw digits, pixel by pixel: 64 tokens of 17 grey values.
    rows = [{"input_ids": row, "labels": row} for row in torch.tensor(load_digits().data, dtype=torch.long)]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=STEPS,
        per_device_train_batch_size=16,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return SafeTrainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows)


def main(directory: str) -> None:
    trainer = make_trainer(directory)
    trainer.train(resume_from_checkpoint="auto")  # the newest valid checkpoint, if there is one
    tensors = trainer.model.state_dict().values()
    weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
    print(f"finished {STEPS} steps, weights {weights}, in {directory}: {sorted(os.listdir(directory))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/transformers")
