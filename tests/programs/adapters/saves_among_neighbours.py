"""Saves with Lightning below FOLDER/few and FOLDER/many, where many files lie beside; system calls mark each save."""

import os
import sys
from pathlib import Path

import lightning_runs

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.lightning import SafeCheckpointCallback


def marked(name, trainer, path):
    trainer.save_checkpoint(path)
    os.path.exists(f"/begin-{name}")
    trainer.save_checkpoint(path)
    os.path.exists(f"/end-{name}")


def crowd(folder):
    for number in range(500):
        (folder / f"{number}.ckpt").touch()
        (folder.parent / f"{number}.ckpt").touch()
    deep = folder.joinpath(*"abcdefghijklmnop")
    deep.mkdir(parents=True)
    (deep / "x.ckpt").touch()


pl = lightning_runs.package("lightning.pytorch")
base = Path(sys.argv[1])
for name in ("few", "many"):
    folder = base / name / "exp"
    model = lightning_runs.module_class(pl)()
    callback = SafeCheckpointCallback(folder)
    trainer = lightning_runs.trainer(pl, [callback], base, max_epochs=1)
    trainer.fit(model)
    if name == "many":
        crowd(folder)
    assert os.listdir(folder / ".safe_ckpt") == ["events.jsonl"]
    marked(f"{name}-fit", trainer, folder / "a.ckpt")
    trainer = lightning_runs.trainer(pl, [SafeCheckpointCallback(folder)], base)
    trainer.validate(model, verbose=False)
    marked(f"{name}-validate", trainer, folder / "b.ckpt")
    names = ("a", "b", Path(callback.best_model_path).stem)
    newest = sorted(names, key=lambda name: read_manifest(folder / f"{name}.ckpt").sequence)
    assert newest == [names[2], "a", "b"], newest
lightning_runs.trainer(pl, [SafeCheckpointCallback(folder, resume="auto")], base, max_epochs=2).fit(model)
print("done")
