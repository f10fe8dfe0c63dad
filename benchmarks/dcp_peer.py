"""torch.distributed.checkpoint's ``async_save`` with its own stager, which keeps its memory from save to save."""

import os
from concurrent.futures import Future

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from backends import Way
from disk import sync_tree
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse


class Dcp(Way):
    """On a thread or in a process; staged by the caller, or on a thread that ``optimizer.step()`` must wait for."""

    def __init__(self, kind: str, async_staging: bool) -> None:
        self._kind = AsyncCheckpointerType(kind)
        self._async_staging = async_staging
        self._staged: Future[None] | None = None

    def open(self) -> None:
        if self._kind is AsyncCheckpointerType.PROCESS:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # else it asks the resolver for this host's name
            dist.init_process_group("gloo", init_method=f"file://{self.folder}/group", rank=0, world_size=1)
        cuda = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=True,
            use_async_staging=self._async_staging,
            use_non_blocking_copy=cuda,
        )
        self._stager = DefaultStager(options)

    def save(self, step: int) -> None:
        self._path = self.folder / f"step-{step}"
        answer = dcp.async_save(
            self.state(),
            checkpoint_id=self._path,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._staged, self._written = None, answer

    def gate(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def finish(self) -> None:
        self._written.result()
        sync_tree(self._path)  # it fsyncs the data, but its metadata before they are flushed, and no directory

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=self._path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self._stager.close()
        if dist.is_initialized():
            dist.destroy_process_group()
