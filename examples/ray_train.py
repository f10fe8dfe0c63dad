"""Ray Train with two workers on this machine. Kill a worker, or the driver, at any moment: the run goes on, bit for bit.

python examples/ray_train.py runs/ray            # 20 steps
STEPS=40 python examples/ray_train.py runs/ray   # goes on
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from safe_ckpt import CheckpointConfig, PerRank, Retention, RngState
from safe_ckpt.data import resumable
from safe_ckpt.ray import RayCheckpointer, SafeRunConfig

STEPS = int(os.environ.get("STEPS", "20"))


def batches(loader, sampler, state):
    """Without end; after a resume what is left of the epoch."""
    while True:
        sampler.set_epoch(state["epoch"])
        yield from loader
        state["epoch"] += 1


def train(options: dict) -> None:
    """On each worker."""
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = resumable(DataLoader(data, batch_size=64, sampler=sampler))
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "rng": PerRank(RngState()),
        "step": 0,
        "epoch": 0,
    }

    config = CheckpointConfig(retention=Retention(keep_last=2))
    with RayCheckpointer(config) as ckpt:  # below the storage path of the run
        ckpt.resume(state)
        left = batches(loader, sampler, state)
        for step in range(state["step"] + 1, options["steps"] + 1):
            x, y = next(left)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            state["step"] = step
            if step % 10 == 0 or ckpt.save_requested:
                ckpt.save(step, state, metrics={"loss": loss.item()})  # Ray is told when it is committed


def main(directory: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": STEPS},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=SafeRunConfig(
            name="digits", storage_path=os.path.abspath(directory), failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(f"newest: {Path(result.checkpoint.path).name}, loss {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/ray_train")
