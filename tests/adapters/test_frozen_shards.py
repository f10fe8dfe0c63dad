"""Sharded states of the frameworks: what is not trained has files of its own, is written once, and stock readers read it."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning_scripts import run, script
from test_accelerate_fsdp2 import accelerator, equal, train, whole
from test_lightning_fsdp2 import BODY
from test_transformers_fsdp2 import Safe, Stock, made, state_of

from accelerate_runs import CONFIG, seed
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.testing import spawn_ranks, values

WIDTH = 800  # 1.2 MiB a rank


def links(folder, pattern):
    """How many names the files have."""
    return [path.stat().st_nlink for path in sorted(folder.glob(pattern))]


def _accelerate(rank, folder):
    def parts(number):
        seed(number)
        frozen = torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        model = torch.nn.Sequential(*frozen, torch.nn.Linear(WIDTH, 2))
        for one in frozen:
            one.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        prepared = made.prepare(model, optimizer)
        return *prepared, made.prepare(torch.optim.lr_scheduler.StepLR(prepared[1].optimizer, 2, gamma=0.5))

    made = accelerator(rank, folder / "exp")
    first = parts(0)
    with register(made, CONFIG) as handle:
        for step in (1, 2, 3):
            train(made, first, 1)
            path = made.save_state(step=step)
        handle.wait()
        expected = whole(first[0])
    second = parts(7)
    made = accelerator(rank, folder / "exp")
    second = parts(7)
    with register(made, CONFIG):
        made.load_state()
        assert equal(whole(second[0]), expected), "ours"
    made = accelerator(rank, folder / "exp")
    third = parts(8)
    made.load_state(path)  # stock
    assert equal(whole(third[0]), expected), "stock"
    dist.barrier()


def test_accelerate_with_fsdp2(tmp_path):
    """Each rank's frozen part has one name in each of three checkpoints; ``load_state`` reads it, ours and stock's."""
    values(spawn_ranks(_accelerate, 2, tmp_path, init=False, timeout_s=90))
    checkpoints = tmp_path / "exp/checkpoints"
    assert links(checkpoints, "*/pytorch_model_fsdp_0/__*_1.distcp") == [3] * 6
    assert links(checkpoints, "*/*/__*_0.distcp") == [1] * 12
    for folder in checkpoints.iterdir():
        verify(folder, read_manifest(folder))


class Half:
    """A Trainer that trains no attention."""

    def __init__(self, *, model, **more):
        for layer in model.model.layers:
            layer.self_attn.requires_grad_(requires_grad=False)
        super().__init__(model=model, **more)


class SafeHalf(Half, Safe):
    pass


class StockHalf(Half, Stock):
    pass


def _transformers(rank, folder):
    sharded, size = "SHARDED_STATE_DICT", {"hidden": 640}
    first = made(rank, folder, sharded, SafeHalf, save_steps=1, max_steps=3, **size)
    first.train()
    again = made(rank, folder, sharded, SafeHalf, save_strategy="no", max_steps=3, **size)
    again.train(resume_from_checkpoint=True)
    stock = made(rank, folder, sharded, StockHalf, save_strategy="no", max_steps=3, **size)
    stock.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return {state_of(one) for one in (first, again, stock)}


@pytest.mark.timeout(240)
def test_transformers_with_fsdp2(tmp_path):
    """The same for a Trainer that trains no attention."""
    found = values(spawn_ranks(_transformers, 2, tmp_path, init=False, timeout_s=200))
    assert [len(one) for one in found] == [1, 1]
    assert links(tmp_path, "checkpoint-*/pytorch_model_fsdp_0/__*_1.distcp") == [3] * 6


FROZEN = """
    class Wide(Module):
        def __init__(self, **more):
            super().__init__(**more)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 800), torch.nn.Linear(800, 800), torch.nn.Linear(800, 2))
            self.net[1].requires_grad_(False)

    Module = Wide

    if __name__ == "__main__":
        made, module = fit(folder, "sharded", 4)
        os.write(1, f"RANK {made.global_rank} {print_of(module)} {made.global_step}\\n".encode())
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_lightning_with_model_parallel(tmp_path):
    """The same for ``ModelParallelStrategy``, through a resume; ``dcp.load`` reads the directory."""
    file, exp = script(tmp_path, BODY + FROZEN), tmp_path / "exp"
    done = run(file, exp)
    assert done.returncode == 0, done.stderr[-3000:]
    frozen = links(exp, "*.ckpt/__*_1.distcp")
    assert len(frozen) >= 4
    assert set(frozen) == {len(frozen) // 2}
    more = file.read_text().replace('"sharded", 4)', '"sharded", 6)')
    file.write_text(more)
    done = run(file, exp)
    assert done.returncode == 0, done.stderr[-3000:]
    last = exp / "last.ckpt"
    verify(last, read_manifest(last))
    assert os.stat(last / "__0_1.distcp").st_nlink > 1, "sharing goes on after the resume"
    read = {"state_dict": {"net.1.weight": torch.zeros(WIDTH, WIDTH)}}
    dcp.load(read, checkpoint_id=last, no_dist=True)
    assert read["state_dict"]["net.1.weight"].abs().sum() > 0
