"""A process that is forked has neither the threads nor the writer of its parent: it says so at once."""

import os
import threading
import time

import pytest
import torch

from kit.inside import engine_of
from safe_ckpt import Checkpointer
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import ForkedError
from support import run_program


def in_child(call):
    """The name of what ``call`` raised in a forked child, and how long that took."""
    reading, writing = os.pipe()
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said, time.monotonic() - begun


@pytest.mark.parametrize("call", ["save", "resume", "close", "wait", "result", "wait_snapshot"])
def test_a_forked_child_is_refused_at_once(tmp_path, call, monkeypatch):
    """Every call on what the parent opened names the parent, within moments, also with tensors that torch copies in threads."""
    with Checkpointer(tmp_path) as ckpt:
        state = {"w": {"t": torch.ones(20 << 20)}}
        ckpt.save(1, state).result(timeout_s=60)
        child_is_over, write = threading.Event(), WriterSupervisor.write

        def write_later(self, *given):
            assert child_is_over.wait(60)
            return write(self, *given)

        monkeypatch.setattr(WriterSupervisor, "write", write_later)
        handle = ckpt.save(2, state)

        def save():
            try:
                ckpt.save(3, state)
            finally:
                engine_of(ckpt).emit.close()  # until hooks have all that there is

        calls = {
            "save": save,
            "resume": lambda: ckpt.resume(state),
            "close": ckpt.close,
            "wait": ckpt.wait,
            "result": handle.result,
            "wait_snapshot": lambda: (handle._save._snapshot_taken.clear(), handle.wait_snapshot()),
        }
        said, seconds = in_child(calls[call])
        assert not handle.done()
        child_is_over.set()
        assert said.startswith(f"{ForkedError.__name__}: ")
        assert f"process {os.getpid()}" in said
        assert seconds < 10
        assert handle.result(timeout_s=60).step == 2
    assert '"failed"' not in (tmp_path / ".safe_ckpt/events.jsonl").read_text()  # it is no save of the parent's
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step")) == [
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.slow
def test_a_forked_child_that_inherits_a_checkpointer_ends_by_itself(tmp_path):
    """A child that only inherits a Checkpointer, as a data loader's worker does, ends by itself and disturbs nothing."""
    quiet = ("-W", "ignore::DeprecationWarning")  # CPython's, of fork
    done = run_program("forked_with_a_checkpointer", str(tmp_path), finalize=True, flags=quiet)
    assert done.stdout == "0 1 2\n", done.stderr
    assert done.stderr == ""
