"""Evaluate the newest checkpoint of a run that may be training right now, or be somebody else's. Only reads.

python examples/plain_torch.py runs/plain &   # a job that holds the directory
python examples/evaluate_run.py runs/plain     # beside it, or later; also with torchrun, on any number of ranks
"""

import sys

import torch
from sklearn.datasets import load_digits

import safe_ckpt


def main(directory: str) -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )
    # Weights alone: of the names that were saved, only this one is asked for. All of the checkpoint is verified.
    info = safe_ckpt.load(directory, {"model": model})
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{info.name}: step {info.step}, {right:.1%} right")


if __name__ == "__main__":
    main(sys.argv[1])
