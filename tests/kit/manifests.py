"""Checkpoints that are nothing but some files and their manifest."""

import json

import xxhash

from safe_ckpt.core.formats.manifest import FileEntry, Manifest


def checkpoint(folder, files):
    entries = []
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        digest = xxhash.xxh3_128(data).hexdigest()
        entries.append(FileEntry(path=name, size_bytes=len(data), xxh3_128=digest, rank=0))
    made = Manifest(
        name=folder.name, sequence=3, step=7, op_id="x", world_size=1, metrics={"a": 1.0}, files=tuple(entries)
    )
    (folder / "manifest.json").write_bytes(made.to_bytes())
    return made


def rewrite(folder, change):
    """Change the manifest and give it a correct digest again, as somebody who knows the format would."""
    data = json.loads((folder / "manifest.json").read_bytes())
    data.pop("digest")
    change(data)
    body = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    data["digest"] = xxhash.xxh3_128(body).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(data))
