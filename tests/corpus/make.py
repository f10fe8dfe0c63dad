"""Save the checkpoints of ``tests/corpus/checkpoints`` anew: ``python tests/corpus/make.py SOURCE [NAME ...]``.

``SOURCE`` is a checkout whose code saves them. Those that are kept were saved by commit 7441619, ``plain_together`` by the one
that added it, those of the group ``doors`` by bb84bab6. Once a format has been released nothing is made anew: what a later
format writes gets a corpus of its own beside this one. DeepSpeed's need the environment of ``make test-deepspeed``; they, and
``doors``, are made when they are named.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parents[1]
CHECKPOINTS = TESTS / "corpus" / "checkpoints"
PLACE = Path("/tmp/safe_ckpt_corpus")  # the same on every machine: frameworks write their paths down


def main(source, *names):
    """Save them, and put them in the place of those that are there."""
    paths = [str(Path(source).resolve() / "src"), str(TESTS), str(TESTS / "adapters")]
    if os.environ.get("PYTHONPATH") != ":".join(paths):  # ranks and writer processes take it from there
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": ":".join(paths)})
    import safe_ckpt

    assert Path(safe_ckpt.__file__).is_relative_to(paths[0]), safe_ckpt.__file__
    shutil.rmtree(PLACE, ignore_errors=True)
    for group in names or ("plain", "ranks", "frameworks", "objects"):
        GROUPS[group]()
    for folder in PLACE.iterdir():
        shutil.rmtree(CHECKPOINTS / folder.name, ignore_errors=True)
        shutil.copytree(folder, CHECKPOINTS / folder.name)
    shutil.rmtree(PLACE)


def plain():
    from corpus.plain import ONE_RANK

    for name, (save, _) in ONE_RANK.items():
        save(PLACE / name)


def ranks():
    """All that two ranks save. Accelerate sets up the group of processes that the others use."""
    from corpus.ranks import save
    from kit.ranks import spawn_ranks, values

    values(spawn_ranks(save, 2, PLACE, init=False))


def frameworks():
    from corpus import of_accelerate, of_lightning, of_transformers

    of_lightning.save(PLACE / "lightning_file")
    of_accelerate.save(PLACE / "accelerate")
    of_transformers.save(PLACE / "transformers")


def objects():
    """What a bucket has under each key becomes a file."""
    from corpus.plain import save_objects
    from kit import object_servers

    with TemporaryDirectory() as log, object_servers.start("ministack", Path(log)) as server:
        bucket = server.new_bucket()
        os.environ.update(bucket.environment())
        save_objects(bucket.url())
        for key in bucket.keys(""):
            file = PLACE / "objects" / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bucket.read(key))


def doors():
    from corpus.of_doors import save
    from kit.ranks import spawn_ranks, values

    values(spawn_ranks(save, 2, PLACE, init=False, timeout_s=200))


def deepspeed():
    from corpus.of_deepspeed import save
    from kit.ranks import spawn_ranks, values

    values(spawn_ranks(save, 2, PLACE, timeout_s=300))
    for script in PLACE.glob("*/*.py"):  # DeepSpeed puts some of its own code beside the tags
        script.unlink()


GROUPS = {
    "plain": plain, "ranks": ranks, "frameworks": frameworks, "objects": objects, "doors": doors, "deepspeed": deepspeed,
}  # fmt: skip

if __name__ == "__main__":
    main(*sys.argv[1:])
