"""A job with a frozen part that is large enough to be shared, and what an object store has of it."""

import dataclasses

import torch
import xxhash

from safe_ckpt import CheckpointConfig, Retention, StorageConfig, Unchanged, WriterConfig
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

SIZE = 600  # 1.4 MiB a layer
FROZEN = "model-00002-of-00002.safetensors"
STORAGE = StorageConfig(part_bytes=5 << 20, request_timeout_s=5)


class Model(torch.nn.Module):
    def __init__(self, size=SIZE):
        super().__init__()
        self.base = torch.nn.Linear(size, size).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(size, 4)
        self.register_buffer("count", torch.zeros(3))


class Job:
    def __init__(self):
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.head.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self):
        self.model.head(self.model.base(torch.randn(2, SIZE))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.count += 1


def digest(module):
    found = xxhash.xxh3_128()
    for name, tensor in module.state_dict().items():
        found.update(name.encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def is_copy(record):
    """Whether a request has the store copy an object."""
    return any("copy-source" in name for name in record.headers)


def store_config(*, keep=None, inline=None, in_flight=1, request_timeout_s=5, timeouts=None, **more):
    """Settings for an object store; the rest is about what did not change."""
    writer = WriterConfig() if inline is None else WriterConfig(inline_bytes=inline)
    storage = dataclasses.replace(STORAGE, request_timeout_s=request_timeout_s)
    how = {"timeouts": timeouts} if timeouts is not None else {}
    retention, unchanged = Retention(keep_last=keep), Unchanged(**more)
    return CheckpointConfig(
        retention=retention, storage=storage, unchanged=unchanged, writer=writer, max_in_flight=in_flight, **how
    )


def stored(bucket):
    """Every committed checkpoint by name, of which every file was read and compared with its manifest."""
    root, found = open_place(bucket.url(), StorageOptions(give_up_after_s=10)), {}
    for key in bucket.keys("run/"):
        if key.endswith("/manifest.json"):
            path = root / key.split("/")[1]
            manifest = read_manifest(path)
            for entry in manifest.files:
                data, _ = root.bucket.read((path / entry.path).key)
                assert xxhash.xxh3_128(data).hexdigest() == entry.xxh3_128, (path, entry.path)
            found[manifest.name] = manifest
    return found


def delete(bucket, prefix):
    """Delete the objects below it, as somebody may by hand."""
    open_place(bucket.url(), StorageOptions(give_up_after_s=10)).bucket.delete(list(bucket.keys(prefix)))
