"""A place that was saved is the place where training goes on, whatever came between the two, or an error says why not."""

import contextlib

import pytest
import torch
from lightning_runs import package, trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from safe_ckpt import data
from safe_ckpt.errors import RestoreError
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
SIZE = 22


class Rows(Dataset):
    """Numbers, and a bad one as long as a file is there."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index == 13 and self.bad is not None and self.bad.exists():
            raise OSError("bad")
        return torch.tensor([float(index), torch.rand(()).item()])


class Stream(IterableDataset):
    """The same, without a length."""

    def __init__(self, bad=None):
        self.rows, self.at = Rows(bad), 0

    def __iter__(self):
        while self.at < SIZE:
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def fit(folder, loader, *, callback=None, seed=1, before=lambda module: None, **settings):
    """What was trained on."""
    pl = package("lightning.pytorch")
    pl.seed_everything(seed, verbose=False)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = torch.nn.Linear(2, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch[:, 0].int().tolist())
            return self.net(batch).mean()

        def configure_optimizers(self):
            before(self)
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    callback = callback or SafeCheckpointCallback(
        dirpath=folder, filename="{epoch}-{step}", resume="auto", save_on_exception=True
    )
    path = settings.pop("ckpt_path", None)
    made = trainer(pl, [callback], folder, **{"limit_val_batches": 0, "max_epochs": 1, **settings})
    with contextlib.suppress(OSError):
        made.fit(module, loader, ckpt_path=path)
    return module.seen


@pytest.mark.parametrize(("kind", "workers"), [(Rows, 0), (Rows, 2), (Stream, 0), (Stream, 1)])
def test_a_batch_that_could_not_be_made_is_trained_on_after_the_resume(tmp_path, kind, workers):
    """Saved at that exception: nothing is left out, nothing comes twice, also where Lightning had taken a batch ahead."""
    (tmp_path / "bad").touch()
    loader = resumable(DataLoader(kind(tmp_path / "bad"), batch_size=4, num_workers=workers))
    before = fit(tmp_path / "x", loader)
    (tmp_path / "bad").unlink()
    after = fit(tmp_path / "x", resumable(DataLoader(kind(), batch_size=4, num_workers=workers)))
    assert before
    assert after
    assert [index for batch in before + after for index in batch] == list(range(SIZE))


def early(module):
    """What OneCycleLR and every warm-up ask for."""
    assert module.trainer.estimated_stepping_batches


class Fresh(IterableDataset):
    """To be read again, from its beginning."""

    def __iter__(self):
        return iter([torch.tensor([float(index), 0.0]) for index in range(SIZE)])


def own():
    return torch.Generator().manual_seed(4)


LOADERS = {
    "in order": lambda: resumable(DataLoader(Rows(), batch_size=5)),
    "shuffle": lambda: resumable(DataLoader(Rows(), batch_size=5, shuffle=True, generator=own(), num_workers=1)),
    "stream": lambda: resumable(DataLoader(Stream(), batch_size=5)),
    "stream that is read again": lambda: resumable(DataLoader(Fresh(), batch_size=5)),
    "of safe_ckpt.data": lambda: data.resumable(DataLoader(Rows(), batch_size=5, shuffle=True, generator=own())),
    "torchdata": lambda: StatefulDataLoader(Rows(), batch_size=5, shuffle=True),
    "not resumable": lambda: DataLoader(Rows(), batch_size=5, shuffle=True, generator=own()),
}


def saving(folder, kind, every):
    kinds = {"ours": SafeCheckpointCallback, "stock": package("lightning.pytorch").callbacks.ModelCheckpoint}
    ends = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    how = ends if every == "epoch" else {"every_n_train_steps": 1}
    return kinds[kind](folder, filename="{step}", save_top_k=-1, **how)


def is_exact(folder, name, places, *, kind="ours", every="step", **more):
    """Every place: what was trained on before it, and after a resume, is what a run without a stop trained on."""
    settings = {"max_epochs": 3, **more}
    whole = fit(folder / "whole", LOADERS[name](), callback=saving(folder / "whole", kind, every), **settings)
    assert len(whole) == 15
    for place in places:
        path = folder / "whole" / f"step={place}.ckpt"
        again = saving(folder / str(place), kind, every)
        after = fit(folder / str(place), LOADERS[name](), callback=again, ckpt_path=path, **settings)
        assert after == whole[place:], (name, place)


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "not resumable"])
def test_loaders_set_up_before_the_state_is_loaded_go_to_its_place(tmp_path, name):
    """``trainer.estimated_stepping_batches`` sets them up. The place is used all the same, within an epoch and at its end."""
    is_exact(tmp_path, name, (3, 5), before=early)


@pytest.mark.parametrize("before", [early, lambda module: None])
@pytest.mark.parametrize("name", ["in order", "shuffle", "stream"])
def test_a_stock_checkpoint_callback_with_resumable_gives_each_batch_once(tmp_path, name, before):
    """With ``safe_ckpt.lightning.resumable`` and nothing else of ours: each batch once in each epoch, at its end too."""
    is_exact(tmp_path, name, (3, 5, 10), kind="stock", before=before)


@pytest.mark.parametrize("name", LOADERS)
def test_the_next_epoch_has_an_order_of_its_own(tmp_path, name):
    """Saved at the end of an epoch: no loader repeats the order of the last, whatever keeps its generator."""
    is_exact(tmp_path, name, (5, 10), every="epoch")


def test_a_place_that_no_loader_took_is_an_error(tmp_path):
    """Never silence: the loader that knew its place is now one that knows none, or one of another kind."""
    fit(tmp_path, LOADERS["in order"](), callback=saving(tmp_path, "ours", "step"))
    with pytest.raises(RuntimeError, match="stateful loaders"):
        fit(tmp_path, DataLoader(Rows(), batch_size=5), ckpt_path=tmp_path / "step=3.ckpt")
    torchdata = saving(tmp_path / "x", "ours", "step")
    fit(tmp_path / "x", LOADERS["torchdata"](), callback=torchdata)
    with pytest.raises(RestoreError, match="not a position"):
        fit(tmp_path / "x", LOADERS["in order"](), ckpt_path=tmp_path / "x" / "step=3.ckpt")
