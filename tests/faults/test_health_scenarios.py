"""Seeded mishaps: numbers go bad in weights or optimizer, at any step, and the job is started again until it is done.

Nobody looks after it: each start is the same call. In the end training has come to its last step with healthy weights.
"""

import dataclasses
import math
import os
import random
import signal
import subprocess
import sys

import pytest
import torch

from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, Health, Retention
from safe_ckpt.errors import UnhealthyStateError
from support import program_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.filterwarnings("ignore")]
STEPS = 14
SEEDS = 300 if THOROUGH else 8
CONFIG = CheckpointConfig(
    health=Health(action="stop", norm_jump=1e4),
)


class Mishap(Exception):
    """The job ends."""


class Plan:
    """What happens in one scenario: each mishap once, at its step, but for what the state itself brings about.

    Args:
        seed: of all that is random in it.
    """

    def __init__(self, seed):
        chance = random.Random(seed)
        self.framework = chance.choice(["plain", "lightning", "accelerate", "transformers"])
        self.where = chance.choice(["weight", "optimizer", "bias"])
        self.how = chance.choice(["nan", "inf", "exponent"])
        self.at = chance.randint(2, STEPS - 1)
        self.kills = dict.fromkeys(chance.sample(range(1, STEPS), chance.randint(0, 2)), True)
        self.place = chance.randrange(1 << 16)
        self.done = False

    def strike(self, step, weight, bias, optimizer):
        """Before a step; raises where the job is to end."""
        if step == self.at and not self.done:
            self.done = True
            tensor = {"weight": weight, "bias": bias}.get(self.where)
            if tensor is None:
                tensor = optimizer.state[weight]["exp_avg"] if optimizer.state else weight
            flat = tensor.data.view(-1)
            place = self.place % flat.numel()
            if self.how == "exponent":
                flat[place : place + 1].view(torch.int32).bitwise_or_(0x7E000000)
            else:
                flat[place] = {"nan": math.nan, "inf": math.inf}[self.how]
        if self.kills.pop(step, False):
            raise Mishap("killed")


def plain(folder, plan):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = {"net": net, "optimizer": optimizer}
    with Checkpointer(folder, dataclasses.replace(CONFIG, retention=Retention(keep_last=3))) as ckpt:
        info = ckpt.resume(state)
        for step in range(info.step if info else 0, STEPS):
            plan.strike(step, net[0].weight, net[0].bias, optimizer)
            net(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.save(step + 1, state)
    return net


def lightning(folder, plan):
    import lightning.pytorch as pl

    from safe_ckpt.lightning import SafeCheckpointCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))

        def training_step(self, batch, batch_idx):
            plan.strike(self.global_step, self.net[0].weight, self.net[0].bias, self.optimizers().optimizer)
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(8, 6), batch_size=2)

    callback = SafeCheckpointCallback(
        dirpath=folder, config=CONFIG, resume="auto", every_n_train_steps=1, save_top_k=3, monitor="step", mode="max"
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module = Module()
    pl.Trainer(callbacks=[callback], max_steps=STEPS, default_root_dir=folder, **quiet).fit(module)
    return module


def accelerate(folder, plan):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from accelerate_runs import fresh
    from safe_ckpt.accelerate import register
    from safe_ckpt.errors import NoValidCheckpointError

    with fresh():
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
        accelerator = Accelerator(cpu=True, project_config=project)
        with register(accelerator, CONFIG):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            net, optimizer = accelerator.prepare(net, optimizer)
            try:
                accelerator.load_state()
                begin = max(int(state["step"]) for state in optimizer.state.values())
            except NoValidCheckpointError as error:
                if error.rejected:
                    raise
                begin = 0
            for step in range(begin, STEPS):
                plan.strike(step, net[0].weight, net[0].bias, optimizer.optimizer)
                accelerator.backward(net(torch.randn(4, 6)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                accelerator.save_state()
        return net


def transformers(folder, plan):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from safe_ckpt.transformers import SafeCheckpointMixin

    class Strike(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
            layer = model.model.layers[0]
            inner = getattr(optimizer, "optimizer", optimizer)
            weight, bias = layer.self_attn.q_proj.weight, layer.input_layernorm.weight
            plan.strike(state.global_step, weight, bias, inner)

    class Safe(SafeCheckpointMixin, Trainer):
        checkpoint_config = CONFIG

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    rows = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    how = {
        "save_steps": 1,
        "max_steps": STEPS,
        "save_total_limit": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    made = Safe(
        model=LlamaForCausalLM(LlamaConfig(**sizes)),
        args=TrainingArguments(output_dir=str(folder), logging_steps=100, **how),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Strike()],
    )
    made.train(
        resume_from_checkpoint=os.path.isdir(folder) and any(n.startswith("checkpoint-") for n in os.listdir(folder))
    )
    return made.model


JOBS = {"plain": plain, "lightning": lightning, "accelerate": accelerate, "transformers": transformers}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_with_bad_numbers_ends_healthy_without_a_human(tmp_path, matrix, seed):
    """However often it has to begin; never from nothing once a healthy checkpoint was there."""
    plan, net = Plan(seed), None
    for _ in range(19):
        try:
            net = JOBS[plan.framework](tmp_path / "run", plan)
            break
        except (Mishap, UnhealthyStateError):
            continue
    assert net is not None, vars(plan)
    for name, tensor in net.state_dict().items():
        assert tensor.isfinite().all(), (name, vars(plan))
        assert tensor.abs().max() < 1e3, (name, vars(plan))
    matrix("numbers go bad", f"{plan.framework}, {plan.how} in {plan.where}", {"ended healthy": 1})


@pytest.mark.parametrize("seed", range(30 if THOROUGH else 1))
def test_a_run_with_bad_numbers_and_kills_ends_healthy(tmp_path, matrix, seed):
    """SIGKILL at any moment, besides: each start is the same command, and the last one ends well."""
    chance, ends = random.Random(seed), []
    for number in range(15):
        after_s = chance.uniform(0.0, 1.0) if number < 5 else 0.0
        done = subprocess.run(
            [sys.executable, program_path("goes_bad_once"), tmp_path / "run", str(seed), str(after_s)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        ends.append(done.returncode)
        if not done.returncode:
            break
        assert done.returncode == -signal.SIGKILL or "UnhealthyStateError" in done.stderr, done.stderr
    assert ends[-1] == 0, ends
    matrix("numbers go bad", "a job that is killed besides", {"ended healthy": 1})
