"""The demo: a real DDP run on real data, killed again and again in the middle of its saves.

Trains a network on scikit-learn's digits with a Lightning Trainer on 2 CPU ranks, saving asynchronously every few steps. The
whole job is killed with SIGKILL at random moments, most of them while a save is in flight. It is then started again with the
same command, and resumes automatically. At the end its weights are compared, bit for bit, with those of an uninterrupted run.
The exit status is 0 only if all checks pass.

    python examples/demo.py
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SAVE_EVERY, EPOCHS, WIDTH = 4, 14, 1500


def train(directory: Path) -> None:
    """One start of the training job. Lightning starts the second rank."""
    import lightning.pytorch as pl
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    from safe_ckpt.lightning import SafeCheckpointCallback, resumable

    class Digits(pl.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)]
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Say(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_global_zero:
                os.write(1, f"STEP {trainer.global_step}\n".encode())

    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    checkpoints = SafeCheckpointCallback(
        dirpath=directory, every_n_train_steps=SAVE_EVERY, save_top_k=1, save_last=True, resume="auto"
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp", callbacks=[checkpoints, Say()], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Digits()
    trainer.fit(model, resumable(DataLoader(data, batch_size=64, shuffle=True, drop_last=True)))
    if trainer.is_global_zero:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        os.write(1, f"WEIGHTS {hashlib.sha256(weights).hexdigest()}\n".encode())


class Job:
    """The training job in a process group of its own, with its output."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events = directory / ".safe_ckpt/events.jsonl"
        self.skip = len(self.read_events())
        command = [sys.executable, __file__, "--train", str(directory)]
        self.log = (directory.parent / "log.txt").open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True)
        self.step, self.weights = 0, ""

    def read_events(self) -> list[dict]:
        if not self.events.exists():
            return []
        return [json.loads(line) for line in self.events.read_text().splitlines() if line.endswith("}")]

    def news(self, kind: str) -> list[dict]:
        return [event for event in self.read_events()[self.skip :] if event["event"] == kind]

    def listen(self, until) -> None:
        """Read the output of the job until ``until()`` is true or the job ends."""
        for line in self.process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "STEP":
                self.step = int(rest)
            elif word == "WEIGHTS":
                self.weights = rest
            if until():
                return

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.listen(lambda: False)
        self.end()

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        self.log.close()
        return code


def run_to_the_end(directory: Path) -> Job:
    job = Job(directory)
    job.listen(lambda: False)
    if job.end() != 0 or not job.weights:
        sys.exit(f"the training job failed; its output is in {directory.parent / 'log.txt'}")
    return job


def kill_in_a_save(job: Job, chance: random.Random) -> bool:
    """Wait for progress, for the beginning of a save, and for a random moment. Returns whether the kill hit a save."""
    goal = chance.randint(2, 5)
    job.listen(lambda: len(job.news("committed")) >= goal)
    pending = job.directory / ".safe_ckpt/pending"
    deadline = time.monotonic() + 10
    while not any(pending.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(chance.random() * 0.01)
    job.kill()
    return any(pending.glob("*"))


def main(kills: int, seed: int) -> int:
    chance = random.Random(seed)
    work = Path("runs/demo")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    begun = time.monotonic()
    print(f"1. an uninterrupted run: {EPOCHS} epochs, 2 ranks, a save every {SAVE_EVERY} steps ...", flush=True)
    reference = run_to_the_end(work / "reference")
    print(f"2. the same run, killed {kills} times with SIGKILL (random seed {seed}):\n", flush=True)
    print("   kill | at step | within a save | last committed | resumed from | lost steps", flush=True)
    good, within_count = True, 0
    for number in range(1, kills + 1):
        job = Job(work / "killed")
        within = kill_in_a_save(job, chance)
        within_count += within
        committed = [event["step"] for event in job.read_events() if event["event"] == "committed"][-1]
        probe = Job(work / "killed")
        probe.listen(lambda probe=probe: bool(probe.news("resumed")))
        resumed = probe.news("resumed")[0]["step"]
        good &= resumed >= committed
        row = (number, job.step, "yes" if within else "no", committed, resumed, job.step - resumed)
        print("   {:>4} | {:>7} | {:>13} | {:>14} | {:>12} | {:>10}".format(*row), flush=True)
        if number < kills:
            probe.kill()  # one more kill, right after the resume
        else:
            probe.listen(lambda: False)
            good &= probe.end() == 0
    stalls = [
        event["stall_s"] * 1000
        for event in probe.read_events()
        if event["event"] == "snapshotted" and event["rank"] == 0
    ]
    size = max(event["size_bytes"] for event in probe.read_events() if event["event"] == "committed")
    same = probe.weights == reference.weights
    left = [path for part in ("pending", "trash") for path in (work / "killed/.safe_ckpt" / part).glob("*")]
    checks = {
        "every resume took the last committed checkpoint or a newer one": good,
        "the final weights are those of the uninterrupted run, bit for bit": same,
        "most kills came within a save": within_count * 2 >= kills,
        "nothing is left in pending or trash": not left,
    }
    print(f"\n   weights uninterrupted {reference.weights[:16]}, killed {probe.weights[:16]}")
    print(f"   stall per save of {size / 2**20:.0f} MiB: median {sorted(stalls)[len(stalls) // 2]:.1f} ms, "
          f"longest {max(stalls):.1f} ms, over {len(stalls)} saves; {time.monotonic() - begun:.0f} s in all\n")  # fmt: skip
    for claim, holds in checks.items():
        print(f"   {'ok ' if holds else 'NOT TRUE'} {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    if arguments.train:
        train(arguments.train)
    else:
        seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
        sys.exit(main(arguments.kills, seed))
