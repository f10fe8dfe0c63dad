"""What a mirror decides: what may be deleted here, what goes up again, what is given up, and what it says of two runs."""

import logging
import shutil
import threading
import time

import pytest
import torch
from small_runs import steps, uploads_of, wait_for_mirror

from kit.inside import upload_at_once
from kit.limits import PATIENT
from kit.memory_store import MemoryStore, no_answer
from kit.patience import wait_until
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, events
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.errors import MirrorBehindError
from safe_ckpt.testing import inline_saves

PATIENTLY = Bucket._pause  # which a store in this process replaces


@pytest.fixture
def store(monkeypatch):
    with inline_saves():
        yield MemoryStore(monkeypatch)


@pytest.fixture
def at_once(monkeypatch):
    upload_at_once(monkeypatch)


def config(store, keep_last=None, **mirror):
    made = Mirror(url=store.url(), **mirror)
    return CheckpointConfig(timeouts=PATIENT, mirror=made, retention=Retention(keep_last=keep_last))


def save(ckpt, *numbers):
    for step in numbers:
        ckpt.save(step, {"w": {"t": torch.full((4,), float(step))}}, metrics={"loss": step}).result(timeout_s=60)


def here(folder):
    return [int(name[5:]) for name in steps(folder)]


def there(store):
    return sorted(one["step"] for one in store.manifests().values())


@pytest.mark.usefixtures("at_once")
def test_a_mirror_further_behind_than_it_may_be_is_the_error_of_a_save(tmp_path, store):
    """With how far and why; that save is committed, and so are the next. Where the store answers again, all is well."""
    with Checkpointer(tmp_path, config(store, max_behind=2)) as ckpt:
        save(ckpt, 1)
        store.before = no_answer
        save(ckpt, 2, 3, 4)
        with pytest.raises(MirrorBehindError, match="no answer") as caught:
            save(ckpt, 5)
        assert (caught.value.behind, caught.value.limit) == (3, 2)
        assert caught.value.path == str(tmp_path / "step-00000005")
        assert here(tmp_path) == [1, 2, 3, 4, 5]
        store.before = None
        with pytest.raises(MirrorBehindError):
            save(ckpt, 6)  # it was behind when this was written; after that this one goes up
        save(ckpt, 7, 8)
        assert there(store)[-1] == 8


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("uploaded", [False, True])
def test_with_required_one_goes_as_soon_as_it_is_in_the_mirror(tmp_path, store, uploaded):
    """No newer one need be there: the store may be away from then on. One that is not in the mirror stays."""
    with Checkpointer(tmp_path, config(store, keep_last=1, required=True)) as ckpt:
        store.before = None if uploaded else no_answer
        save(ckpt, 1)
        store.before = no_answer
        save(ckpt, 2)
        assert here(tmp_path) == ([2] if uploaded else [1, 2])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_with_required_those_of_an_earlier_job_go_when_a_newer_one_is_in_the_mirror(tmp_path, store, away, resumes):
    """They were saved without a mirror, and count like this job's own: none goes before one of the directory is there."""
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=PATIENT)) as ckpt:
        save(ckpt, 1, 2)
    with Checkpointer(tmp_path, config(store, keep_last=1, required=True)) as ckpt:
        if resumes:
            ckpt.resume({"w": {"t": torch.zeros(4)}})
            assert there(store) == [2]
        store.before = no_answer if away else None
        save(ckpt, 3, 4)
        assert here(tmp_path) == ([4] if not away else [3, 4] if resumes else [1, 2, 3, 4])


@pytest.mark.usefixtures("at_once")
def test_with_required_one_of_an_earlier_job_stays_while_only_an_older_one_is_in_the_mirror(tmp_path, store):
    """The job goes on from an older step, which goes up, and the store is away: the newer one is nowhere else."""
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=PATIENT)) as ckpt:
        save(ckpt, 1, 2)
    with Checkpointer(tmp_path, config(store, keep_last=1, required=True)) as ckpt:
        ckpt.resume({"w": {"t": torch.zeros(4)}}, step=1)
        assert there(store) == [1]
        store.before = no_answer
        save(ckpt, 3, 4)
        assert here(tmp_path) == [2, 3, 4]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("saves", [False, True])
def test_a_job_that_goes_on_from_what_is_mirrored_takes_and_uploads_nothing(tmp_path, store, saves):
    """It is there: nothing is written to the store, not even who has it, before this job has something new."""
    with Checkpointer(tmp_path, config(store)) as ckpt:
        save(ckpt, 1)
    before = {key: store.read(key) for key in store.keys("")}
    shutil.rmtree(tmp_path / "step-00000001")
    for _ in range(2):  # from the mirror, and then from what is here and in the mirror
        with Checkpointer(tmp_path, config(store)) as ckpt:
            assert ckpt.resume({"w": {"t": torch.zeros(4)}}).step == 1
            assert {key: store.read(key) for key in store.keys("")} == before
    if saves:
        with Checkpointer(tmp_path, config(store)) as ckpt:
            save(ckpt, 2)
        assert there(store) == [1, 2]


@pytest.mark.parametrize("over", ["it is closed", "a signal's time is over"])
def test_when_the_job_is_over_a_store_that_is_away_is_not_asked_again(tmp_path, store, monkeypatch, over):
    """Each request would be tried again for minutes: that is given up, with the reason, and no thread is left."""
    monkeypatch.setattr(Bucket, "_pause", PATIENTLY)
    asked, seen = threading.Event(), []

    def away(verb, key):
        asked.set()
        no_answer(verb, key)

    with Checkpointer(tmp_path, config(store), hooks=[seen.append]) as ckpt:
        store.before = away
        save(ckpt, 1)
        assert asked.wait(30)
        uploads = uploads_of(ckpt)
        if over == "it is closed":
            uploads.drain(within_s=0.0)
        else:
            uploads.stop_by = time.monotonic()
        errors = wait_until(lambda: [one.error for one in seen if isinstance(one, events.Mirrored)], 30, "the end")
        assert "the job is over" in errors[0]
        store.before = None


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("moved", "warned"), [("a", False), ("b", True)])
def test_a_run_that_goes_on_from_another_directorys_mirror_is_told(tmp_path, store, caplog, moved, warned):
    """One url for two runs is a mistake that would look like a resume; the same directory on another machine is none."""
    with Checkpointer(tmp_path / "one/a", config(store)) as ckpt:
        save(ckpt, 1)
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path / "two" / moved, config(store)) as ckpt:
        assert ckpt.resume({"w": {"t": torch.zeros(4)}}).step == 1
    assert ("was mirrored from a directory 'a'" in caplog.text) is warned


def test_a_mirror_that_another_job_has_is_refused_by_the_owners_name(tmp_path, store):
    """Two live jobs with one url: the second one's error says what has it, and how that is ended. The first goes on."""
    seen = []
    with Checkpointer(tmp_path / "one", config(store)) as first:
        save(first, 1)
        wait_for_mirror(first)
        with Checkpointer(tmp_path / "two", config(store), hooks=[seen.append]) as second:
            save(second, 2)
            errors = wait_until(lambda: [one.error for one in seen if isinstance(one, events.Mirrored)], 30, "an error")
        save(first, 3)
        wait_for_mirror(first)
    assert "Checkpointer" in errors[0]
    assert "close()" in errors[0]
    assert there(store) == [1, 3]
