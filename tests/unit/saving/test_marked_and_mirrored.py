"""What is marked as unhealthy never reaches the mirror, and never counts there: in no way a checkpoint comes to be uploaded."""

import math
import shutil

import pytest
import torch
from small_runs import steps

from kit.inside import upload_at_once
from kit.limits import PATIENT
from kit.memory_store import MemoryStore, no_answer
from safe_ckpt import CheckpointConfig, Checkpointer, Health, Mirror, Retention
from safe_ckpt.testing import inline_saves

RULES = {
    "plain": {},
    "keep_last": {"keep_last": 1},
    "keep_every_steps": {"keep_every_steps": 1},
    "follow": {"follow": True},
    "required": {"required": True},
    "all": {"keep_last": 1, "keep_every_steps": 2, "follow": True, "required": True},
}
each_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


@pytest.fixture
def store(monkeypatch):
    upload_at_once(monkeypatch)
    with inline_saves():
        yield MemoryStore(monkeypatch)


def config(store, rules, keep_last=None, action="mark"):
    mirror, retention = Mirror(url=store.url(), **rules), Retention(keep_last=keep_last)
    return CheckpointConfig(timeouts=PATIENT, mirror=mirror, retention=retention, health=Health(action=action))


def state(step):
    """A negative step is that of a state gone bad."""
    return {"w": {"t": torch.full((4,), math.nan if step < 0 else float(step))}, "n": step}


def save(ckpt, *numbers):
    for step in numbers:
        assert ckpt.save(abs(step), state(step)).result().marked is (step < 0)


def there(store):
    return sorted(one["step"] for one in store.manifests().values())


@each_rule
@pytest.mark.parametrize("numbers", [(-1,), (1, -2), (-1, 2), (1, -1), (1, -2, -3, 4, -5)])
def test_a_marked_save_is_not_uploaded(tmp_path, store, rules, numbers):
    """Before, between and after healthy ones, under the name of a healthy one, and alone; also not at the end."""
    with Checkpointer(tmp_path, config(store, rules)) as ckpt:
        save(ckpt, *numbers)
    healthy = [step for step in numbers if step > 0]
    expected = healthy[-1:] if rules.get("keep_last") and not rules.get("keep_every_steps") else healthy
    assert set(expected) >= set(there(store)) >= set(healthy[-1:])
    assert there(store) == expected or rules.get("keep_every_steps") == 2


@each_rule
def test_a_healthy_one_that_waits_is_not_pushed_out_by_a_marked_one(tmp_path, store, rules):
    """The store is away for some saves: the healthy one of them comes when it is back."""
    with Checkpointer(tmp_path, config(store, rules)) as ckpt:
        store.before = no_answer
        save(ckpt, 1, -2, -3)
        store.before = None
    assert there(store) == [1]


def test_a_marked_one_is_no_successor_for_which_others_are_deleted(tmp_path, store):
    """With ``required`` what the mirror does not have stays here, however many marked ones follow."""
    with Checkpointer(tmp_path, config(store, {"required": True, "keep_last": 1}, keep_last=1)) as ckpt:
        store.before = no_answer
        save(ckpt, 1, -2, 3, -4)
        assert {"step-00000001", "step-00000003"} <= set(steps(tmp_path))
        store.before = None
        save(ckpt, 5)
    assert there(store) == [5]


@each_rule
def test_one_that_is_resumed_from_by_name_is_not_uploaded(tmp_path, store, rules):
    """By a job with a mirror, where an earlier one had none; a healthy one is."""
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=PATIENT)) as ckpt:
        save(ckpt, 1, -2)
    with Checkpointer(tmp_path, config(store, rules)) as ckpt:
        assert ckpt.resume(state(0), step=2).marked
    assert there(store) == []
    with Checkpointer(tmp_path, config(store, rules)) as ckpt:
        assert ckpt.resume(state(0)).step == 1
    assert there(store) == [1]


@each_rule
def test_a_lost_disk_comes_back_healthy(tmp_path, store, rules):
    """The last saves were marked: the next job gets the last healthy one from the mirror."""
    with Checkpointer(tmp_path / "run", config(store, rules)) as ckpt:
        save(ckpt, 1, 2, -3, -4)
    shutil.rmtree(tmp_path / "run")
    with Checkpointer(tmp_path / "run", config(store, rules)) as ckpt:
        assert ckpt.resume(target := state(0)).step == 2
    assert target["w"]["t"].equal(state(2)["w"]["t"])


@pytest.mark.parametrize("action", ["warn", "off"])
def test_where_nothing_is_marked_all_is_uploaded(tmp_path, store, action):
    """With these the user has said that such a checkpoint is as good as any."""
    with Checkpointer(tmp_path, config(store, {}, action=action)) as ckpt:
        ckpt.save(1, state(1)).result()
        assert not ckpt.save(2, state(-2)).result().marked
    assert there(store) == [1, 2]
