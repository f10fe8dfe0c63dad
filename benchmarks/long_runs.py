"""Whether the last of many saves costs what the first one costs: small saves on each entry point, in a process of its own.

``ratio`` is the median time of the last saves over that of the first ones (10 % each), with retention that keeps two;
``cpu_ratio`` is the same with the time of the processor, which other work on the machine changes less.
``objects`` and ``rss_kib`` are what one save adds to the objects that Python's collector knows and to the process's memory,
between the first 10 % and the end; ``children_kib`` the same of its child processes, ``keys`` of the ranks' store.
``entries`` is what one save adds to the files and folders below the directory.

    python benchmarks/long_runs.py --saves 5000
    python benchmarks/long_runs.py --saves 500 --only checkpointer accelerate
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import children, status
from ranks import spawn_ranks

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention
from safe_ckpt.config import WriterConfig

TWO = Retention(keep_last=2)
PROCESS = WriterConfig(inline_bytes=0)  # the writer's process writes, as in any real run


class Meter:
    """Called once per save.

    Args:
        saves: how many there will be.
        folder: where they go.
        count_keys: how many keys the ranks' store has.
    """

    def __init__(self, saves: int, folder: Path, count_keys: Callable[[], int] = lambda: 0) -> None:
        self.saves, self.share = saves, max(1, saves // 10)
        self._folder, self._count_keys = folder, count_keys
        self._seconds: list[float] = []
        self._cpu_s: list[float] = []
        self._begun = self._busy = 0.0
        self._first: dict[str, float] = {}

    def begin(self) -> None:
        self._begun, self._busy = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self._seconds.append(time.perf_counter() - self._begun)
        self._cpu_s.append(time.process_time() - self._busy)
        if len(self._seconds) == self.share:
            self._first = self._state()
        self.begin()

    @contextlib.contextmanager
    def save(self) -> Any:
        self.begin()
        yield
        self.end()

    def _state(self) -> dict[str, float]:
        gc.collect()
        return {
            "objects": len(gc.get_objects()),
            "rss_kib": status().get("VmRSS", 0) / 1024,
            "children_kib": sum(status(pid).get("VmRSS", 0) for pid in children()) / 1024,
            "keys": self._count_keys(),
            "entries": sum(len(below) + len(names) for _, below, names in os.walk(self._folder)),
        }

    def figures(self) -> dict[str, float]:
        """To be called after ``saves`` saves, with nothing waited for and everything open."""
        last = self._state()
        first_s, last_s = self._medians(self._seconds)
        first_cpu_s, last_cpu_s = self._medians(self._cpu_s)
        grown = {key: round((last[key] - self._first[key]) / (self.saves - self.share), 3) for key in last}
        return {
            "saves": len(self._seconds), "first_ms": round(1000 * first_s, 2), "last_ms": round(1000 * last_s, 2),
            "ratio": round(last_s / first_s, 2), "cpu_ratio": round(last_cpu_s / first_cpu_s, 2), **grown,
        }  # fmt: skip

    def _medians(self, seconds: list[float]) -> tuple[float, float]:
        return statistics.median(seconds[1 : self.share]), statistics.median(seconds[-self.share :])


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return module, optimizer


def checkpointer(folder: Path, saves: int, *, wait: bool = False, **options: Any) -> dict[str, float]:
    module, optimizer = _training()
    meter = Meter(saves, folder)
    with Checkpointer(folder, CheckpointConfig(retention=TWO, **options)) as ckpt:
        for step in range(saves):
            with meter.save():
                ckpt.save(step, {"model": module, "optimizer": optimizer})
                if wait:
                    ckpt.wait()
        return meter.figures()


def checkpointer_writer(folder: Path, saves: int) -> dict[str, float]:
    return checkpointer(folder, saves, writer=PROCESS)


def checkpointer_three_in_flight(folder: Path, saves: int) -> dict[str, float]:
    return checkpointer(folder, saves, max_in_flight=3)


def export(folder: Path, saves: int) -> dict[str, float]:
    module, _ = _training()
    meter = Meter(saves, folder)
    with Checkpointer(folder / "checkpoints", CheckpointConfig(retention=TWO)) as ckpt:
        for number in range(saves):
            with meter.save():
                ckpt.export(module, folder / f"weights-{number}")
            if number >= 3:  # as users do
                shutil.rmtree(folder / f"weights-{number - 3}")
        return meter.figures()


def export_elsewhere(folder: Path, saves: int) -> dict[str, float]:
    """Each into a folder of its own: ``runs/7/weights``."""
    module, _ = _training()
    meter = Meter(saves, folder)
    with Checkpointer(folder / "checkpoints", CheckpointConfig(retention=TWO)) as ckpt:
        for number in range(saves):
            with meter.save():
                ckpt.export(module, folder / str(number) / "weights")
            if number >= 3:
                shutil.rmtree(folder / str(number - 3))
        return meter.figures()


def _rank(rank: int, folder: Path, saves: int, *, sharded: bool = False) -> dict[str, float]:
    quiet()
    module, optimizer = _training()
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "place": PerRank({"rank": rank})}
    if sharded:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        state["parts"] = {"weight": distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])}
    store: list[Any] = []
    real = torch.distributed.TCPStore

    class Counted(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            store.append(self)

    torch.distributed.TCPStore = Counted
    meter = Meter(saves, folder, lambda: store[0].num_keys() if store else -1)
    with Checkpointer(folder, CheckpointConfig(retention=TWO)) as ckpt:
        for step in range(saves):
            with meter.save():
                ckpt.save(step, state)
                if sharded:
                    ckpt.export(state["parts"], folder / "weights")
        return meter.figures()


def _sharded_rank(rank: int, folder: Path, saves: int) -> dict[str, float]:
    return _rank(rank, folder, saves, sharded=True)


def two_ranks(folder: Path, saves: int, work: Callable[..., Any] = _rank) -> dict[str, float]:
    outcomes = spawn_ranks(work, 2, folder, saves, timeout_s=3600)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    both = [outcome.value for outcome in outcomes]
    return both[0] | {key: max(one[key] for one in both) for key in ("ratio", "objects", "rss_kib")}


def two_ranks_sharded(folder: Path, saves: int) -> dict[str, float]:
    """Each has a part, and every save comes with an export that gathers the parts."""
    return two_ranks(folder, saves, _sharded_rank)


def lightning(folder: Path, saves: int) -> dict[str, float]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from safe_ckpt.lightning import SafeCheckpointCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 8)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    meter = Meter(saves, folder)
    found: dict[str, float] = {}

    class Metered(SafeCheckpointCallback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            with meter.save():
                super().on_train_batch_end(*args, **kwargs)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            found.update(meter.figures())
            super().on_train_end(*args, **kwargs)

    callback = Metered(folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True)
    trainer = pl.Trainer(
        max_steps=saves, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(saves + 8, 8)), batch_size=1))
    return found


def accelerate(folder: Path, saves: int, *, automatic: bool = True, elsewhere: bool = False) -> dict[str, float]:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from safe_ckpt.accelerate import register

    project = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=automatic, total_limit=2 if automatic else None
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(*_training())
    meter = Meter(saves, folder)
    with register(accelerator, CheckpointConfig() if automatic else CheckpointConfig(retention=TWO)):
        for step in range(saves):
            place = folder / str(step) / "state" if elsewhere else folder / f"step_{step}"
            with meter.save():
                accelerator.save_state(None if automatic else str(place))
            if elsewhere and step >= 3:
                shutil.rmtree(folder / str(step - 3))
        return meter.figures()


def accelerate_named(folder: Path, saves: int) -> dict[str, float]:
    return accelerate(folder, saves, automatic=False)


def accelerate_elsewhere(folder: Path, saves: int) -> dict[str, float]:
    """Each into a folder of its own: ``runs/7/state``."""
    return accelerate(folder, saves, automatic=False, elsewhere=True)


def transformers(folder: Path, saves: int) -> dict[str, float]:
    import transformers as hf

    from safe_ckpt.transformers import SafeCheckpointMixin

    meter = Meter(saves, folder)
    found: dict[str, float] = {}

    class Trainer(SafeCheckpointMixin, hf.Trainer):
        checkpoint_config = CheckpointConfig()

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with meter.save():
                super()._save_checkpoint(*args, **kwargs)
            if self.state.global_step == saves:
                found.update(meter.figures())

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.net(x) - labels).pow(2).mean()}

    arguments = hf.TrainingArguments(
        output_dir=str(folder), max_steps=saves, per_device_train_batch_size=1, save_steps=1, use_cpu=True,
        save_strategy="steps", report_to=[], disable_tqdm=True, logging_strategy="no", save_total_limit=2,
    )  # fmt: skip
    rows = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(8)]
    Trainer(model=Model(), args=arguments, train_dataset=rows).train()
    return found


def deepspeed(folder: Path, saves: int) -> dict[str, float]:
    import deepspeed as ds

    from safe_ckpt.deepspeed import install

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    ds.init_distributed("gloo", auto_mpi_discovery=False)
    module = torch.nn.Linear(8, 8)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine, *_ = ds.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters()), config=settings)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    meter = Meter(saves, folder)
    with install(engine, CheckpointConfig(retention=TWO)):
        for step in range(saves):
            with meter.save():
                engine.save_checkpoint(str(folder), f"step{step}")
        found = meter.figures()
    torch.distributed.destroy_process_group()
    return found


WAYS = {
    way.__name__: way
    for way in (
        checkpointer, checkpointer_writer, checkpointer_three_in_flight, export, export_elsewhere, two_ranks, two_ranks_sharded,
        lightning, accelerate, accelerate_named, accelerate_elsewhere, transformers, deepspeed,
    )
}  # fmt: skip


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5000)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    parser.add_argument("--here", choices=WAYS, help="in this process, as JSON")
    asked = parser.parse_args()
    if asked.here:
        quiet()
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            print(json.dumps(WAYS[asked.here](Path(folder), asked.saves)))
        return
    for way in asked.only:
        command = [sys.executable, __file__, "--here", way, "--saves", str(asked.saves)]
        command += ["--folder", asked.folder] if asked.folder else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout.strip().splitlines()
        print(f"{way}: {said[-1] if done.returncode == 0 and said else done.stderr.strip()[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
