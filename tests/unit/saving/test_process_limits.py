"""Limits of the process (``ulimit``) and of its control group: what is refused says which limit it was, and of what."""

import json

import pytest
import torch
from small_runs import config

from safe_ckpt import Checkpointer, WriterConfig
from safe_ckpt import machine as host_memory
from safe_ckpt.core.formats.file_plan import bytes_plan
from safe_ckpt.core.saving.request import Payload
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.errors import NotEnoughSpaceError
from support import run_program


def test_a_limit_of_the_process_is_named(tmp_path):
    """``ulimit -v`` is said as such, whatever memory is free; ``ulimit -f`` names the file, and files below it are saved."""
    said = run_program("saves_under_limits", str(tmp_path), finalize=True)
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


def test_the_space_that_a_save_asks_for_has_that_of_the_files_that_it_copies(tmp_path):
    """Those of an offloaded optimizer are the largest of all."""
    (tmp_path / "part").write_bytes(bytes(1000))
    copy = FileCopy(source=str(tmp_path / "part"), path="part", stamp=Stamp.of((tmp_path / "part").stat()))
    assert Payload(files=[bytes_plan("a", bytes(10))], copies=[copy]).new_bytes == 1010


@pytest.mark.parametrize(("left", "fits"), [(20 << 20, False), (64 << 20, True)])
def test_the_writers_memory_counts_against_a_control_groups_limit(tmp_path, monkeypatch, left, fits):
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
