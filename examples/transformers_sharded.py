"""A model that Transformers shards while it loads it, which a stock Trainer does not resume. Kill it; it goes on, on any mesh.

torchrun --nproc-per-node 2 examples/transformers_sharded.py runs/sharded tp              # tensor parallel on two
STEPS=40 torchrun --nproc-per-node 2 examples/transformers_sharded.py runs/sharded fsdp   # goes on, with FSDP2
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from sklearn.datasets import load_digits
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from safe_ckpt.transformers import SafeCheckpointMixin

STEPS = int(os.environ.get("STEPS", "20"))
SIZES = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHARDED = {"tp": DistributedConfig(tp_size=2), "fsdp": DistributedConfig(fsdp_size=2)}


class SafeTrainer(SafeCheckpointMixin, Trainer):
    """The mixin is the only change; what follows lets this example run without GPUs."""

    def create_accelerator_and_postprocess(self):
        if not torch.cuda.is_available():  # Accelerate shards on accelerators only: it is told that these are some
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


def make_trainer(directory: Path, layout: str) -> SafeTrainer:
    # The model learns to draw digits, pixel by pixel: 64 tokens of 17 grey values.
    rows = [{"input_ids": row, "labels": row} for row in torch.tensor(load_digits().data, dtype=torch.long)]
    model = AutoModelForCausalLM.from_pretrained(directory / "base", distributed_config=SHARDED[layout])
    arguments = TrainingArguments(
        output_dir=str(directory / "checkpoints"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    return SafeTrainer(model=model, args=arguments, train_dataset=rows)


def main(directory: Path, layout: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() == 0 and not (directory / "base").exists():  # in place of a download
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4)).save_pretrained(directory / "base")
    dist.barrier()
    trainer = make_trainer(directory, layout)
    trainer.train(
        resume_from_checkpoint="auto"
    )  # the newest valid checkpoint, if there is one, whatever mesh has saved it
    if dist.get_rank() == 0:
        whole = AutoModelForCausalLM.from_pretrained(directory / f"checkpoints/checkpoint-{STEPS}")  # by one process
        print(f"finished {STEPS} steps with {layout}, {sum(p.numel() for p in whole.parameters())} weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
