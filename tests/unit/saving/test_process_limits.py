"""Limits of the process (``ulimit``) and of its control group: what is refused says which limit it was, and of what."""

import json

import pytest
import torch
from small_runs import config

from safe_ckpt import Checkpointer, WriterConfig
from safe_ckpt import machine as host_memory
from safe_ckpt.errors import NotEnoughSpaceError
from support import run_script

CODE = """
    import json, resource, sys, torch
    from safe_ckpt import Checkpointer, SafeCheckpointError

    def tell(ckpt, step, state):
        try:
            return ckpt.save(step, state).result(timeout_s=30).step
        except SafeCheckpointError as error:
            return [type(error).__name__, str(error)]

    large, parts = {"w": {"t": torch.ones(16 << 20)}}, {f"part{n}": {"t": torch.ones(200_000)} for n in range(4)}
    found = {}
    with Checkpointer(sys.argv[1]) as ckpt:
        ckpt.save(0, {"w": {"t": torch.ones(1)}}).result(timeout_s=30)
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (40 << 20), resource.RLIM_INFINITY))
        found["address space"] = tell(ckpt, 1, large)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found["without the limit"] = tell(ckpt, 2, large)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        found["large file"] = tell(ckpt, 3, large)
        found["small files"] = tell(ckpt, 4, parts)
    with Checkpointer(sys.argv[1] + "/new") as ckpt:
        found["large file from the start"] = tell(ckpt, 3, large)
        found["small files from the start"] = tell(ckpt, 4, parts)
    print(json.dumps(found))
"""


def test_a_limit_of_the_process_is_named(tmp_path):
    """``ulimit -v`` is said as such, whatever memory is free; ``ulimit -f`` names the file, and files below it are saved."""
    said = run_script(CODE, str(tmp_path), finalize=True)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout.splitlines()[-1])
    kind, words = found["address space"]
    assert kind == "NotEnoughSpaceError"
    assert "RLIMIT_AS" in words
    assert "host memory" not in words
    assert int(words.split(" bytes free")[0].split()[-1]) < 41 << 20
    assert found["without the limit"] == 2
    for name in ("large file", "large file from the start"):
        kind, words = found[name]
        assert kind == "DirectoryError"
        assert words.partition(": ")[0].endswith("step-00000003/w.safetensors")
        assert "EFBIG" in words
    assert found["small files"] == found["small files from the start"] == 4


@pytest.mark.parametrize(("left", "fits"), [(20 << 20, False), (64 << 20, True)])
def test_what_the_writer_needs_is_counted(tmp_path, monkeypatch, left, fits):
    """A control group kills and does not refuse: the writer's interpreter and its chunks must fit besides the snapshot."""
    size = 16 << 20
    with Checkpointer(tmp_path, config()) as ckpt:
        monkeypatch.setattr(host_memory, "available_bytes", lambda: left)
        handle = ckpt.save(1, {"w": {"t": torch.ones(size // 4)}})
        if fits:
            handle.result(timeout_s=30)
        else:
            with pytest.raises(NotEnoughSpaceError, match="for writing it") as caught:
                handle.result(timeout_s=30)
            assert caught.value.needed_bytes > size + 2 * WriterConfig().chunk_bytes
        ckpt.save(2, {"w": {"t": torch.ones(4)}}).result(timeout_s=30)  # the thread that writes it is there
