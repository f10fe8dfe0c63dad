"""What a save costs by how much of the model is frozen: bytes written, the call, the time until it is durable, the resume.

Ways in turns, one run: ours, ours without sharing, ``torch.save`` of all with fsync, DCP's ``save``, and ``torch.save`` of the
trained parameters alone, which is what tools do that save an adapter and leave the base to chance. With ``--lora`` a Llama with
an adapter, and the ways of Transformers and PEFT: ``save_pretrained`` of the whole model, which is what ``save_only_model``
leaves, and of the adapter alone::

    python benchmarks/unchanged.py --mib 768 --rounds 5
    python benchmarks/unchanged.py --mib 768 --rounds 5 --lora
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Unchanged, events

LAYERS = 100


class Run:
    """A model of a hundred layers, some of them frozen, and SGD with momentum for the others."""

    def __init__(self, mib: int, frozen_percent: int) -> None:
        width = int((mib * (1 << 20) / 4 / LAYERS) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
        for layer in list(self.model)[:frozen_percent]:
            layer.requires_grad_(requires_grad=False)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=1e-6)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.trained:
                parameter.mul_(0.999)


class Lora(Run):
    """A Llama with a PEFT adapter on it."""

    def __init__(self, mib: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        width = int((mib * (1 << 20) / 4 / 128) ** 0.5) // 64 * 64
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 8, "vocab_size": 1000}
        self.base = LlamaForCausalLM(LlamaConfig(num_attention_heads=width // 64, **sizes))
        self.model = get_peft_model(self.base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=1e-6)
        self.state = {"model": self.model, "optimizer": self.optimizer}


class Ours:
    def __init__(self, folder: Path, run: Run, *, share: bool) -> None:
        self.run, self.folder, self.written = run, folder, 0
        self.config = CheckpointConfig(retention=Retention(keep_last=2), unchanged=Unchanged(share=share))
        self.ckpt = Checkpointer(folder, self.config, hooks=[self._hear])

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.Written):
            self.written = event.size_bytes

    def save(self, step: int) -> tuple[float, float, int]:
        begun = time.perf_counter()
        handle = self.ckpt.save(step, self.run.state)
        called = time.perf_counter() - begun
        handle.result()
        return called, time.perf_counter() - begun, self.written

    def resume(self) -> float:
        begun = time.perf_counter()
        self.ckpt.resume(self.run.state)
        return time.perf_counter() - begun

    def close(self) -> None:
        self.ckpt.close()


class Plain:
    """A file that replaces the one before."""

    def __init__(self, folder: Path, run: Run, what: str) -> None:
        self.run, self.folder, self.what = run, folder, what
        folder.mkdir()

    def save(self, step: int) -> tuple[float, float, int]:
        begun, path = time.perf_counter(), self.folder / f"{step}"
        if self.what == "save_pretrained":
            self.run.model.base_model.model.save_pretrained(path)
        elif self.what == "peft":
            self.run.model.save_pretrained(path)
        elif self.what == "dcp":
            dcp.save({"model": self.run.model.state_dict()}, checkpoint_id=path, no_dist=True)
        else:
            state = self.run.model.state_dict()
            if self.what == "adapter":
                state = {name: state[name] for name, p in self.run.model.named_parameters() if p.requires_grad}
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
        size = sum(one.stat().st_size for one in path.rglob("*")) if path.is_dir() else path.stat().st_size
        old = self.folder / f"{step - 2}"
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        return seconds, seconds, size

    def resume(self) -> float:
        begun = time.perf_counter()
        newest = max(self.folder.iterdir(), key=lambda path: int(path.name))
        if self.what == "save_pretrained":
            from transformers import LlamaForCausalLM

            LlamaForCausalLM.from_pretrained(newest)
        elif self.what == "peft":
            from peft import load_peft_weights, set_peft_model_state_dict

            set_peft_model_state_dict(self.run.model, load_peft_weights(str(newest), device="cpu"))
        elif self.what == "dcp":
            dcp.load({"model": self.run.model.state_dict()}, checkpoint_id=newest, no_dist=True)
        else:
            self.run.model.load_state_dict(torch.load(newest, weights_only=True), strict=self.what != "adapter")
        return time.perf_counter() - begun

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Figures:
    calls: list[float] = dataclasses.field(default_factory=list)
    durables: list[float] = dataclasses.field(default_factory=list)
    written: int = 0


def measure(folder: Path, mib: int, percent: int | None, rounds: int) -> None:
    run = Lora(mib) if percent is None else Run(mib, percent)
    label = "LoRA" if percent is None else f"{percent:3d} %"
    ways = {
        "ours": Ours(folder / "ours", run, share=True),
        "ours, all anew": Ours(folder / "anew", run, share=False),
        "torch.save": Plain(folder / "torch", run, "whole"),
        "dcp.save": Plain(folder / "dcp", run, "dcp"),
    }
    if percent is None:
        ways["save_pretrained"] = Plain(folder / "pretrained", run, "save_pretrained")
        ways["PEFT's"] = Plain(folder / "peft", run, "peft")
    elif percent:
        ways["trained alone"] = Plain(folder / "adapter", run, "adapter")
    found = {name: Figures() for name in ways}
    for step in range(1, rounds + 3):
        run.step()
        for name in sorted(ways, reverse=bool(step % 2)):
            called, durable, written = ways[name].save(step)
            if step >= 3:
                found[name].calls.append(called)
                found[name].durables.append(durable)
                found[name].written = written
    for name, way in ways.items():
        resumed = statistics.median(way.resume() for _ in range(3))
        figures, anew = found[name], found["ours, all anew"]
        call, durable = statistics.median(figures.calls), statistics.median(figures.durables)
        print(
            f"{label} | {name:15s} | {figures.written / (1 << 20):8.1f} MiB | call {call:.3f} s "
            f"({call / statistics.median(anew.calls):.2f}) | durable {durable:.3f} s "
            f"({durable / statistics.median(anew.durables):.2f}) | resume {resumed:.3f} s",
            flush=True,
        )
        way.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=int, nargs="*", default=[0, 50, 90, 99])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--dir", default=None)
    chosen = parser.parse_args()
    print("frozen | way | written | call and durable with their ratios to ours without sharing | resume")
    for percent in [None] if chosen.lora else chosen.shares:
        with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
            measure(Path(folder), chosen.mib, percent, chosen.rounds)


if __name__ == "__main__":
    main()
