"""A tag whose digests are right, and whose files would run code: DeepSpeed unpickles them freely."""

import os
from pathlib import Path

import pytest
import torch
import xxhash

pytest.importorskip("deepspeed")
import deepspeed_runs as runs

from kit.manifests import rewrite
from kit.ranks import spawn_ranks, values
from safe_ckpt.deepspeed import install
from safe_ckpt.errors import HostileCheckpointError


class Bomb:
    """Unpickled, it leaves a folder behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_tag_that_would_run_code_is_passed_over(tmp_path):
    """The tag before it is loaded; by its name it is an error that says what it calls; nothing runs."""
    assert values(spawn_ranks(loads, 1, str(tmp_path), timeout_s=120)) == [("a", True)]
    assert not (tmp_path / "boom").exists()


def loads(rank, folder):
    out, file = Path(folder) / "out", "mp_rank_00_model_states.pt"
    run = runs.engine(0, width=64)
    handle = install(run)
    for tag in "ab":
        run.save_checkpoint(out, tag=tag, client_state={"tag": tag})
    handle.wait()
    content = torch.load(out / "b" / file, weights_only=False)
    torch.save({**content, "more": Bomb(Path(folder) / "boom")}, out / "b" / file)
    data = (out / "b" / file).read_bytes()
    facts = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
    rewrite(out / "b", lambda manifest: [one.update(facts) for one in manifest["files"] if one["path"] == file])
    with pytest.raises(HostileCheckpointError, match="mkdir") as caught:
        run.load_checkpoint(out, tag="b")
    found = run.load_checkpoint(out)[1]["tag"]
    handle.remove()
    return found, str(out / "b") in str(caught.value)
