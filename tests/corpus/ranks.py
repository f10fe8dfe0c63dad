"""All of the corpus that two ranks save and resume, in one start of them."""

from __future__ import annotations

import warnings

from corpus import of_accelerate, of_lightning, plain


def save(rank, folder):
    warnings.simplefilter("ignore")
    of_accelerate.save_sharded(rank, folder / "accelerate_sharded")  # makes the group of processes that all use
    plain.save_ranks(rank, folder)
    of_lightning.save_sharded(rank, folder / "lightning_sharded")


def resume(rank, folder):
    """The batches that are left with Accelerate, and with Lightning."""
    warnings.simplefilter("ignore")
    left = of_accelerate.resume_sharded(rank, folder / "accelerate_sharded")
    plain.resume_ranks(rank, folder)
    return left, of_lightning.resume_sharded(rank, folder / "lightning_sharded")
