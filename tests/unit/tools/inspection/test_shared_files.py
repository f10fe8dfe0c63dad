"""Files that several checkpoints share under several names."""

from dataclasses import replace

import pytest
import torch

from safe_ckpt import Checkpointer
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.tools.inspection import check


@pytest.mark.parametrize("wrong", [1, 2])
def test_each_checkpoint_is_judged_by_its_own_digest_of_a_file_that_they_share(tmp_path, wrong):
    """The file is read once for all that expect the same of it; one whose manifest says otherwise is damaged."""
    frozen = torch.nn.Linear(64, 64).requires_grad_(False)
    with Checkpointer(tmp_path) as ckpt:
        places = [ckpt.save(step, {"model": frozen, "step": step}).result().path for step in (1, 2)]
    name = next(one.name for one in places[0].glob("model*"))
    (places[1] / name).unlink()
    (places[1] / name).hardlink_to(places[0] / name)
    place = places[wrong - 1]
    manifest = read_manifest(place)
    files = [replace(one, xxh3_128=one.xxh3_128[::-1]) if one.path == name else one for one in manifest.files]
    (place / MANIFEST_NAME).write_bytes(replace(manifest, files=tuple(files)).to_bytes())
    states = [verdict.state for verdict in check.verify_tasks(map(check.plan_tasks, places))]
    assert states == (["damaged", "valid"] if wrong == 1 else ["valid", "damaged"])
