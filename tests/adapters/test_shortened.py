"""Under each framework a tensor whose memory was taken away ends the save with an error that names it; the process lives."""

import pytest
import torch
from accelerate import cpu_offload
from lightning_runs import fit, package
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from transformers_runs import trainer as trainer_of

from accelerate_runs import CONFIG, Training, fresh, make
from safe_ckpt.accelerate import register
from safe_ckpt.core.sharding import gather
from safe_ckpt.errors import StateError
from safe_ckpt.peft.adapter import base_hash

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def shorten(tensor):
    tensor.detach().untyped_storage().resize_(0)
    return tensor


def test_lightning_names_a_buffer_whose_memory_was_taken_away(tmp_path):
    """A buffer that the forward pass does not use, in a checkpoint of one file."""

    class Shortens(package("lightning.pytorch").Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 1:
                pl_module.register_buffer("scratch", shorten(torch.ones(4)))

    with pytest.raises(StateError, match=r"scratch.*needs 16 bytes"):
        fit(tmp_path, callbacks=[Shortens()], every_n_train_steps=1)


def test_a_trainer_names_a_tensor_whose_memory_was_taken_away(tmp_path):
    """In the model, and in the optimizer."""
    for part in ("model", "optimizer"):

        class Shortens(TrainerCallback):
            def on_step_end(self, args, state, control, model, optimizer, part=part, **_):
                if state.global_step == 2:
                    weight = model.lm_head.weight
                    shorten(weight.data if part == "model" else optimizer.optimizer.state[weight]["exp_avg"])

        with pytest.raises(StateError, match=r"embed_tokens|lm_head|exp_avg"):
            trainer_of(tmp_path / part, callbacks=[Shortens()]).train()


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_accelerate_names_a_tensor_without_memory_in_every_part(tmp_path, safe_serialization):
    """A model's, also one that shares memory in part, an optimizer's, an object's of the user; and in save_model."""
    with fresh(), register(accelerator := make(tmp_path), CONFIG) as handle:
        training = Training(accelerator)
        model, counter = training.net, training.counter
        whole = torch.ones(8)
        for part in (whole[:4], whole[2:6]):
            model.register_buffer(f"part{part.storage_offset()}", part)
        storage = whole.untyped_storage()
        storage.resize_(8)
        with pytest.raises(StateError, match="part"):
            accelerator.save_state(safe_serialization=safe_serialization)
        with pytest.raises(StateError, match="part"):
            handle.save_model(model, tmp_path / "weights", safe_serialization=safe_serialization)
        del model.part0, model.part2  # whole again they overlap, which is refused, too
        counter.count = shorten(torch.ones(5))
        with pytest.raises(StateError, match="count"):
            accelerator.save_state(safe_serialization=safe_serialization)


def test_an_offloaded_tensor_whose_memory_was_taken_away_is_named(tmp_path):
    """Its values lie in host memory, in a dict of Accelerate's."""
    with fresh(), register(make(None), CONFIG) as handle:
        model = torch.nn.Linear(4, 4)
        values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model = cpu_offload(model, state_dict=values)
        shorten(values["weight"])
        with pytest.raises(StateError, match=r"weight.*needs 64 bytes"):
            handle.save_model(model, tmp_path / "weights")


def test_gathers_and_base_hashes_name_a_tensor_without_memory():
    """What is gathered, and the base of an adapter."""
    with pytest.raises(StateError, match=r"inner\.bad"):
        gather.named_tensors({"inner": {"bad": shorten(torch.ones(3))}})
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    adapted = get_peft_model(model, LoraConfig(target_modules=["0"]))
    shorten(model[0].weight)
    with pytest.raises(StateError, match="weight"):
        base_hash(adapted)
