"""Every damage to the files of a checkpoint, and what a resume makes of it."""

import shutil
from collections import Counter
from pathlib import Path

from entries import entered

from safe_ckpt import CheckpointConfig, Timeouts
from support import flip_bit, names_in

# Half of barrier_s is what a missing file is waited for.
CONFIG = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=4, peer_stall_s=5, shutdown_s=10))


DAMAGES = {
    "one bit flipped at the start": lambda file: flip_bit(file, 0),
    "one bit flipped in the middle": lambda file: flip_bit(file, file.stat().st_size // 2),
    "one bit flipped at the end": lambda file: flip_bit(file, file.stat().st_size - 1),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-2]),
    "a byte appended": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
}


def damage_all(rank, folder, name, stride=1):
    """Damage each file, or with a stride each so-manieth, in every way, and say what each resume found."""
    found = []
    with entered(name, folder, CONFIG, rank=rank) as entry:
        entry.save(1).result(timeout_s=30)
        files = sorted(path.name for path in entry.path(1).iterdir())
        for file in files[::stride]:
            for kind, harm in DAMAGES.items():
                entry.save(2).result(timeout_s=30)
                path = Path(entry.engine.agree("harm", decide=lambda _, file=file, harm=harm: do(harm, entry, file)))
                number = entry.load()
                aside = len(names_in(folder / ".safe_ckpt/quarantine"))
                found.append((file, kind, number, aside, path.exists()))
                entry.engine.agree("looked")
                if kind == "deleted":  # what stays where it is would be waited for again and again
                    entry.engine.agree("remove", decide=lambda _, path=path: shutil.rmtree(path))
        entry.save(2).result(timeout_s=30)
        entry.engine.agree("extra", decide=lambda _: (entry.path(2) / ".nfs0001").touch())
        extra = entry.load()
    return found, extra


def do(harm, entry, file):
    path = entry.path(2)
    harm(path / file)
    return str(path)


def judge(found, name):
    """Whether every damage was found on all ranks alike and nothing else was; returns what became of them."""
    first, extra = found[0]
    assert all([row[:3] for row in rows] == [row[:3] for row in first] for rows, _ in found)
    outcomes = Counter()
    quarantined = 0
    for file, kind, found, aside, there in first:
        missing = kind == "deleted"
        quarantined += not missing
        assert (found, there) == (1, missing), (file, kind)
        assert aside == quarantined, (file, kind)
        where = "where it was" if missing else "in quarantine"
        outcomes[f"the same older one on all ranks, the bad one {where}"] += 1
    assert extra == 2
    return outcomes
