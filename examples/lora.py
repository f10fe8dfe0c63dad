"""Low-rank adapters with PEFT: the frozen base is written once, and the adapter exported by itself.

    python examples/lora.py runs/lora                      # plain torch
    python examples/lora.py runs/lora-accelerate accelerate
    python examples/lora.py runs/lora-lightning lightning
    python examples/lora.py runs/lora-trainer transformers

Run it again with a larger STEPS: it goes on where it stopped. The model is made from a configuration, nothing is downloaded.
"""

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = int(os.environ.get("STEPS", "20"))
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def tuned():
    torch.manual_seed(0)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def tokens():
    return torch.randint(0, 1000, (64, 16), generator=torch.Generator().manual_seed(1))


def optimizer_of(model):
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def plain(folder):
    from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState
    from safe_ckpt.data import resumable
    from safe_ckpt.peft import load_adapter

    model = tuned()
    optimizer = optimizer_of(model)
    loader = resumable(torch.utils.data.DataLoader(tokens(), batch_size=4, shuffle=True))
    # Generators, too: the order of the next epoch is drawn from one.
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": PerRank(RngState())}
    with Checkpointer(folder / "checkpoints", CheckpointConfig(retention=Retention(keep_last=3))) as ckpt:
        info = ckpt.resume(state)
        step = info.step if info else 0
        print(f"starts at step {step}")
        while step < STEPS:
            for batch in loader:
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 5 == 0:
                    ckpt.save(step, state)
                if step == STEPS:
                    break
        ckpt.export(model, folder / "adapter", adapters_only=True).result()
    load_adapter(tuned().unload(), folder / "adapter")  # on another base it would be an error


def accelerated(folder):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from safe_ckpt.accelerate import register
    from safe_ckpt.errors import NoValidCheckpointError

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=project)
    with register(accelerator):
        model = tuned()
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        try:
            accelerator.load_state()
        except NoValidCheckpointError:
            print("starts afresh")
        begin = max((int(one["step"]) for one in optimizer.state.values()), default=0)
        for step in range(begin, STEPS):
            batch = tokens()[4 * step % 64 : 4 * step % 64 + 4]
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                accelerator.save_state()


def lit(folder):
    import lightning.pytorch as pl

    from safe_ckpt.lightning import SafeCheckpointCallback, resumable

    class Tuned(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tuned()

        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return optimizer_of(self.model)

    loader = resumable(torch.utils.data.DataLoader(tokens(), batch_size=4, shuffle=True))
    checkpoints = SafeCheckpointCallback(folder, every_n_train_steps=5, save_last=True, resume="auto")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    pl.Trainer(max_steps=STEPS, callbacks=[checkpoints], **quiet).fit(Tuned(), loader)


def trained(folder):
    from transformers import Trainer, TrainingArguments

    from safe_ckpt.transformers import SafeCheckpointMixin

    class SafeTrainer(SafeCheckpointMixin, Trainer):
        pass

    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=5, use_cpu=True, report_to=[], disable_tqdm=True
    )
    resume = folder.is_dir() and any(path.name.startswith("checkpoint-") for path in folder.iterdir())
    SafeTrainer(model=tuned(), args=arguments, train_dataset=rows).train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    ways = {"plain": plain, "accelerate": accelerated, "lightning": lit, "transformers": trained}
    ways[sys.argv[2] if len(sys.argv) > 2 else "plain"](Path(sys.argv[1]))
