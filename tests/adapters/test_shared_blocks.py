"""btrfs and XFS: files whose layout is another tool's share the blocks of what did not change, and each is complete."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from lightning_runs import PACKAGES, package

from accelerate_runs import CONFIG as USUAL
from accelerate_runs import fresh, make
from safe_ckpt import CheckpointConfig, Checkpointer, Unchanged, WriterConfig, events
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.lightning import SafeCheckpointCallback

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]
SIZE = 1500  # 8.6 MiB
WHOLE = 4 * SIZE * SIZE
PROCESS, THREAD = WriterConfig(inline_bytes=0), WriterConfig(inline_bytes=1 << 40)


@pytest.fixture(params=["xfs", "btrfs"])
def disk(request, tmp_path):
    """A file system in a file."""
    make = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}[request.param]
    if shutil.which(make[0]) is None or os.getuid():
        pytest.skip(f"needs root and {make[0]}")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([*make, image], check=True, capture_output=True, timeout=60)
    done = subprocess.run(
        ["mount", "-o", "loop", image, folder], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip(f"no image can be mounted here: {done.stderr}")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=60)


class Heard:
    """How much was written, save by save."""

    def __init__(self):
        self.written = []

    def __call__(self, event):
        if isinstance(event, events.Written):
            self.written.append(event.size_bytes)


def module(pl):
    class Tuned(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
            self.head = torch.nn.Linear(SIZE, 4)

        def training_step(self, batch, batch_idx):
            return self.head(self.base(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.head.parameters())

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(16, SIZE), batch_size=2)

    return Tuned()


@pytest.mark.parametrize("writer", [PROCESS, THREAD], ids=["process", "thread"])
def test_lightnings_files_share_what_is_frozen(disk, writer):
    """One ``.ckpt`` each, readable by torch, whole in every byte; from the second on little is written."""
    pl, heard = package(PACKAGES[0]), Heard()
    callback = SafeCheckpointCallback(
        disk / "run", every_n_train_steps=1, save_top_k=-1, config=CheckpointConfig(writer=writer), hooks=[heard]
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    made = module(pl)
    pl.Trainer(callbacks=[callback], max_steps=5, default_root_dir=disk, **quiet).fit(made)
    assert heard.written[0] > WHOLE
    assert max(heard.written[1:]) < 2 << 20
    paths = sorted((disk / "run").glob("*.ckpt"))
    assert len(paths) == 5
    for path in paths:
        verify(path, read_manifest(path))
        assert torch.equal(torch.load(path, weights_only=False)["state_dict"]["base.weight"], made.base.weight)
    paths[-1].unlink()
    verify(paths[0], read_manifest(paths[0]))


def test_accelerates_files_share_what_is_frozen(disk):
    """``model.safetensors`` has all weights, as Accelerate reads it."""
    heard = Heard()
    with fresh():
        accelerator = make(disk)
        with register(accelerator, USUAL, hooks=[heard]):
            model = torch.nn.Sequential(
                torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False), torch.nn.Linear(SIZE, 4)
            )
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[1].parameters(), lr=1e-3))
            for _ in range(4):
                accelerator.backward(model(torch.randn(2, SIZE)).square().mean())
                optimizer.step()
                accelerator.save_state()
    assert heard.written[0] > WHOLE
    assert max(heard.written[1:]) < 2 << 20
    for path in sorted((disk / "checkpoints").iterdir()):
        verify(path, read_manifest(path))


def _save(folder, state, count, change=lambda number: None, **more):
    heard = Heard()
    with Checkpointer(folder, CheckpointConfig(**more), hooks=[heard]) as ckpt:
        for number in range(1, count + 1):
            change(number)
            ckpt.save(number, state).result()
    return heard.written


def test_a_changed_piece_of_a_shared_file_is_written(disk):
    """In a file of which everything else stays: what is read back is what was there, at each save."""
    state, seen = {"t": {"odd": {1}, "w": torch.zeros(SIZE, SIZE)}}, []
    state["t"]["odd"] = [None, (1,)]  # no safetensors file

    def change(number):
        state["t"]["w"][number * 100, 7] = number
        seen.append(state["t"]["w"].clone())

    written = _save(disk / "run", state, 4, change)
    assert max(written[1:]) < 2 << 20
    for number, expected in enumerate(seen, 1):
        found = {"t": None}
        with Checkpointer(disk / "run", CheckpointConfig()) as ckpt:
            ckpt.resume(found, step=number)
        assert torch.equal(found["t"]["w"], expected)


def test_an_old_file_that_was_touched_is_not_shared(disk):
    """Somebody wrote to it: the new one is written as a whole."""
    state = {"t": {"odd": [None, (1,)], "w": torch.zeros(SIZE, SIZE)}}

    def touch(number):
        path = disk / "run" / f"step-{number - 1:08d}" / "t.pt"
        if number == 3:
            with path.open("r+b") as file:
                file.seek(5 << 20)
                file.write(b"x")

    written = _save(disk / "run", state, 4, touch)
    assert [size > WHOLE for size in written] == [True, False, True, False]
    path = disk / "run/step-00000004"
    verify(path, read_manifest(path))


def test_an_old_file_edited_with_its_mtime_set_back_is_not_shared(disk):
    """By the ctime, which nobody can set."""
    state = {"t": {"odd": [None, (1,)], "w": torch.zeros(SIZE, SIZE)}}

    def edit(number):
        if number == 3:
            path = disk / "run/step-00000002/t.pt"
            status = path.stat()
            with path.open("r+b") as file:
                file.seek(5 << 20)
                file.write(b"x")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    written = _save(disk / "run", state, 4, edit)
    assert [size > WHOLE for size in written] == [True, False, True, False]
    for number in (3, 4):
        path = disk / f"run/step-{number:08d}"
        verify(path, read_manifest(path))


def test_small_files_are_not_remembered_for_sharing(disk):
    """Only large ones are remembered."""
    state = {f"s{number}": {"a": number} for number in range(100)}
    state["t"] = {"odd": [None, (1,)], "w": torch.zeros(SIZE, SIZE)}
    assert max(_save(disk / "run", state, 3)[1:]) < 2 << 20


@pytest.mark.parametrize(
    ("settings", "whole"),
    [({"share": False}, [0, 1, 2, 3, 4, 5]), ({"full_every": 3}, [0, 3])],
    ids=["off", "every"],
)
def test_blocks_are_written_anew_where_the_settings_say_so(disk, settings, whole):
    """By the settings, as for files that are shared as a whole."""
    state = {"t": {"odd": [None, (1,)], "w": torch.zeros(SIZE, SIZE)}}
    written = _save(disk / "run", state, 6, unchanged=Unchanged(**settings))
    assert [number for number, size in enumerate(written) if size > WHOLE] == whole
    assert Path(disk / "run").exists()
