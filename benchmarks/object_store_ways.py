"""The ways to save one state to an object store that ``object_stores.py`` compares.

Where the store is and how it is entered comes from the environment, in the variables of AWS. Every peer is called as its
documentation shows it, with its own defaults, unless a comment says otherwise.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import torch
import xxhash

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.saving.handle import SaveHandle

State = dict[str, dict[str, torch.Tensor]]
TENSORS = 40
TIMEOUT_S = 300.0
_NOISE_BYTES = 8 << 20
_REGION = "us-east-1"
_STORAGE = CheckpointConfig().storage  # the raw uploads and downloads have the same part size and concurrency


def make_state(mebibytes: int) -> State:
    """So many MiB of float32 in ``TENSORS`` tensors, of bytes that no compression makes smaller."""
    count = (mebibytes << 20) // 4 // TENSORS
    noise = torch.randn(min(count, _NOISE_BYTES // 4))
    tensors = {f"layers.{number}.weight": torch.empty(count) for number in range(TENSORS)}
    for tensor in tensors.values():
        for part in tensor.split(len(noise)):
            part.copy_(noise[: len(part)])
    return {"model": tensors}


def state_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state["model"].values())


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of their bytes, one after the other."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(tensor.numpy())
    return found.hexdigest()


class Way:
    """One way to save.

    Args:
        url: of a folder that is empty and its own, without a slash at the end.
        folder: likewise, on the local disk.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        parts = urlsplit(url)
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")

    def open(self) -> None:
        """Import what is needed and make the client."""

    def prepare(self, state: State) -> None:
        """Called before the first save of ``state``: what can be done ahead of it."""

    def save(self, step: int, state: State) -> None:
        """Returns when the state may change."""

    def finish(self) -> None:
        """Wait until the last save is committed."""

    def prepare_resume(self, state: State) -> None:
        """Called before ``resume``: memory that a run has anyway."""

    def resume(self, state: State) -> list[torch.Tensor]:
        """Read back what was saved last, in a fresh process. Returns what was read, in order."""
        raise NotImplementedError

    def close(self) -> None:
        """End."""


class Ours(Way):
    """``Checkpointer``: a snapshot in shared memory, uploaded by its writer process."""

    _handle: SaveHandle

    @property
    def place(self) -> str | Path:
        return self.url

    def open(self) -> None:
        self._ckpt = Checkpointer(self.place)

    def prepare(self, state: State) -> None:
        self._ckpt.prepare(state)

    def save(self, step: int, state: State) -> None:
        self._handle = self._ckpt.save(step, state)

    def finish(self) -> None:
        self._handle.result(timeout_s=TIMEOUT_S)

    def resume(self, state: State) -> list[torch.Tensor]:
        if self._ckpt.resume(state) is None:
            raise SystemExit("safe_ckpt found no checkpoint")
        return list(state["model"].values())

    def close(self) -> None:
        self._ckpt.close()


class OursOnDisk(Ours):
    """The same in a directory of the local disk, to compare what training loses."""

    @property
    def place(self) -> str | Path:
        return self.folder / "checkpoints"


class RawObstore(Way):
    """As many bytes by the client that ours uses, in as large parts, as many at a time: nothing can be less."""

    def open(self) -> None:
        import obstore.store

        self._obstore = obstore
        config = {"checksum_algorithm": "SHA256", "endpoint": os.environ["AWS_ENDPOINT_URL"]}
        self._store = obstore.store.S3Store(self.bucket, config=config, client_options={"allow_http": True})
        self._bytes = memoryview(b"")

    def prepare(self, state: State) -> None:
        flat = torch.cat([tensor.view(-1) for tensor in state["model"].values()])
        self._bytes = memoryview(flat.numpy()).cast("B")

    def save(self, step: int, state: State) -> None:
        del step, state
        self._obstore.put(
            self._store,
            f"{self.prefix}/raw",
            self._pieces(),
            use_multipart=True,
            chunk_size=_STORAGE.part_bytes,
            max_concurrency=_STORAGE.parts_in_flight,
        )

    def _pieces(self) -> Iterator[memoryview]:
        for start in range(0, len(self._bytes), _STORAGE.part_bytes):
            yield self._bytes[start : start + _STORAGE.part_bytes]

    def prepare_resume(self, state: State) -> None:
        self._target = torch.full((state_bytes(state) // 4,), 7.0)

    def resume(self, state: State) -> list[torch.Tensor]:
        """Ranges of the size of a part, ``parts_in_flight`` at a time, copied to memory that is there already."""
        del state
        target = memoryview(self._target.numpy()).cast("B")

        def fetch(start: int) -> None:
            length = min(_STORAGE.part_bytes, len(target) - start)
            got = self._obstore.get_range(self._store, f"{self.prefix}/raw", start=start, length=length)
            target[start : start + length] = memoryview(got)

        with ThreadPoolExecutor(_STORAGE.parts_in_flight) as threads:
            list(threads.map(fetch, range(0, len(target), _STORAGE.part_bytes)))
        return [self._target]


class DcpS3Connector(Way):
    """``torch.distributed.checkpoint.save`` with the storage writer of AWS."""

    def open(self) -> None:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector import S3ClientConfig
        from s3torchconnector import dcp as s3_dcp
        from s3torchconnector._s3client import S3Client

        self._dcp, self._s3_dcp = dcp, s3_dcp
        config = S3ClientConfig(force_path_style=True)
        self._client = S3Client(_REGION, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def save(self, step: int, state: State) -> None:
        writer = self._s3_dcp.S3StorageWriter(_REGION, f"{self.url}/step-{step}")
        # The writer takes no endpoint: the file system that it makes for itself is replaced by one that has it.
        writer.fs = self._s3_dcp.S3FileSystem(_REGION, s3_client=self._client)
        self._dcp.save(state, storage_writer=writer, no_dist=True)


class DcpFsspec(Way):
    """``torch.distributed.checkpoint.save`` through fsspec and s3fs."""

    def open(self) -> None:
        import s3fs  # noqa: F401 - fsspec finds it when the first path is opened, and that is not to be timed
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        self._dcp, self._writer = dcp, FsspecWriter

    def save(self, step: int, state: State) -> None:
        # With sync_files it calls os.sync(), which waits for all disks of the machine, and for nothing of the store.
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "sync_files": False}
        writer = self._writer(f"{self.url}/step-{step}", **options)
        self._dcp.save(state, storage_writer=writer, no_dist=True)


class TorchSaveBoto3(Way):
    """``torch.save`` into memory, then ``upload_fileobj``, which uploads ten parts of 8 MiB at a time."""

    def open(self) -> None:
        import boto3

        self._client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name=_REGION)

    def save(self, step: int, state: State) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        self._client.upload_fileobj(buffer, self.bucket, f"{self.prefix}/step-{step}.pt")


class Lightning(Way):
    """The plugin as a Trainer or Fabric calls it; s3fs finds the endpoint in the environment."""

    def open(self) -> None:
        import s3fs  # noqa: F401 - as above
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        self._io = TorchCheckpointIO()

    def save(self, step: int, state: State) -> None:
        self._io.save_checkpoint(state, f"{self.url}/step-{step}.ckpt")


OURS, RAW, ON_DISK = "safe_ckpt", "obstore alone", "safe_ckpt, local disk"
WAYS: dict[str, Callable[[str, Path], Way]] = {
    OURS: Ours,
    RAW: RawObstore,
    "DCP, s3torchconnector": DcpS3Connector,
    "DCP, s3fs": DcpFsspec,
    "torch.save, boto3": TorchSaveBoto3,
    "Lightning, s3fs": Lightning,
    ON_DISK: OursOnDisk,
}
RESUMES = (OURS, RAW)
