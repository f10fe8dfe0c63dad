"""DeepSpeed under Accelerate and under Lightning, on two ranks on the CPU: killed, resumed and compared bit for bit.

Neither framework starts DeepSpeed on a CPU. What stands in their way is stepped around here, and nothing else: Accelerate's
processes are told their numbers, and Lightning's strategy is not asked for a GPU. The engines are real.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
import deepspeed_runs as runs
from test_deepspeed_install import has_nvme, spawn

from safe_ckpt.testing.ranks import values

pytestmark = pytest.mark.timeout(180)
NVME = pytest.param("nvme", marks=pytest.mark.skipif(not has_nvme(), reason="libaio-dev is missing"))


def accelerated(rank, folder, offload, swap):
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
    PartialState._shared_state.update(num_processes=2, process_index=rank, local_process_index=rank)
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


def accelerate_again(rank, folder, offload):
    accelerator, handle, engine, loader = accelerated(rank, folder, offload, Path(folder) / "swap-again")
    accelerator.load_state()
    epoch(accelerator, engine, loader, 2)
    same = torch.equal(runs.weights(engine), torch.load(Path(folder) / f"want{rank}.pt"))
    accelerator.save_state()
    handle.remove()
    return same


@pytest.mark.parametrize("offload", ["none", NVME])
def test_a_killed_accelerator_goes_on_bit_for_bit(tmp_path, offload):
    """``save_state`` and ``load_state`` of DeepSpeed engines lose nothing, in the layout that stock Accelerate writes."""
    assert [o.exit_code for o in spawn(accelerate_first, str(tmp_path), offload)] == [-9, -9]
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    names = {path.name for path in newest.iterdir()}
    assert {"latest", "zero_to_fp32.py", "pytorch_model", "random_states_0.pkl", "random_states_1.pkl"} <= names
    assert not {"optimizer.bin", "model.safetensors"} & names
    assert (newest / "latest").read_text() == "pytorch_model"
    assert values(spawn(accelerate_again, str(tmp_path), offload)) == [True, True]
    assert sorted(path.name for path in newest.parent.iterdir()) == ["checkpoint_1", "checkpoint_2"]
