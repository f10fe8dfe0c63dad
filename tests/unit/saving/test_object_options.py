"""Everything that is needed to reach a store can be in ``storage.options``: the writer process gets it, too."""

import os

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, StorageConfig, WriterConfig


def test_the_settings_alone_reach_the_store(bucket, monkeypatch):
    """Saved by the writer process and resumed, in an environment that knows neither endpoint nor credentials."""
    options = tuple(f"{name.lower()}={value}" for name, value in bucket.environment().items())
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    config = CheckpointConfig(writer=WriterConfig(inline_bytes=0), storage=StorageConfig(options=options))
    saved, found = {"w": {"t": torch.arange(3_000_000.0)}}, {"w": {"t": torch.zeros(3_000_000)}}
    with Checkpointer(bucket.url(), config) as ckpt:
        ckpt.save(1, saved).result(timeout_s=60)
    with Checkpointer(bucket.url(), config) as ckpt:
        assert ckpt.resume(found).step == 1
    assert torch.equal(found["w"]["t"], saved["w"]["t"])
