"""What hooks and callbacks do beside training goes on after a resume, or a warning names what does not."""

import contextlib
import logging

import pytest
import torch
from lightning_runs import PACKAGES, QUICK, Stop, fingerprint, package, trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

SAYS = "does not call on_train_epoch_start again"


def module_of(pl, *, norm=False, at_start=None, **hooks):
    class Module(pl.LightningModule):
        """Notes each batch with the learning rate, and how many batches make a step."""

        def __init__(self):
            super().__init__()
            layers = [torch.nn.BatchNorm1d(3)] if norm else []
            self.net = torch.nn.Sequential(torch.nn.Linear(1, 3), *layers, torch.nn.Linear(3, 1))
            self.seen, self.started = [], []

        def training_step(self, batch, batch_idx):
            rate, count = self.optimizers().param_groups[0]["lr"], self.trainer.accumulate_grad_batches
            self.seen.append(
                (self.current_epoch, batch_idx, self.global_step, batch[0].flatten().tolist(), rate, count)
            )
            return self.net(batch[0]).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        def train_dataloader(self):
            data = TensorDataset(torch.arange(8.0).reshape(-1, 1) / 10)
            return resumable(DataLoader(data, batch_size=2, shuffle=True))

        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=2)

    for name, hook in (({"on_train_epoch_start": at_start} if at_start else {}) | hooks).items():
        setattr(Module, name, hook)
    torch.manual_seed(0)  # of the weights
    return Module()


def save_each(pl, folder, hook):
    class SaveEach(pl.Callback):
        """Saves at each call of a hook at which no gradients wait for a step."""

        def __init__(self):
            self.saved = []

    def save(self, trainer, pl_module, *_):
        if not trainer.fit_loop._should_accumulate() or trainer.fit_loop._skip_backward:
            path = folder / f"{hook}{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((path, len(pl_module.seen)))

    setattr(SaveEach, hook, save)
    return SaveEach()


def fit(pl, folder, module, *callbacks, seed=1, path=None, **settings):
    pl.seed_everything(seed, verbose=False)
    saving = SafeCheckpointCallback(dirpath=folder / "own", save_top_k=0, config=QUICK)
    made = trainer(pl, [*callbacks, saving], folder, **settings)
    made.fit(module, ckpt_path=path)
    return module.seen, fingerprint(module), made.optimizers[0].param_groups[0]["lr"], made.global_step


def accumulate_from_the_second_epoch_on(module):
    if module.current_epoch == 1:
        module.trainer.accumulate_grad_batches = 2


CASES = {
    "accumulation": (lambda pl: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], {}),
    "a module's": (lambda pl: [], {"at_start": accumulate_from_the_second_epoch_on}),
    "averaging": (lambda pl: [pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2)], {}),
    "with batch norm": (lambda pl: [pl.callbacks.StochasticWeightAveraging(0.01, 2, 2, "linear")], {"norm": True}),
}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
def test_what_the_start_of_an_epoch_has_set_goes_on_in_a_resumed_one(tmp_path, case, hook):
    """Accumulation and averaging: batches, steps, learning rates and weights are those of a run without a stop."""
    pl = package(PACKAGES[len(case) % 2])
    callbacks, of_module = CASES[case]
    saves = save_each(pl, tmp_path, hook)
    module = module_of(pl, **of_module)
    seen, *ends = fit(pl, tmp_path, module, *callbacks(pl), saves, max_epochs=4)
    for path, already in saves.saved[-2::-2]:
        again, *found = fit(pl, tmp_path, module_of(pl, **of_module), *callbacks(pl), seed=7, path=path, max_epochs=4)
        assert (again, found) == (seen[already:], ends), path


@pytest.mark.parametrize("validates", [pytest.param(False, marks=pytest.mark.quick), True])
def test_a_step_of_averaging_whose_gradients_no_checkpoint_has_is_named(tmp_path, caplog, validates):
    """Where a resume comes behind the step that made them, and no validation clears them; from before it all is equal."""
    pl = package(PACKAGES[0])
    settings = {"max_epochs": 4, "limit_val_batches": int(validates)}

    def run(*callbacks, **more):
        caplog.clear()
        averaging = pl.callbacks.StochasticWeightAveraging(0.01, 2, 2, "linear")
        _, *ends = fit(pl, tmp_path, module_of(pl, norm=True), averaging, *callbacks, **more, **settings)
        return ends, "They are in no checkpoint" in caplog.text

    saves = save_each(pl, tmp_path, "on_train_batch_end")
    whole, _ = run(saves)
    for path, already in saves.saved[11:17]:
        ends, named = run(seed=7, path=path)
        assert named == (already >= 16 and not validates), path
        assert (ends == whole) != named, path


def test_what_the_trainer_is_told_anew_is_not_put_back(tmp_path):
    """Nothing had set another number of batches for a step: a resume has that of its Trainer, as in stock Lightning."""
    pl = package(PACKAGES[0])
    saves = save_each(pl, tmp_path, "on_train_batch_end")
    fit(pl, tmp_path, module_of(pl), saves, max_epochs=1, accumulate_grad_batches=2)
    seen, *_ = fit(pl, tmp_path, module_of(pl), path=saves.saved[0][0], max_epochs=2)
    assert [event[-1] for event in seen] == [1] * 6


@pytest.mark.quick
def test_a_hook_that_a_resume_leaves_out_is_named_once_and_called_once(tmp_path, caplog):
    """Of a module or a callback that is not Lightning's, within an epoch alone; no epoch has its hook called a second time."""
    pl = package(PACKAGES[0])
    started = []

    class Annealing(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            started.append(("callback", trainer.current_epoch))

    def anneal(module):
        started.append(("module", module.current_epoch))

    def callbacks():
        saying = pl.callbacks.LambdaCallback(on_train_epoch_start=lambda *_: None)
        return [pl.callbacks.GradientAccumulationScheduler({0: 1}), Annealing(), saying]

    def said():
        return [one.getMessage() for one in caplog.records if SAYS in one.getMessage()]

    within, between = (save_each(pl, tmp_path, hook) for hook in ("on_train_batch_end", "on_train_epoch_end"))
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        fit(pl, tmp_path, module_of(pl, at_start=anneal), *callbacks(), within, between, max_epochs=2)
        assert len(started) == 4
        fit(pl, tmp_path, module_of(pl, at_start=anneal), *callbacks(), path=between.saved[0][0], max_epochs=2)
        assert said() == []
        started.clear()
        fit(pl, tmp_path, module_of(pl, at_start=anneal), *callbacks(), path=within.saved[1][0], max_epochs=2)
    assert started == [("callback", 1), ("module", 1)]
    assert len(said()) == 1
    assert "Annealing, LambdaCallback, Module" in said()[0]
    caplog.clear()
    plain = [pl.callbacks.GradientAccumulationScheduler({0: 1})]
    fit(pl, tmp_path, module_of(pl), *plain, path=within.saved[1][0], max_epochs=2)
    assert said() == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # an epoch ends right after the resume
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_train_epoch_end"]
)
def test_an_epoch_that_a_hook_has_ended_costs_later_resumes_nothing(tmp_path, hook):
    """``on_train_batch_start`` returned -1: from each later save on, batches, rates and weights are those of the whole run."""
    pl = package(PACKAGES[0])

    def end_some(module, batch, batch_idx):
        return -1 if batch_idx == 2 and module.current_epoch != 2 else None

    module, saves = module_of(pl, on_train_batch_start=end_some), save_each(pl, tmp_path, hook)
    seen, *ends = fit(pl, tmp_path, module, saves, max_epochs=4)
    assert [event[1] for event in seen] == [0, 1, 0, 1, 0, 1, 2, 3, 0, 1]
    for path, already in saves.saved[1:-1]:
        again, *found = fit(pl, tmp_path, module_of(pl, on_train_batch_start=end_some), seed=7, path=path, max_epochs=4)
        assert (again, found) == (seen[already:], ends), path


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_that_is_none_costs_later_resumes_nothing(tmp_path):
    """Lightning starts none, and counts it as processed: what was trained on before a save is not trained on again."""
    pl = package(PACKAGES[0])

    def load(module):
        def collate(items):
            return None if items[0][0] == 2 else torch.utils.data.default_collate(items)

        return resumable(DataLoader(TensorDataset(torch.arange(8.0).reshape(-1, 1)), batch_size=2, collate_fn=collate))

    saves = save_each(pl, tmp_path, "on_validation_end")
    seen, *ends = fit(pl, tmp_path, module_of(pl, train_dataloader=load), saves, max_epochs=2, val_check_interval=2)
    assert [event[1] for event in seen] == [0, 2, 3] * 2
    for path, already in saves.saved[:-1]:
        module = module_of(pl, train_dataloader=load)
        again, *found = fit(pl, tmp_path, module, seed=7, path=path, max_epochs=2, val_check_interval=2)
        assert (again, found) == (seen[already:], ends), path


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("way", ["exception", "on_validation_batch_end"])
@pytest.mark.quick
def test_a_save_within_an_averaged_validation_has_the_trained_weights(tmp_path, way):
    """WeightAveraging swaps its weights in there: they are saved under their own names, at an exception and by a callback."""
    pl = package(PACKAGES[0])
    if not hasattr(pl.callbacks, "EMAWeightAveraging"):
        pytest.skip("this release has no WeightAveraging")
    stops = []

    def validate(module, batch, batch_idx):
        if module.global_step in stops:
            raise Stop

    def run(*callbacks, **more):
        averaging = pl.callbacks.EMAWeightAveraging(decay=0.5)
        return fit(pl, tmp_path, module_of(pl, validation_step=validate), averaging, *callbacks, max_epochs=3, **more)

    saves = save_each(pl, tmp_path, "on_validation_batch_end")
    seen, *ends = run(saves)
    path = saves.saved[1][0]
    if way == "exception":
        stops.append(8)
        at_exception = SafeCheckpointCallback(
            tmp_path / "stop", "stop", save_on_exception=True, every_n_train_steps=99, config=QUICK
        )
        with contextlib.suppress(Stop):
            run(at_exception)
        stops.clear()
        path = tmp_path / "stop" / "stop.ckpt"
    again, *found = run(seed=7, path=path)
    assert (again, found) == (seen[8:], ends)


class Stream(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            yield (torch.full((1,), self.at / 10),)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
def test_a_callback_that_looks_at_a_batch_takes_no_place(tmp_path, hook, workers):
    """``next(iter(trainer.train_dataloader))`` begins an epoch of its own: the place is that of the iterator that trains."""
    pl = package(PACKAGES[workers])
    looked = []

    def look(trainer, *_):
        if hook == "on_train_start" or trainer.global_step % 3 == 0:
            looked.append(next(iter(trainer.train_dataloader))[0].flatten().tolist())

    def load(module):
        data = TensorDataset(torch.arange(8.0).reshape(-1, 1) / 10)
        return resumable(DataLoader(data, batch_size=2, shuffle=True, num_workers=workers))

    def run(*callbacks, **more):
        looking = pl.callbacks.LambdaCallback(**{hook: look})
        return fit(pl, tmp_path, module_of(pl, train_dataloader=load), looking, *callbacks, max_epochs=2, **more)

    saves = save_each(pl, tmp_path, "on_train_batch_end")
    seen, *ends = run(saves)
    assert all(len(batch) == 2 for batch in looked)
    assert looked
    for path, already in saves.saved[: -1 : 2 if workers == 0 else 3]:
        again, *found = run(seed=7, path=path)
        assert (again, found) == (seen[already:], ends), path


@pytest.mark.quick
def test_a_look_at_a_stream_that_is_read_in_this_process_is_warned_of(tmp_path, caplog):
    """It takes samples away from training, resumed or not, with torch's loader, too: a warning names the loader."""
    pl = package(PACKAGES[0])
    looking = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, _: next(iter(trainer.train_dataloader)))
    module = module_of(pl, train_dataloader=lambda _: resumable(DataLoader(Stream(), batch_size=2)))
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        fit(pl, tmp_path, module, looking, max_epochs=1)
    assert "is missing in training" in caplog.text


@pytest.mark.quick
@pytest.mark.parametrize("own", [True, False])
def test_a_save_before_the_modules_own_hook_is_warned_of_once(tmp_path, caplog, own):
    """Lightning calls a callback's ``on_train_batch_end`` first: what the module does there is not in what was saved there."""
    pl = package(PACKAGES[0])
    hooks = {"on_train_batch_end": lambda *_: None} if own else {}
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        fit(pl, tmp_path, module_of(pl, **hooks), save_each(pl, tmp_path, "on_train_batch_end"), max_epochs=1)
    assert caplog.text.count("is still to do for this batch") == own
