"""What a resume has restored, made undone again: as if it had been left out."""

import os
import random

import numpy as np
import torch

omitted = [one for one in os.environ.get("OMIT", "").split(",") if one]


def forget(model, optimizer, scheduler, fresh_scheduler):
    """Undo what ``OMIT`` names. ``fresh_scheduler``: the state of a scheduler that was just made."""
    if "optimizer" in omitted:
        optimizer.state.clear()
    for state in optimizer.state.values():
        for key in {"exp_avg", "exp_avg_sq", "step"} & set(omitted):
            state[key] = torch.zeros_like(state[key])
    if "scheduler" in omitted:
        scheduler.load_state_dict(fresh_scheduler)
    if "frozen" in omitted:
        model.requires_grad_(True)
    if "buffer" in omitted:
        model.norm.running_mean.zero_()
    forget_generators()


def forget_generators():
    """Those that ``OMIT`` names."""
    if "python" in omitted:
        random.seed(5)
    if "numpy" in omitted:
        np.random.seed(5)
    if "torch" in omitted:
        torch.manual_seed(5)


class Net(torch.nn.Module):
    """Layers with a buffer and draws of all three generators."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.middle = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 32)
        self.drop, self.last = torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
        self.best, self.seen, self.average = 1e9, 0, {}

    def forward(self, x, labels=None):
        hidden = torch.tanh(self.middle(torch.tanh(self.norm(self.first(x)))))
        logits = self.last(self.drop(hidden))
        if labels is None:
            return logits
        loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=float(np.random.rand()) / 10)
        return {"loss": loss * (1 + 0.1 * random.random()), "logits": logits}

    def stepped(self, step):
        """Behind each optimizer step: an average of the weights, a counter, and a layer that is frozen."""
        for name, one in self.named_parameters():
            self.average.setdefault(name, one.detach().clone()).mul_(0.9).add_(one.detach(), alpha=0.1)
        self.seen += 8
        if step == 3:
            self.middle.requires_grad_(False)

    def own_state(self):
        return {
            "best": self.best, "seen": self.seen, "average": self.average,
            "frozen": [name for name, one in self.named_parameters() if not one.requires_grad],
        }  # fmt: skip

    def restore_own_state(self, saved):
        for key in ("best", "seen", "average"):
            if key not in omitted and "all" not in omitted:
                setattr(self, key, saved[key])
        if "all" not in omitted:
            for name, one in self.named_parameters():
                one.requires_grad_(name not in saved["frozen"])


def data(size=256):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(size, 8, generator=draws)
    return x, (x.sum(dim=1) > 0).long()
