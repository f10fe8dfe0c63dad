"""Transformers' Trainer, made safe as docs/start/transformers.md says it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from kit.limits import QUICK
from programs_of import processes
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.start import Here
from programs_of.trainers_limits import Limits
from safe_ckpt import CheckpointConfig
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.transformers import SafeCheckpointMixin

FIXED = (1, 6, 14)  # losses of a window; a training that is over; a stream's end
# What depends on the clock, and ``train_loss``, which is that of one call of ``train()``.
_OTHERS = ["runtime", "per_second", "train_loss"]
_IGNORED = frozenset(
    f"logged.{of}_{name}" for of in ("eval", "train") for name in ("runtime", "samples_per_second", "steps_per_second")
) | {"logged.train_loss"}
_STOPPED = "a callback stopped training at the step of"  # of docs/limits.md
_CONFIG = CheckpointConfig(timeouts=QUICK)


class Trained:
    """See the module."""

    def __init__(self, stock: bool = False) -> None:
        self._stock = stock

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, killed once or twice, and started again."""
        one = _choose(draw)
        kills = processes.kills_of(draw, "batch", "step_end", "evaluate", "save", "log", steps=7)

        def started(name: str, **more: Any) -> processes.Started:
            return processes.start("trainers", draw, folder, name, stock=self._stock, **more)

        whole = started("whole", out="whole")
        if whole.error:
            return processes.failed(whole)
        wrong: list[str] = []
        limits = Limits(one)
        for number, kill in enumerate([*kills, None]):
            there = sorted(path.parent.name for path in (folder / "stopped").glob("checkpoint-*/manifest.json"))
            last = started(f"start-{number}", out="stopped", number=number, kill=kill)
            if last.error:
                return processes.failed(last)
            begins = (last.notes("begins") or [0])[0]
            if _STOPPED in last.said and begins == whole.results()["state of rank 0"]["step"]:
                # It has steps that the whole run has not.
                return processes.verdict_of(wrong, came_to="went on behind its stop")
            limits.add(begins, last.said)
            wrong += processes.began_anew(there, last)
            found = processes.differences(
                whole.lines, last.lines, _IGNORED | ({"logged.epoch"} if one.is_stream else set())
            )
            wrong += [text for text in found if not limits.lets(text)]
            wrong += limits.events(whole, last, begins)
        wrong += limits.results(whole, last)
        return processes.verdict_of(wrong, came_to="as limits.md says" if limits.used else "equal")


def _choose(draw: Draw) -> SimpleNamespace:
    """The choices of both sides."""
    one = SimpleNamespace(model=draw.among("model", "net", "net", "llama", "peft"))
    one.data = draw.among("data", "map", "draws", "stream", "sized stream", "datasets", "buffered")
    one.is_stream = one.data in ("stream", "buffered")
    one.by = "steps" if one.is_stream else draw.among("by", "steps", "epochs")
    one.sampling = draw.among("sampling", "random", "sequential", "group_by_length")
    one.rows = draw.among("rows", 12, 13, 7)
    one.batch = draw.among("batch", 2, 3)
    one.drop_last = draw.flag("drop last")
    one.workers = draw.among("workers", 0, 0, 2)
    one.stay = one.workers > 0 and draw.flag("stay")
    one.collates = draw.among("collates", "plain", "draws")
    one.micro = draw.among("micro", 1, 2, 3)
    one.optimizer = draw.among("optimizer", "sgd", "adamw_torch", "adagrad", "adafactor")
    one.data_seed = draw.among("data_seed", None, 7)
    one.tokens = draw.among("tokens", "no", "all")
    one.init = draw.flag("model_init")
    one.noise = draw.flag("neftune", of=4) and one.model != "net"
    one.door = draw.among("door", "newest", "path")
    _choose_strategies(draw, one)
    # Those of evaluations, and of streams that are read again, begin anew: docs/limits.md.
    one.stay = one.stay and one.eval == "no" and one.data in ("map", "draws", "datasets")
    return one


def _choose_strategies(draw: Draw, one: SimpleNamespace) -> None:
    one.saving = draw.among("saving", "steps", "epoch", "best")
    one.save_steps = draw.among("save_steps", 2, 1, 3)
    one.best = draw.flag("load best") or one.saving == "best"
    one.eval = (
        one.saving
        if one.best and one.saving != "best"
        else draw.among("eval", "steps", "epoch", *(["no"] * (not one.best)))
    )
    one.eval_steps = one.save_steps if one.best else draw.among("eval_steps", 2, 1, 3)
    one.metric = draw.among("metric", "eval_loss", "eval_score") if one.best else None
    one.greater = draw.among("greater", False, True) if one.best else None
    one.limit = draw.among("limit", None, 2, 1)
    one.logging = draw.among("logging", "steps", "epoch")
    one.log_steps = draw.among("log_steps", 1, 2, 3)
    one.first = draw.flag("log first")
    kinds = ["linear", "cosine", "constant_with_warmup", "cosine_with_restarts", "inverse_sqrt"]
    one.scheduler = draw.among("scheduler", *kinds, *(["reduce_lr_on_plateau"] * (one.eval != "no")))
    one.warmup = draw.among("warmup", 0, 3)
    one.callback = draw.among("callback", "", "state", "looks", "stops")
    one.early = one.eval != "no" and one.best and draw.flag("early stopping", of=3)


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows of different lengths; ``draws`` adds something random."""

    def __init__(self, number: int, first: int = 0, *, draws: bool = False) -> None:
        self.number, self.first, self.draws = number, first, draws

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        if at >= self.number:
            raise IndexError(at)  # the sampler by lengths goes through it
        number = self.first + at
        row = [1 + (number * 7 + n * n) % 15 for n in range(4 + number % 4)]
        if self.draws:
            row[0] = int(torch.randint(1, 16, ()))
        return {"input_ids": row, "labels": row}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same rows, one after the other; the workers take turns."""

    def __init__(self, number: int) -> None:
        self.rows = Rows(number)

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, each = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.rows[at] for at in range(first, len(self.rows), each))


class SizedStream(Stream):
    """It has a length."""

    def __len__(self) -> int:
        return len(self.rows)


def _data(one: SimpleNamespace) -> Any:
    rows = Rows(one.rows, draws=one.data == "draws")
    if one.data == "stream":
        return Stream(one.rows)
    if one.data == "sized stream":
        return SizedStream(one.rows)
    if one.data in ("datasets", "buffered"):
        made = datasets.Dataset.from_list([rows[n] for n in range(one.rows)])
        return made if one.data == "datasets" else made.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=4)
    return rows


class Collator:
    """Pads; ``draws`` masks a token of each row."""

    def __init__(self, here: Here, *, draws: bool) -> None:
        self._here, self._draws = here, draws

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        self._here.meets("batch")
        most = max(len(row["input_ids"]) for row in rows)
        made = torch.tensor([[*row["input_ids"], *[0] * (most - len(row["input_ids"]))] for row in rows])
        labels = made.masked_fill(made == 0, -100)
        if self._draws:
            made[torch.arange(len(rows)), torch.randint(4, (len(rows),))] = 16
        return {"input_ids": made, "attention_mask": (made != 0).long(), "labels": labels}


class Net(torch.nn.Module):
    """No model of Transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(17, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.2)
        self.out = torch.nn.Linear(4, 17)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        inner = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.out(self.drop(inner))
        return {"loss": torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def _model(one: SimpleNamespace) -> Any:
    torch.manual_seed(1)
    if one.model == "net":
        return Net()
    sizes = {
        "vocab_size": 17,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1))
    if one.model == "peft":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2))
    return model


_HOOKS = (
    *(
        "train_begin",
        "train_end",
        "epoch_begin",
        "epoch_end",
        "step_begin",
        "substep_end",
        "step_end",
        "evaluate",
        "log",
    ),
    *("optimizer_step", "pre_optimizer_step", "prediction_step"),
)


class Teller(TrainerCallback):
    """Tells each hook, in its order."""

    def __init__(self, here: Here) -> None:
        self._here = here


def _telling(name: str) -> Any:
    def on(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        told = plain(more.get("logs") or more.get("metrics")) if name in ("log", "evaluate") else ""
        self._here.event(state.global_step, f"on_{name} {told}")
        if name == "train_begin":
            self._here.note("begins", state.global_step)
        self._here.meets(name)

    return on


for _name in _HOOKS:
    setattr(Teller, f"on_{_name}", _telling(_name))


class Looker(TrainerCallback):
    """Looks at the checkpoint."""

    def __init__(self, here: Here) -> None:
        self._here = here

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        there = sorted(path.name for path in Path(args.output_dir, f"checkpoint-{state.global_step}").iterdir())
        self._here.event(state.global_step, f"on_save {there}")
        self._here.meets("save")


class Counts(TrainerCallback, ExportableState):
    """Has state of its own. The Trainer makes it anew at a resume."""

    here: Here

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        self.here.event(state.global_step, f"counted {self.steps}")

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class Stops(TrainerCallback):
    """Stops at a step, and saves and evaluates at another one, as a script may decide itself."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_save or state.global_step == 3
        control.should_training_stop = control.should_training_stop or state.global_step == 6


def plain(values: Any) -> dict[str, Any]:
    """What must be equal in two runs."""
    return {key: one for key, one in sorted((values or {}).items()) if not any(other in key for other in _OTHERS)}


def _score(outputs: Any) -> dict[str, float]:
    return {"score": float((outputs.predictions[:, :4].argmax(-1) == outputs.label_ids[:, :4]).mean())}


def _arguments(one: SimpleNamespace, here: Here) -> TrainingArguments:
    long = {"max_steps": 8} if one.by == "steps" else {"num_train_epochs": 3 if one.micro > 1 else 2}
    if one.is_stream or one.data == "sized stream":
        sampling: dict[str, Any] = {}
    else:
        sampling = {"train_sampling_strategy": one.sampling}
    return TrainingArguments(
        output_dir=str(here.out), **long, **sampling,
        per_device_train_batch_size=one.batch, per_device_eval_batch_size=4, dataloader_drop_last=one.drop_last,
        dataloader_num_workers=one.workers, dataloader_persistent_workers=one.stay,
        gradient_accumulation_steps=one.micro, optim=one.optimizer, learning_rate=0.05,
        data_seed=one.data_seed, include_num_input_tokens_seen=one.tokens,
        neftune_noise_alpha=5 if one.noise else None,
        save_strategy=one.saving, save_steps=one.save_steps, save_total_limit=one.limit,
        eval_strategy=one.eval, eval_steps=one.eval_steps,
        load_best_model_at_end=one.best, metric_for_best_model=one.metric, greater_is_better=one.greater,
        logging_strategy=one.logging, logging_steps=one.log_steps, logging_first_step=one.first,
        lr_scheduler_type=one.scheduler, warmup_steps=one.warmup,
        restore_callback_states_from_checkpoint=True, remove_unused_columns=False,
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip


def _trainer(one: SimpleNamespace, here: Here) -> Any:
    class SafeTrainer(SafeCheckpointMixin, Trainer):  # type: ignore[misc]
        checkpoint_config = _CONFIG

    Counts.here = here
    callbacks: list[Any] = [Teller(here)]
    callbacks += {"state": [Counts()], "looks": [Looker(here)], "stops": [Stops()]}.get(one.callback, [])
    callbacks += [EarlyStoppingCallback(2)] if one.early else []
    made: dict[str, Any] = {"model_init": lambda: _model(one)} if one.init else {"model": _model(one)}
    return (Trainer if here.stock else SafeTrainer)(
        **made,
        args=_arguments(one, here),
        train_dataset=_data(one),
        eval_dataset=Rows(6, 30),
        data_collator=Collator(here, draws=one.collates == "draws"),
        compute_metrics=_score,
        callbacks=callbacks,
    )


def go_on(trainer: Any) -> None:
    """Resume, or begin where nothing was ever saved, as docs/start/transformers.md has it."""
    try:
        trainer.train(resume_from_checkpoint=True)
    except NoValidCheckpointError as error:
        if error.rejected:
            raise
        trainer.train()


def start(draw: Draw, here: Here) -> None:
    """The program."""
    one = _choose(draw)
    transformers.logging.set_verbosity_error()
    if one.is_stream:
        _OTHERS.append("epoch")  # counted from 0 at a resume: docs/limits.md
    trainer = _trainer(one, here)
    if here.stock or one.door == "path":
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(here.out)))
    else:
        go_on(trainer)
    _tell_end(trainer, here)


def _tell_end(trainer: Any, here: Here) -> None:
    state = trainer.state
    best = state.best_model_checkpoint
    epoch = None if "epoch" in _OTHERS else state.epoch
    found = {
        "step": state.global_step,
        "epoch": epoch,
        "best_metric": state.best_metric,
        "best_step": state.best_global_step,
    }
    found |= {"best": best and Path(best).name, "tokens": state.num_input_tokens_seen, "flos": state.total_flos}
    here.result("state", found)
    for number, row in enumerate(state.log_history):
        here.result(f"row {number} of the log", plain(row))
    digest = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    here.result("weights", digest.hexdigest()[:12])
    here.result("kept", sorted(path.name for path in here.out.glob("checkpoint-*")))
