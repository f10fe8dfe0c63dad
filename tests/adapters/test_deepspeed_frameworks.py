"""DeepSpeed under Accelerate and under Lightning, on two ranks on the CPU: killed, resumed and compared bit for bit.

Neither framework starts DeepSpeed on a CPU. What stands in their way is stepped around here, and nothing else: Accelerate's
processes are told their numbers, and Lightning's strategy is not asked for a GPU. The engines are real.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
import deepspeed_runs as runs
from deepspeed_runs import has_nvme, spawn
from safetensors.torch import load_file

from kit import warm
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import RestoreError, StateError
from support import program_path

pytestmark = pytest.mark.timeout(300)
WITH_NVME = ["nvme"] if has_nvme() else []
OFFLOADS = ["none", *WITH_NVME] if THOROUGH else ["none"]  # test_deepspeed_install.py has NVMe


def accelerated(rank, folder, offload, swap, ranks=2):
    """An Accelerator on a DeepSpeed engine with its handle, the engine, and a loader whose order depends on the epoch alone."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    runs._deepspeed()
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, PartialState
    from accelerate.utils import DummyOptim, ProjectConfiguration, set_seed

    from safe_ckpt.accelerate import register

    zero = {"stage": 3 if offload == "nvme" else 2}
    if offload == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(swap)}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    PartialState()
    PartialState._shared_state.update(num_processes=ranks, process_index=rank, local_process_index=rank)
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(3)
    width = 1024 if offload == "nvme" else 64
    net = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.ReLU(), torch.nn.Linear(width, 16))
    data = torch.utils.data.TensorDataset(torch.randn(96, width), torch.randint(0, 16, (96,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    engine, _, loader = accelerator.prepare(net, DummyOptim(net.parameters()), loader)
    return accelerator, register(accelerator), engine, loader


def epoch(accelerator, engine, loader, number):
    loader.set_epoch(number)
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
        accelerator.backward(loss)


def accelerate_first(rank, folder, offload):
    accelerator, handle, engine, loader = accelerated(rank, folder, offload, Path(folder) / "swap")
    for number in range(3):
        epoch(accelerator, engine, loader, number)
        if number < 2:
            accelerator.save_state(client_state={"epoch": number})
    handle.wait()
    torch.save(runs.weights(engine), Path(folder) / f"want{rank}.pt")
    os.kill(os.getpid(), signal.SIGKILL)


def accelerate_alone(rank, folder, offload):
    """One process, and a checkpoint of two."""
    accelerator, handle, engine, _ = accelerated(rank, folder, offload, Path(folder) / "swap-alone", ranks=1)
    before = runs.weights(engine)
    with pytest.raises(RestoreError, match="2 ranks saved it and 1 are to load it"):
        accelerator.load_state()
    handle.remove()
    return torch.equal(runs.weights(engine), before)


def accelerate_again(rank, folder, offload):
    accelerator, handle, engine, loader = accelerated(rank, folder, offload, Path(folder) / "swap-again")
    accelerator.load_state()
    epoch(accelerator, engine, loader, 2)
    same = torch.equal(runs.weights(engine), torch.load(Path(folder) / f"want{rank}.pt"))
    accelerator.save_state()
    if offload == "nvme":
        with pytest.raises(StateError, match=r"ZeRO-3.*stage3_gather_16bit_weights_on_model_save"):
            accelerator.save_model(engine, Path(folder) / "weights")
        engine._config.zero_config.gather_16bit_weights_on_model_save = True
    accelerator.save_model(engine, Path(folder) / "weights")
    handle.remove()
    accelerator.save_model(engine, Path(folder) / "stock")
    return same and (rank > 0 or equal_weights(Path(folder)))  # stock's others do not wait for what rank 0 writes


def equal_weights(folder):
    ours, stock = (load_file(folder / name / "model.safetensors") for name in ("weights", "stock"))
    return ours.keys() == stock.keys() and all(torch.equal(ours[name], stock[name]) for name in stock)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_killed_accelerator_goes_on_bit_for_bit(tmp_path, offload):
    """``save_state`` and ``load_state`` of DeepSpeed engines lose nothing, in the layout that stock Accelerate writes; so does
    ``save_model``, which gathers ZeRO-3 where DeepSpeed's settings allow it, as stock does.
    """
    assert [o.exit_code for o in spawn(accelerate_first, str(tmp_path), offload)] == [-9, -9]
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    names = {path.name for path in newest.iterdir()}
    assert {"latest", "zero_to_fp32.py", "pytorch_model", "random_states_0.pkl", "random_states_1.pkl"} <= names
    assert not {"optimizer.bin", "model.safetensors"} & names
    assert (newest / "latest").read_text() == "pytorch_model"
    if offload == "nvme":
        assert values(spawn_ranks(accelerate_alone, 1, str(tmp_path), offload, timeout_s=60)) == [True]
    assert values(spawn(accelerate_again, str(tmp_path), offload)) == [True, True]
    assert sorted(path.name for path in newest.parent.iterdir()) == ["checkpoint_1", "checkpoint_2"]


def lightning(folder, offload, epochs, name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(program_path("trains_with_lightning_on_deepspeed")), str(folder), offload, str(epochs), name]
    environment = {**os.environ, "RES_OPTIONS": "timeout:1"}
    done = warm.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.stdout.count("RANK") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_trainer_goes_on_bit_for_bit(tmp_path, offload):
    """``resume="auto"`` goes on with a DeepSpeedStrategy's directory, which is whole, and equals an uninterrupted run."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "twice").mkdir()
    lightning(tmp_path / "straight", offload, 3, "end")
    lightning(tmp_path / "twice", offload, 2, "middle")
    lightning(tmp_path / "twice", offload, 3, "end")
    for rank in range(2):
        wanted = torch.load(tmp_path / "straight" / f"weights{rank}-end.pt")
        found = torch.load(tmp_path / "twice" / f"weights{rank}-end.pt")
        middle = torch.load(tmp_path / "twice" / f"weights{rank}-middle.pt")
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert not torch.equal(wanted[0], middle[0])
    exp = tmp_path / "twice" / "exp"
    assert sorted(path.name for path in exp.glob("*.ckpt")) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    newest = exp / "epoch=2.ckpt"
    assert {path.name for path in newest.iterdir()} >= {"checkpoint", "latest", "zero_to_fp32.py", "manifest.json"}
    verify_files(newest, read_manifest(newest))
