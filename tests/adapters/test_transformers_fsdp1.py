"""A Trainer whose model FSDP 1 shards, on two gloo ranks; see ``fsdp1_runs``."""

import hashlib
import os

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from fsdp1_runs import everything
from transformers import Trainer
from transformers_runs import Die, SafeTrainer, names, trainer

from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

pytestmark = pytest.mark.timeout(240)


class OnCpus:
    def create_accelerator_and_postprocess(self):
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
        super().create_accelerator_and_postprocess()
        self.accelerator.state.device = torch.device("cpu")


class Stock(OnCpus, Trainer):
    pass


class Safe(OnCpus, SafeTrainer):
    pass


def made(rank, folder, kind=Safe, **more):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    config = {
        "version": 1,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "use_orig_params": True,
        "sync_module_states": False,  # it takes an accelerator
        "cpu_ram_efficient_loading": False,
    }
    return trainer(folder, kind, fsdp=True, fsdp_config=config, **more)


def state_of(run):
    """A digest of what this rank has of weights, optimizer and generator."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    tensors = [*run.model_wrapped.parameters()]
    for group in run.optimizer.optimizer.param_groups:
        for one in group["params"]:
            tensors += [value for _, value in sorted(run.optimizer.optimizer.state.get(one, {}).items())]
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def _train_and_die(rank, folder):
    stock = made(rank, folder / "stock", Stock)
    stock.train()
    (folder / f"want{rank}").write_text(state_of(stock))
    made(rank, folder / "ours", save_steps=1, save_total_limit=3, callbacks=[Die()]).train()


def _go_on(rank, folder):
    resumed = made(rank, folder / "ours", save_steps=1, save_total_limit=3)
    resumed.train(resume_from_checkpoint=True)
    found = [state_of(resumed)]
    whole = everything(resumed.model_wrapped, resumed.optimizer.optimizer)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    of_stock = made(rank, folder / "stock", save_strategy="no")
    of_stock.train(resume_from_checkpoint=str(folder / "stock/checkpoint-4"))
    found.append(state_of(of_stock))
    by_stock = made(rank, folder / "ours", Stock, save_strategy="no")
    by_stock.train(resume_from_checkpoint=str(folder / "ours/checkpoint-6"))  # where nothing is left to train
    wanted = (folder / f"want{rank}").read_text()
    weights = [[one.detach() for one in run.model_wrapped.parameters()] for run in (resumed, by_stock)]
    return found == [wanted] * 2, all(map(torch.equal, *weights))


def _goes_on_on_three(rank, folder):
    run = made(rank, folder / "ours", save_strategy="no")
    run.train(resume_from_checkpoint=str(folder / "ours/checkpoint-6"))  # where nothing is left to train
    found, wanted = everything(run.model_wrapped, run.optimizer.optimizer), torch.load(folder / "whole.pt")
    assert found.keys() == wanted.keys()
    assert len(found) > 20
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_trainer_with_fsdp1_goes_on_bit_for_bit(tmp_path):
    """Killed, it goes on bit for bit, from its own checkpoints and from stock's; the same files; stock reads the weights.

    Three ranks get the weights and the moments.
    """
    dead = spawn_ranks(_train_and_die, 2, tmp_path, init=False, timeout_s=90)
    assert [outcome.exit_code for outcome in dead] == [-9, -9]
    assert values(spawn_ranks(_go_on, 2, tmp_path, init=False, timeout_s=120)) == [(True, True)] * 2
    values(spawn_ranks(_goes_on_on_three, 3, tmp_path, init=False, timeout_s=90))
    assert names(tmp_path / "ours") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    ours = tmp_path / "ours/checkpoint-6"
    besides = {"manifest.json", "train_loader_0.pth", "train_loader_1.pth"}
    assert files(ours) == files(tmp_path / "stock/checkpoint-6") | besides
    verify_files(ours, read_manifest(ours))
