"""Train, kill, resume, on one device: the end must be bit for bit that of a run that nobody disturbed.

One process trains (``--act``). The one that ``check.py`` starts runs it three times: undisturbed, killed, resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STEPS, DIES_AT = 12, 7
WIDTH = 256


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 16))


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 64, generator=generator).to(device), torch.randn(32, 16, generator=generator).to(device)


def loss_of(model: Any, step: int, device: str) -> torch.Tensor:
    rows, wanted = batch(step, device)
    return torch.nn.functional.mse_loss(model(rows), wanted)


def digest(model: torch.nn.Module) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.rpartition("module.")[2].encode())
        found.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def started(step: int) -> None:
    print("started", step, flush=True)


def die(step: int, options: argparse.Namespace) -> None:
    if options.dies and step == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def plain(options: argparse.Namespace, wrap: Callable[[torch.nn.Module], torch.nn.Module], snapshot: Any) -> str:
    from safe_ckpt import CheckpointConfig, Checkpointer

    model = wrap(net().to(options.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with Checkpointer(options.folder / "run", CheckpointConfig(snapshot=snapshot)) as ckpt:
        ckpt.resume(state)
        started(state["step"])
        for step in range(state["step"] + 1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, step, options.device).backward()
            optimizer.step()
            state["step"] = step
            handle = ckpt.save(step, state)
            if step == DIES_AT - 2:
                handle.result()  # the kill comes while the next ones are written
            die(step, options)
    return digest(model)


def group(options: argparse.Namespace) -> None:
    backend = "nccl" if options.device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, init_method=f"file://{options.folder}/group-{os.getpid()}", rank=0, world_size=1
    )


def ddp(options: argparse.Namespace) -> str:
    group(options)
    return plain(options, torch.nn.parallel.DistributedDataParallel, "auto")


def fsdp2(options: argparse.Namespace) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    group(options)
    mesh = init_device_mesh(options.device, (1,))
    return plain(options, lambda model: fully_shard(model, mesh=mesh), "auto")


def lightning(options: argparse.Namespace, strategy: str = "auto") -> str:
    import lightning.pytorch as pl

    from safe_ckpt.lightning import SafeCheckpointCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, rows: Any, number: int) -> torch.Tensor:
            return loss_of(self.net, self.global_step + 1, options.device)

        def on_train_start(self) -> None:
            started(self.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            die(self.global_step, options)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(1000))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    saving = SafeCheckpointCallback(
        options.folder / "run", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", resume="auto"
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    where = "gpu" if options.device == "cuda" else "cpu"
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator=where,
        devices=1,
        strategy=strategy,
        callbacks=[saving],
        default_root_dir=options.folder,
        **quiet,
    )
    module = Module()
    trainer.fit(module)
    return digest(module.net)


def accelerate(options: argparse.Namespace) -> str:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from safe_ckpt.accelerate import register
    from safe_ckpt.errors import NoValidCheckpointError

    project = ProjectConfiguration(str(options.folder / "run"), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(project_config=project, cpu=options.device == "cpu")
    register(accelerator)
    made = net()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    try:
        accelerator.load_state()
    except NoValidCheckpointError as error:
        if error.rejected:
            raise
    started(project.iteration)
    for step in range(project.iteration + 1, STEPS + 1):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, step, options.device))
        optimizer.step()
        accelerator.save_state(step=step)
        die(step, options)
    accelerator.end_training()
    return digest(accelerator.unwrap_model(model))


def deepspeed(options: argparse.Namespace) -> str:
    import deepspeed

    from safe_ckpt.deepspeed import install

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    model = net()
    settings = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    with install(engine):
        path, client = engine.load_checkpoint(str(options.folder / "run"))
        first = client["step"] if path is not None else 0
        started(first)
        for step in range(first + 1, STEPS + 1):
            engine.backward(loss_of(engine, step, options.device))
            engine.step()
            engine.save_checkpoint(str(options.folder / "run"), client_state={"step": step})
            die(step, options)
    return digest(engine.module)


KINDS: dict[str, Callable[[argparse.Namespace], str]] = {
    "plain": lambda options: plain(options, lambda model: model, "auto"),
    "plain, overlapped": lambda options: plain(options, lambda model: model, "overlapped"),
    "DDP": ddp,
    "FSDP2": fsdp2,
    "Lightning": lightning,
    "Lightning FSDPStrategy": lambda options: lightning(options, "fsdp"),
    "Accelerate": accelerate,
    "DeepSpeed ZeRO-2": deepspeed,
}


def act(options: argparse.Namespace, folder: Path, *, dies: bool) -> dict[str, str]:
    """One run in a process of its own: the step that it started behind, and the digest of its end unless it was killed."""
    folder.mkdir(exist_ok=True)
    own = ["--kind", options.kind, "--device", options.device, "--folder", str(folder), "--act", *["--dies"] * dies]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if options.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    done = subprocess.run(
        [sys.executable, __file__, *own], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != (-signal.SIGKILL if dies else 0):
        raise SystemExit(
            f"{done.stdout}{done.stderr}\nstatus {done.returncode} of a run that {'dies' if dies else 'ends'}"
        )
    told = [line.split() for line in done.stdout.splitlines() if line.startswith(("digest ", "started "))]
    return {row[0]: row[1] for row in told}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mebibytes")
    parser.add_argument("--act", action="store_true")
    parser.add_argument("--dies", action="store_true")
    options = parser.parse_args()
    if options.act:
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(mode=True)
        print("digest", KINDS[options.kind](options), flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    undisturbed = act(options, options.folder / "undisturbed", dies=False)
    act(options, options.folder / "killed", dies=True)
    resumed = act(options, options.folder / "killed", dies=False)
    if undisturbed["digest"] != resumed["digest"]:
        raise SystemExit(f"undisturbed it ends as {undisturbed}, killed and resumed as {resumed}")
    if int(resumed["started"]) < DIES_AT - 2:
        raise SystemExit(f"it resumed behind step {resumed['started']}, that of {DIES_AT - 2} was durable")
    print(f"killed in step {DIES_AT}, resumed behind {resumed['started']}: bit for bit")


if __name__ == "__main__":
    main()
