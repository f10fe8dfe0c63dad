"""A place that was saved is the place where training goes on, whatever came between the two, or an error says why not."""

import contextlib

import pytest
import torch
from lightning_runs import package, trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
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
