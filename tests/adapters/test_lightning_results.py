"""What was logged in an epoch goes on when that epoch is resumed, and so does what follows it: schedulers, scores, stopping."""

import contextlib
import logging
import re
import warnings

import pytest
import torch
from lightning_runs import PACKAGES, QUICK, Stop, fingerprint, package, trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection, SumMetric

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

BATCHES = 4


def module_of(pl, *, interval=None, monitor="loss", log=None):
    class Module(pl.LightningModule):
        """Logs in every way, and notes its batches with the learning rate, and what is known at the end of an epoch."""

        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)
            self.score, self.own, self.of_validation = MeanMetric(), SumMetric(), MeanMetric()
            self.both = MetricCollection({"squared": MeanSquaredError(), "absolute": MeanAbsoluteError()})
            self.seen, self.ends = [], []

        def training_step(self, batch, index):
            self.seen.append(
                (self.current_epoch, index, self.optimizers().param_groups[0]["lr"], batch[0][:, 0].tolist())
            )
            loss = self.net(batch[0]).pow(2).mean()
            self.own.update(loss.detach())
            if log is not None:
                log(self, loss)
                return loss
            self.log("loss", loss, on_step=True, on_epoch=True)
            for kind in ("mean", "sum", "max", "min"):
                self.log(kind, loss, on_step=False, on_epoch=True, reduce_fx=kind)
            self.score(loss.detach())
            self.log("score", self.score, on_step=True, on_epoch=True)
            self.both.update(self.net(batch[0]).detach().flatten(), batch[0][:, 0])
            self.log_dict(self.both, on_step=False, on_epoch=True)
            if index == 0:
                self.log("first", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, index):
            self.of_validation(self.net(batch[0]).mean())
            self.log("of_validation", self.of_validation)

        def on_train_epoch_end(self):
            self.log("own", self.own.compute())
            self.own.reset()
            self.ends.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            if interval is None:
                return optimizer
            follows = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.9)
            return [optimizer], [{"scheduler": follows, "monitor": monitor, "interval": interval}]

        def train_dataloader(self):
            rows = torch.linspace(0, 1, 4 * BATCHES).sin().reshape(-1, 2)
            return resumable(DataLoader(TensorDataset(rows), batch_size=2, shuffle=True))

        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=1)

    return Module()


def logger_of(name):
    class Rows(__import__(f"{name}.loggers", fromlist=["Logger"]).Logger):
        """Keeps the rows in memory, without ours."""

        name, version = "rows", 0

        def __init__(self):
            super().__init__()
            self.rows = []

        def log_metrics(self, metrics, step=None):
            if not any(key.startswith("ckpt/") for key in metrics):
                self.rows.append((step, dict(metrics)))

        def log_hyperparams(self, *_, **__):
            pass

    return Rows()


def saves_at(pl, folder, *hooks):
    class Saves(pl.Callback):
        """At each of the hooks, after all other callbacks."""

        def __init__(self):
            self.saved = []

        def save(self, made, module, *_):
            path = folder / f"{len(self.saved)}.ckpt"
            made.save_checkpoint(path)
            self.saved.append((path, len(module.seen), len(module.ends), len(made.logger.rows)))

    made = Saves()
    for hook in hooks:
        setattr(made, hook, made.save)
    return made


def run(
    folder, name, kind=SafeCheckpointCallback, *, path=None, callbacks=(), seed=77, settings=None, module=None, **saving
):
    pl = package(name)
    pl.seed_everything(seed, verbose=False)
    module = module or module_of(pl)
    own = {"config": QUICK} if kind is SafeCheckpointCallback else {}
    saves = kind(dirpath=folder, **{"save_top_k": 0, **own, **saving})
    more = {"max_epochs": 3, "logger": logger_of(name), "log_every_n_steps": 1, **(settings or {})}
    made = trainer(pl, [*callbacks, saves], folder, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, ckpt_path=path)
    return module, made, saves


def shown(made):
    return {key: float(value) for key, value in {**made.callback_metrics, **made.logged_metrics}.items()}


CASES = {
    "by the step": {"interval": "step"},
    "by the epoch": {"interval": "epoch", "monitor": "loss"},
    "without validation": {"interval": "step", "monitor": "score", "settings": {"limit_val_batches": 0}},
    "validation in between": {"interval": "epoch", "monitor": "mean", "settings": {"val_check_interval": 2}},
    "steps": {"interval": "epoch", "monitor": "own", "settings": {"max_steps": 2 * BATCHES, "max_epochs": -1}},
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_logged_goes_on_wherever_a_run_is_resumed(tmp_path, case):
    """Batches, learning rates, means, torchmetrics and logged rows are those of an uninterrupted run, wherever it was saved."""
    name = PACKAGES[len(case) % 2]
    pl, asked = package(name), dict(CASES[case])
    settings = {"settings": {"max_epochs": 2, **asked.pop("settings", {})}}
    saves = saves_at(pl, tmp_path, "on_train_batch_end", "on_validation_end")
    straight, whole, _ = run(
        tmp_path / "straight", name, callbacks=[saves], seed=1, module=module_of(pl, **asked), **settings
    )
    assert len({rate for _, _, rate, _ in straight.seen}) > 1
    for path, batches, epochs, rows in saves.saved:
        if whole.max_steps == batches:
            continue  # Lightning ends such a run at once
        module, made, _ = run(tmp_path / path.stem, name, path=path, module=module_of(pl, **asked), **settings)
        assert module.seen == straight.seen[batches:], path
        assert fingerprint(module) == fingerprint(straight), path
        assert module.ends == straight.ends[epochs:], path
        assert made.logger.rows in (whole.logger.rows[rows:], whole.logger.rows[rows + 1 :]), path
        assert shown(made) == shown(whole), path


def test_a_metric_of_training_and_validation_goes_on_in_the_epoch_around_a_validation(tmp_path):
    """One torchmetrics object for both, which a validation resets: what training gave it after that is not lost."""
    pl, settings = package(PACKAGES[1]), {"settings": {"max_epochs": 2, "val_check_interval": BATCHES - 1}}

    def sharing():
        module = module_of(pl)
        module.of_validation = module.score
        return module

    saves = saves_at(pl, tmp_path, "on_train_batch_end")
    straight, _, _ = run(tmp_path / "x", PACKAGES[1], callbacks=[saves], seed=1, module=sharing(), **settings)
    for path, _, epochs, _ in saves.saved[BATCHES - 1 :: BATCHES]:
        module, _, _ = run(tmp_path / path.stem, PACKAGES[1], path=path, module=sharing(), **settings)
        assert module.ends == straight.ends[epochs:], path


@pytest.mark.parametrize("place", [1, BATCHES - 1, BATCHES + 2])
@pytest.mark.quick
def test_a_metric_that_is_logged_early_in_an_epoch_has_nothing_of_the_one_before(tmp_path, place):
    """Resumed behind its last value of an epoch: that epoch has it, and the next one's mean is of the next one alone."""
    pl = package(PACKAGES[0])

    def early(module, loss):
        if len(module.seen) and module.seen[-1][1] < 1:
            module.log("mean", loss, on_step=False, on_epoch=True)
            module.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
            module.score(loss.detach())
            module.log("score", module.score, on_step=False, on_epoch=True)

    saves = saves_at(pl, tmp_path, "on_train_batch_end")
    straight, _, _ = run(tmp_path / "x", PACKAGES[0], callbacks=[saves], seed=1, module=module_of(pl, log=early))
    path, _, epochs, _ = saves.saved[place - 1]
    module, _, _ = run(tmp_path / "y", PACKAGES[0], path=path, module=module_of(pl, log=early))
    assert module.ends == straight.ends[epochs:]
    assert {"mean", "sum", "score"} <= straight.ends[0].keys()


@pytest.mark.parametrize("place", range(2 * BATCHES - 2, 2 * BATCHES + 1))
def test_the_best_score_and_the_end_are_those_of_an_uninterrupted_run(tmp_path, place):
    """``monitor=`` and EarlyStopping on a training metric, with default arguments, also after the last batch of an epoch."""
    pl = package(PACKAGES[0])

    def go(folder, *callbacks, **more):
        stopping = pl.callbacks.EarlyStopping("mean", patience=1, mode="max")
        saving = {"monitor": "loss", "save_top_k": 1}
        module, made, best = run(folder, PACKAGES[0], callbacks=[stopping, *callbacks], **saving, **more)
        return float(best.best_model_score), stopping.state_dict(), made.current_epoch, fingerprint(module)

    saves = saves_at(pl, tmp_path, "on_train_batch_end")
    expected = go(tmp_path / "straight", saves, seed=1)
    assert go(tmp_path / "resumed", path=saves.saved[place - 1][0]) == expected


@pytest.mark.parametrize("metric", ["loss", "own"])
def test_a_scheduler_steps_at_the_end_of_an_epoch_at_which_a_run_was_saved(tmp_path, metric):
    """ReduceLROnPlateau steps after the save at the end of an epoch: a resume from there makes up for it, once."""
    pl = package(PACKAGES[1])

    def go(folder, **more):
        module = module_of(pl, interval="epoch", monitor=metric)
        module, _, best = run(
            folder, PACKAGES[1], module=module, monitor=metric, save_top_k=-1, filename="{step}", **more
        )
        return module.seen, module.ends, fingerprint(module)

    seen, ends, weights = go(tmp_path, seed=1)
    for epoch in (1, 2):
        found = go(tmp_path / str(epoch), path=tmp_path / f"step={epoch * BATCHES}.ckpt")
        assert found == (seen[epoch * BATCHES :], ends[epoch:], weights)


def test_an_epoch_that_was_broken_off_goes_on_with_what_it_had_logged(tmp_path):
    """Saved when the hooks of the broken epoch's end had reset all: the means are those of the whole epoch nonetheless."""
    straight, _, _ = run(tmp_path / "straight", PACKAGES[0], seed=1)
    run(
        tmp_path,
        PACKAGES[0],
        seed=1,
        settings={"max_steps": BATCHES + 2, "max_epochs": -1},
        save_last=True,
        save_top_k=1,
    )
    module, _, _ = run(tmp_path / "on", PACKAGES[0], path=tmp_path / "last.ckpt")
    assert module.seen == straight.seen[BATCHES + 2 :]
    assert module.ends == straight.ends[1:]


RAISES = ("training_step", "on_before_optimizer_step", "on_train_batch_end")


@pytest.mark.parametrize("hook", RAISES)
@pytest.mark.quick
def test_what_a_batch_logged_that_an_exception_interrupted_counts_once(tmp_path, hook):
    """Wherever in its batch the exception comes: means, sums and the states of torchmetrics, logged or not, are those of a run
    without it. Before the step of the optimizer the batch is trained again, behind it not.
    """
    pl, settings = package(PACKAGES[0]), {"max_epochs": 2}

    def raising(at=None):
        pl.seed_everything(1, verbose=False)
        module = module_of(pl)
        made = getattr(module, hook)

        def raise_behind(*args):
            found = made(*args)
            if len(module.seen) == at:
                raise Stop
            return found

        setattr(module, hook, raise_behind)
        return module

    straight, whole, _ = run(tmp_path / "whole", PACKAGES[0], seed=1, settings=settings, module=raising())
    stopped = raising(BATCHES + 2)
    with contextlib.suppress(Stop):
        run(
            tmp_path, PACKAGES[0], seed=1, settings=settings, module=stopped, save_on_exception=True, filename="stopped"
        )
    module, made, _ = run(tmp_path / "on", PACKAGES[0], path=tmp_path / "stopped.ckpt", settings=settings)
    again = hook != "on_train_batch_end"
    assert module.seen == straight.seen[len(stopped.seen) - again :]
    assert module.ends == straight.ends[1:]
    assert shown(made) == shown(whole)


@pytest.mark.parametrize("interval", [pytest.param("step", marks=pytest.mark.quick), "epoch"])
def test_a_checkpoint_without_them_is_resumed_with_a_warning(tmp_path, caplog, interval):
    """Stock Lightning's, after the last batch: what asks for the metric passes over it, until the next epoch begins."""
    pl = package(PACKAGES[0])
    stock = pl.callbacks.ModelCheckpoint
    run(tmp_path, PACKAGES[0], stock, every_n_train_steps=BATCHES, save_top_k=-1, filename="{step}", seed=1)
    stopping = pl.callbacks.EarlyStopping("mean", patience=9)
    module = module_of(pl, interval=interval)
    path, callbacks = tmp_path / f"step={BATCHES}.ckpt", [stopping, stock(tmp_path / "theirs", monitor="mean")]
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        again = {"path": path, "callbacks": callbacks, "monitor": "loss", "save_top_k": 1}
        module, made, best = run(tmp_path / "on", PACKAGES[0], module=module, **again)
    assert caplog.text.count("does not have what was logged in it") == 1
    assert len(module.seen) == 2 * BATCHES
    assert best.best_model_path
    assert stopping.strict
    assert all(config.strict for config in made.lr_scheduler_configs)


@pytest.mark.parametrize(("place", "within"), [(BATCHES + 2, 1), (BATCHES, 0)])
@pytest.mark.quick
def test_a_resume_by_another_number_of_ranks_says_what_differs(tmp_path, caplog, place, within):
    """The order of the data and the random numbers, once; within an epoch also that its means are those of the rest of it."""
    pl = package(PACKAGES[0])
    when = {"every_n_train_steps": place} if within else {"save_on_train_epoch_end": True}
    run(tmp_path, PACKAGES[0], seed=1, save_top_k=-1, filename="{step}", settings={"max_steps": place}, **when)
    saved = torch.load(tmp_path / f"step={place}.ckpt", weights_only=True)
    saved["safe_ckpt"]["ranks"] *= 2
    torch.save(saved, tmp_path / "of two.ckpt")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        more = {"path": tmp_path / "of two.ckpt", "module": module_of(pl), "settings": {"max_steps": place + 1}}
        run(tmp_path / "on", PACKAGES[0], **more)
    assert caplog.text.count("was saved by 2 ranks and is resumed by 1: the order of the data and the random") == 1
    assert caplog.text.count("another number of ranks saved it. The means of this epoch") == within


def test_a_metric_that_is_logged_otherwise_after_the_resume_is_no_error(tmp_path):
    """Another reduction, a torchmetrics object or another bar in the code that resumes: nothing is mixed, nothing raises."""
    pl = package(PACKAGES[0])

    def first(module, loss):
        module.log("loss", loss, on_step=True, on_epoch=True)
        module.log("mean", loss, on_step=False, on_epoch=True)
        module.score(loss.detach())
        module.log("score", module.score, on_step=False, on_epoch=True)

    def second(module, loss):
        module.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        module.log("mean", loss, on_step=False, on_epoch=True, reduce_fx="max")
        module.log("score", loss, on_step=False, on_epoch=True)

    saves = saves_at(pl, tmp_path, "on_train_batch_end")
    straight, _, _ = run(tmp_path / "x", PACKAGES[0], callbacks=[saves], seed=1, module=module_of(pl, log=first))
    again = {"path": saves.saved[BATCHES - 2][0], "module": module_of(pl, log=second)}
    module, _, _ = run(tmp_path / "y", PACKAGES[0], **again)
    assert module.ends[0]["loss_epoch"] == straight.ends[0]["loss_epoch"]
    assert module.ends[0]["mean"] == module.ends[0]["score"]  # of the one batch that was left


@pytest.mark.quick
def test_what_is_too_large_to_go_with_every_save_is_left_out_with_a_warning(tmp_path, caplog):
    """Metrics that collect what they get: no save fails for them, and the resume names those that were too large together."""
    pl = package(PACKAGES[0])

    def collecting():
        module = module_of(pl)
        module.all, module.more = CatMetric(), CatMetric()
        module.on_train_batch_start = lambda *_: [one.update(torch.zeros(3 << 18)) for one in (module.all, module.more)]
        return module

    saves = saves_at(pl, tmp_path, "on_train_batch_end")
    run(tmp_path / "x", PACKAGES[0], callbacks=[saves], module=collecting(), settings={"max_epochs": 1})
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        for path, _, _, _ in saves.saved[:2]:
            run(tmp_path / path.stem, PACKAGES[0], path=path, module=collecting(), settings={"max_epochs": 1})
    # Each fits alone at first, and both together do not; later neither does.
    assert re.findall(r"epoch: (.*), no plain data or too large, was not saved", caplog.text) == ["more", "all, more"]
    assert saves.saved[1][0].stat().st_size < 1 << 20


def test_what_a_module_does_after_a_batch_belongs_to_the_save_at_that_batch(tmp_path):
    """An average that ``on_train_batch_end`` keeps of the weights, as latent diffusion does: no update of it is left out."""
    pl = package(PACKAGES[1])

    def averaging():
        module = module_of(pl)
        module.register_buffer("average", torch.zeros(1, 2))
        module.on_train_batch_end = lambda *_: module.average.lerp_(module.net.weight.detach(), 0.1)
        return module

    def go(folder, **more):
        saving = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", "save_last": True}
        module, made, saves = run(folder, PACKAGES[1], module=averaging(), settings={"max_epochs": 2}, **saving, **more)
        return fingerprint(module), sorted(path.name for path in folder.glob("*.ckpt")), saves.last_model_path[-9:]

    expected = go(tmp_path, seed=1)
    for step in (1, BATCHES, BATCHES + 2):
        assert go(tmp_path / str(step), path=tmp_path / f"step={step}.ckpt")[::2] == expected[::2]
    assert expected[1] == ["last.ckpt", *(f"step={step}.ckpt" for step in range(1, 2 * BATCHES + 1))]


def test_a_save_before_the_modules_hook_at_an_epochs_end_hands_no_metric_on_to_the_next_epoch(tmp_path):
    """A callback saves, and the module resets its metrics only then: a resume begins the next epoch, without that hook."""
    pl = package(PACKAGES[0])
    saves = saves_at(pl, tmp_path, "on_train_epoch_end")
    straight, _, _ = run(tmp_path / "x", PACKAGES[0], callbacks=[saves], seed=1)
    module, _, _ = run(tmp_path / "y", PACKAGES[0], path=saves.saved[0][0])
    assert [end["own"] for end in module.ends] == [end["own"] for end in straight.ends[1:]]
