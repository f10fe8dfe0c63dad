"""Every file of a checkpoint damaged in every way: found at the resume, by all ranks together, and set aside."""

from collections import Counter

import pytest
import torch

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Timeouts
from safe_ckpt.testing import spawn_ranks, values
from support import flip_bit

CONFIG = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=30, peer_stall_s=5, shutdown_s=10))
DAMAGES = {
    "one bit flipped at the start": lambda file: flip_bit(file, 0),
    "one bit flipped in the middle": lambda file: flip_bit(file, file.stat().st_size // 2),
    "one bit flipped at the end": lambda file: flip_bit(file, file.stat().st_size - 1),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-2]),
    "a byte appended": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
}


def state(rank, step):
    return {
        "model": {"w": torch.full((1000,), float(step))},
        "optimizer": {"note": (step, None), "t": torch.full((500,), step)},
        "own": PerRank({"t": torch.full((300,), float(100 * step + rank))}),
        "epoch": step,
    }


def blank():
    model = {"w": torch.zeros(1000)}
    return {"model": model, "optimizer": None, "own": PerRank({"t": torch.zeros(300)}), "epoch": 0}


def damage_all(rank, folder):
    found = []
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, state(rank, 1)).result(timeout_s=30)
        names = sorted(path.name for path in (folder / "step-00000001").iterdir())
        for name in names:
            for kind, harm in DAMAGES.items():
                ckpt.save(2, state(rank, 2)).result(timeout_s=30)
                ckpt._engine.agree(
                    "harm", {}, decide=lambda _, name=name, harm=harm: harm(folder / "step-00000002" / name)
                )
                target = blank()
                info = ckpt.resume(target)
                exact = (
                    float(target["model"]["w"][0]) == info.step
                    and target["optimizer"]["note"] == (info.step, None)
                    and float(target["own"].value["t"][0]) == 100 * info.step + rank
                    and target["epoch"] == info.step
                )
                aside = len(list((folder / ".safe_ckpt/quarantine").iterdir()))
                found.append((name, kind, info.step, exact, aside, (folder / "step-00000002").exists()))
                ckpt._engine.agree("looked", {})
        ckpt.save(2, state(rank, 2)).result(timeout_s=30)
        ckpt._engine.agree("extra", {}, decide=lambda _: (folder / "step-00000002/.nfs0001").touch())
        extra = ckpt.resume(blank()).step
    return found, extra


@pytest.mark.timeout(300)
def test_every_damage_to_every_file_moves_all_ranks_to_the_same_older_one(tmp_path, matrix):
    """Each file of a two-rank checkpoint, the manifest included, in each way; an extra file only is no damage."""
    (first, extra), (second, _) = values(spawn_ranks(damage_all, 2, tmp_path, timeout_s=280))
    assert [row[:3] for row in first] == [row[:3] for row in second]
    assert len({name for name, *_ in first}) == 6
    outcomes = Counter()
    for number, (name, kind, step, exact, aside, there) in enumerate(first, start=1):
        assert (step, exact, there) == (1, True, False), (name, kind)
        assert aside == number, (name, kind)
        outcomes["the same older one on both ranks, the bad one in quarantine"] += 1
    assert extra == 2
    matrix("bit flipped, truncated, grown, emptied, deleted", "each file and the manifest, 2 ranks", outcomes)
