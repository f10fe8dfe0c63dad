"""Three steps with a save behind each, resumed where there is a checkpoint: ``WITH ours|stock OUT``. All batches are the same.

It prints from which step it goes on, and writes a digest of its weights to OUT.result.
"""

import sys
import warnings
from pathlib import Path

import torch
import xxhash

warnings.simplefilter("ignore")
KIND, OURS, OUT = sys.argv[1], sys.argv[2] == "ours", Path(sys.argv[3])
STEPS = 3
torch.manual_seed(0)
X = torch.randn(8, 4)
NET = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))


def begins(step):
    print(f"resumed from step {step}", flush=True)


def newest(pattern):
    """What most scripts do: the highest number in a name."""
    found = {int(path.stem.rpartition("-")[2].rpartition("_")[2]): path for path in OUT.glob(pattern)}
    return found[max(found)] if found else None


def step_of(optimizer, backward):
    loss = NET(X).square().mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()


def plain():
    optimizer = torch.optim.AdamW(NET.parameters(), lr=0.1)
    if OURS:
        from safe_ckpt import Checkpointer, PerRank, RngState

        state = {"model": NET, "optimizer": optimizer, "rng": PerRank(RngState())}
        with Checkpointer(OUT) as ckpt:
            info = ckpt.resume(state)
            begins(first := info.step if info else 0)
            for step in range(first + 1, STEPS + 1):
                step_of(optimizer, lambda loss: loss.backward())
                ckpt.save(step, state).result()
        return
    OUT.mkdir(exist_ok=True)
    first = 0
    if last := newest("step-*.pt"):
        state = torch.load(last)
        first = state["step"]
        NET.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
    begins(first)
    for step in range(first + 1, STEPS + 1):
        step_of(optimizer, lambda loss: loss.backward())
        state = {"model": NET.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save({**state, "step": step}, OUT / f"step-{step}.pt")


def with_accelerate():
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(OUT), automatic_checkpoint_naming=True, iteration=1)  # as a step in its names
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(NET, torch.optim.AdamW(NET.parameters(), lr=0.1))
    if OURS:
        from safe_ckpt.accelerate import register

        register(accelerator).resume()
    elif last := newest("checkpoints/checkpoint_*"):
        accelerator.load_state(str(last))
        project.iteration = int(last.name.rpartition("_")[2]) + 1
    begins(project.iteration - 1)
    for _ in range(project.iteration, STEPS + 1):
        step_of(optimizer, accelerator.backward)
        accelerator.save_state()
    accelerator.end_training()
    del model


def with_lightning():
    import logging

    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = NET

        def training_step(self, batch, _):
            torch.manual_seed(self.trainer.global_step)  # Lightning saves no state of the generators
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=0.1)

        def on_load_checkpoint(self, checkpoint):
            begins(checkpoint["global_step"])

    common = {"dirpath": str(OUT), "filename": "{step}", "save_top_k": -1, "save_last": True}
    if OURS:
        from safe_ckpt.lightning import SafeCheckpointCallback

        saves = SafeCheckpointCallback(**common, resume="auto")
    else:
        saves = ModelCheckpoint(**common)
    trainer = pl.Trainer(
        max_epochs=STEPS, accelerator="cpu", callbacks=[saves], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=f"{OUT}-root",
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=len(X))
    trainer.fit(Module(), loader, **({} if OURS else {"ckpt_path": "last", "weights_only": False}))


def with_transformers():
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from safe_ckpt.transformers import SafeCheckpointMixin

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = NET

        def forward(self, x):
            return {"loss": self.net(x).square().mean()}

    class Tells(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            begins(state.global_step)

    class Ours(SafeCheckpointMixin, Trainer):
        pass

    arguments = TrainingArguments(
        str(OUT), max_steps=STEPS, save_steps=1, per_device_train_batch_size=len(X), learning_rate=0.1, report_to=[],
        disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = (Ours if OURS else Trainer)(
        model=Model(), args=arguments, train_dataset=[{"x": row} for row in X], callbacks=[Tells()]
    )
    last = get_last_checkpoint(str(OUT)) if OUT.is_dir() and not OURS else None
    trainer.train(resume_from_checkpoint="auto" if OURS else last)


{"Checkpointer": plain, "Accelerate": with_accelerate, "Lightning": with_lightning, "Transformers": with_transformers}[
    KIND
]()
digest = xxhash.xxh3_128()
for value in NET.state_dict().values():
    digest.update(value.contiguous().numpy())
Path(f"{OUT}.result").write_text(digest.hexdigest())
