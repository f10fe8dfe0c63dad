"""torchtitan's own Trainer with a small Llama 3, whose checkpoints are ours. Kill it at any moment and start it again.

torchrun --nproc-per-node 2 examples/torchtitan_debug.py runs/torchtitan              # FSDP2 on two
STEPS=40 torchrun --nproc-per-node 2 examples/torchtitan_debug.py runs/torchtitan     # goes on

torchtitan is made for GPUs. What a CPU does not have, and a tokenizer and data that need no download, come from the tests.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "adapters"))
import titan_runs

STEPS = int(os.environ.get("STEPS", "20"))


def main(directory: str) -> None:
    titan_runs.on_cpu()
    from safe_ckpt.torchtitan import SafeCheckpointManager

    config = titan_runs.config(directory, STEPS)
    config.checkpoint = SafeCheckpointManager.Config(  # instead of CheckpointManager.Config: the one change
        enable=True, interval=10, keep_latest_k=2, async_mode="async", last_save_model_only=False
    )
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale while it adds
    try:
        trainer.train()
    finally:
        trainer.close()
    if torch.distributed.get_rank() == 0:
        print(f"at step {trainer.step}: {sorted(path.name for path in Path(directory, 'checkpoint').glob('step-*'))}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
