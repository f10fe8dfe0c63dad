"""Transformers' Trainer with the mixin of safe_ckpt, or its own saves. OMIT names what its resume leaves out."""

import argparse
import os

import torch
from forgetting import Net, data, forget, forget_generators, omitted
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from safe_ckpt.transformers import SafeCheckpointMixin

options = argparse.ArgumentParser()
options.add_argument("--out")
options = options.parse_args()


class Own(TrainerCallback, ExportableState):
    """What the net keeps beside its weights, as the Trainer saves a callback."""

    def state(self):
        saved = net.own_state() if "net" in globals() else {}
        return {
            "args": {},
            "attributes": {"saved": {**saved, "average": {k: v.tolist() for k, v in saved.get("average", {}).items()}}},
        }

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **_):
        own = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Own))
        if state.global_step and getattr(own, "saved", None):
            average = {name: torch.tensor(one) for name, one in own.saved["average"].items()}
            net.restore_own_state({**own.saved, "average": average})
            forget(net, optimizer, lr_scheduler, fresh[0])
            resumed.append(True)

    def on_step_begin(self, args, state, control, **_):
        if resumed:  # the generators are restored right before
            resumed.clear()
            forget_generators()

    def on_step_end(self, args, state, control, **_):
        net.stepped(state.global_step)


class Ours(SafeCheckpointMixin, Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        made = super().create_scheduler(num_training_steps, optimizer)
        fresh.append(made.state_dict())
        return made


fresh, resumed = [], []
x, labels = data()
rows = [{"x": x[n], "labels": labels[n]} for n in range(len(x))]
arguments = TrainingArguments(
    options.out, per_device_train_batch_size=8, max_steps=400, save_steps=5, logging_steps=1, learning_rate=1e-2, seed=0,
    report_to=[], use_cpu=True, disable_tqdm=True, restore_callback_states_from_checkpoint=True, save_total_limit=3,
    ignore_data_skip="position" in omitted or "all" in omitted,
)  # fmt: skip
torch.manual_seed(0)
net = Net()
trainer = Ours(model=net, args=arguments, train_dataset=rows, callbacks=[Own()])
last = get_last_checkpoint(options.out) if os.path.isdir(options.out) else None
if last and "all" in omitted:
    from safetensors.torch import load_file

    net.load_state_dict(load_file(os.path.join(last, "model.safetensors")))
    last = None
trainer.train(resume_from_checkpoint=last)
