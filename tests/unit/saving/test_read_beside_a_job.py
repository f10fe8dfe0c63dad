"""Reading beside a job that deletes what is read and saves meanwhile."""

import shutil

import pytest
import torch

import safe_ckpt
from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.resuming import visit
from safe_ckpt.errors import NoValidCheckpointError
from support import flip_bit

CONFIG = CheckpointConfig(timeouts=QUICK)


def state(step):
    return {"w": {"t": torch.full((1000,), float(step))}, "epoch": step}


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Of 1 and 2 the newest is deleted while it is read, and 3 is committed; with ``None`` nothing comes after it."""

    def begin(*, damaged, then):
        with Checkpointer(tmp_path, CONFIG) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state(step)).result()
        if damaged:
            flip_bit(tmp_path / "step-00000001/w.safetensors", 2000)
        look = visit.StoredItems

        def goes_on(*args, **more):
            monkeypatch.setattr(visit, "StoredItems", look)
            shutil.rmtree(tmp_path / "step-00000002")
            if then is not None:
                with Checkpointer(tmp_path, CONFIG) as ckpt:
                    ckpt.save(then, state(then)).result()
            return look(*args, **more)

        monkeypatch.setattr(visit, "StoredItems", goes_on)
        return tmp_path

    return begin


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_committed_while_the_newest_was_deleted_is_found(beside, damaged):
    """Whatever is wrong with the older ones: where one was missing, what there is is listed again."""
    found = state(0)
    info = safe_ckpt.load(beside(damaged=damaged, then=3), found)
    assert (info.step, found["epoch"]) == (3, 3) if damaged else (1, 1)
    assert found["w"]["t"].eq(info.step).all()


def test_where_nothing_usable_is_left_a_load_says_why(beside):
    """The deleted one and the damaged one are named, and the search has an end."""
    with pytest.raises(NoValidCheckpointError) as caught:
        safe_ckpt.load(beside(damaged=True, then=None), state(0))
    assert set(caught.value.rejected) == {"step-00000001"}
