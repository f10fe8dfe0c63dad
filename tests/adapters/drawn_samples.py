"""Samples that are drawn anew each time: a dataset, and streams that know their place or do not."""

import random

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

SIZE = 22


class Drawing(Dataset):
    """Draws from every generator for a sample."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        noise = torch.rand(1) + random.random() + numpy.random.rand()
        return (torch.full((4,), float(index)) + noise.float(),)


class Stream(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < SIZE:
            self.at += 1
            yield (torch.full((4,), float(self.at)) + torch.rand(1),)
        self.at = 0


class Placing:
    """For a stream that counts in ``at``: it knows its place."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Placed(Placing, Stream):
    pass
