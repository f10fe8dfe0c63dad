"""Train on several processes with Accelerate. Kill it at any moment and start it again: it continues, bit for bit.

accelerate launch --num_processes 2 examples/accelerate_digits.py runs/accelerate
"""

import hashlib
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from safe_ckpt.accelerate import register

EPOCHS = int(os.environ.get("EPOCHS", "5"))


class Progress:
    """The position of the training; saved with everything else."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict) -> None:
        self.epoch = state["epoch"]


def main(directory: str) -> None:
    project = ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration(use_stateful_dataloader=True)  # so that a resume continues at the same batch
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=loading)
    handle = register(accelerator)  # on every process: save_state, load_state and end_training are safe from here on
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    handle.prepare()  # allocates memory for the first snapshot in the background
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    found = handle.resume()  # the newest valid checkpoint, if there is one, the same on every process
    accelerator.print(f"resumed after epoch {progress.epoch}" if found else "fresh run")

    for epoch in range(progress.epoch, EPOCHS):
        loader.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()
        progress.epoch = epoch + 1
        # Returns when the state is copied. The copy is written, checked and committed while training continues.
        accelerator.save_state(metrics={"loss": total / len(loader)}, step=epoch + 1)

    handle.save_model(model, f"{directory}/weights")
    tensors = accelerator.unwrap_model(model).state_dict().values()
    weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
    accelerator.print(f"finished {EPOCHS} epochs, weights {weights}")
    accelerator.end_training()  # waits for the saves in flight first


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")
