"""What did not change is copied by the object store itself, and what did is never taken for it."""

import dataclasses
import logging
import random

import pytest
import torch
from frozen_jobs import FROZEN, SIZE, STORAGE, Job, delete, digest, is_copy
from frozen_jobs import store_config as config
from frozen_jobs import stored as checked
from small_runs import wait_for_mirror

from kit import object_servers
from kit.fault_proxy import FaultProxy
from kit.inside import copy_all_tensors
from kit.thorough import THOROUGH
from safe_ckpt import (
    CheckpointConfig,
    Checkpointer,
    Health,
    Mirror,
    events,
)
from safe_ckpt.core.formats import file_plan
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import SafeCheckpointError

SEEDS = 40 if THOROUGH else 3
FAULTS = [
    ("drop", "before"),
    ("drop", "after"),
    ("reset", "after"),
    ("503", "before"),
    ("500", "after"),
    ("truncated", "after"),
]
QUARTER = 4 * SIZE * SIZE


@pytest.fixture
def proxy(bucket, monkeypatch):
    """Between the job and the store; ``sent`` tells how many bytes went through since it was asked last."""
    with FaultProxy(bucket.endpoint) as made:
        for name, value in bucket.environment(made.endpoint).items():
            monkeypatch.setenv(name, value)

        def sent():
            made.settle()
            size = sum(record.size for record in made.seen if record.method == "PUT")
            made.reset()
            return size

        made.sent = sent
        yield made


def frozen_keys(bucket):
    return sorted(key.split("/")[1].split(".")[0] for key in bucket.keys("run/") if key.endswith(FROZEN))


@pytest.mark.parametrize("inline", [0, 64 << 20], ids=["process", "thread"])
def test_a_frozen_part_is_sent_once(proxy, bucket, inline):
    """Each later checkpoint has an object of its own with it, which the store made; also after a resume and a deletion."""
    job, sent, written = Job(), [], []

    def hook(event):
        if isinstance(event, events.Written):
            written.append(event.size_bytes)

    with Checkpointer(bucket.url(), config(keep=2, inline=inline), hooks=[hook]) as ckpt:
        proxy.sent()
        for number in (1, 2, 3, 4):
            job.step()
            ckpt.save(number, job.state).result(timeout_s=30)
            sent.append(proxy.sent())
    other = Job()
    with Checkpointer(bucket.url(), config(keep=2, inline=inline)) as ckpt:
        assert ckpt.resume(other.state).step == 4
        assert digest(other.model) == digest(job.model)
        other.step()
        proxy.sent()
        ckpt.save(5, other.state).result(timeout_s=30)
        sent.append(proxy.sent())
    assert sent[0] > QUARTER
    assert max(sent[1:]) < 200_000, sent
    assert max(written[1:]) < 200_000, written
    assert list(checked(bucket)) == ["step-00000004", "step-00000005"]
    with Checkpointer(bucket.url(), config()) as ckpt:
        third = Job()
        assert ckpt.resume(third.state).step == 5
    assert digest(third.model) == digest(other.model)


def test_a_tensor_that_the_writer_finds_unchanged_is_copied_in_the_store(proxy, bucket, monkeypatch):
    """As on a GPU: it is copied to the snapshot, and to the next object by the store."""
    copy_all_tensors(monkeypatch)
    job, sent = Job(), []
    with Checkpointer(bucket.url(), config(keep=1)) as ckpt:
        for number in range(1, 5):
            job.step()
            proxy.sent()
            ckpt.save(number, job.state).result(timeout_s=30)
            sent.append(proxy.sent() > QUARTER)
        other = Job()
        ckpt.resume(other.state)
    assert digest(other.model) == digest(job.model)
    assert sent == [True, False, False, False]


@pytest.mark.parametrize("kind", object_servers.KINDS)
def test_each_kind_of_store_copies_what_did_not_change(tmp_path, monkeypatch, kind):
    """moto, MiniStack and Azurite copy, and what they made is read back whole."""
    if why := object_servers.missing(kind):
        pytest.skip(why)
    job = Job()
    with object_servers.start(kind, tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        written = []

        def hook(event):
            if isinstance(event, events.Written):
                written.append(event.size_bytes)

        with Checkpointer(server.url(), config(), hooks=[hook]) as ckpt:
            for number in (1, 2, 3):
                job.step()
                ckpt.save(number, job.state).result(timeout_s=30)
            other = Job()
            assert ckpt.resume(other.state).step == 3
        assert digest(other.model) == digest(job.model)
        assert max(written[1:]) < 200_000


def test_a_store_that_makes_no_copies_gets_the_bytes(proxy, bucket):
    """It answers 501: the object is read, compared and sent. Then all comes from memory, and it is tried less and less."""
    job, sent = Job(), []
    with Checkpointer(bucket.url(), config()) as ckpt:
        for number in (1, 2, 3, 4):
            job.step()
            proxy.sent()
            for nth in range(1, 5):
                proxy.plan(nth, "501", match=is_copy)
            ckpt.save(number, job.state).result(timeout_s=30)
            copies = [record for record in proxy.seen if is_copy(record)]
            sent.append((proxy.sent() > QUARTER, len(copies)))
    assert sent == [(True, 0), (True, 1), (True, 0), (True, 1)]
    assert len(checked(bucket)) == 4


def test_other_bytes_than_were_written_fail_the_save_and_not_the_next_one(proxy, bucket):
    """Somebody overwrote the object, and it is read because the store makes no copies."""
    job = Job()
    with Checkpointer(bucket.url(), config()) as ckpt:
        ckpt.save(1, job.state).result(timeout_s=30)
        (key,) = [key for key in bucket.keys("run/") if key.endswith(FROZEN)]
        place = open_place(bucket.url(), StorageOptions(give_up_after_s=10))
        data = bytearray(place.bucket.read(key)[0])
        data[-1] ^= 1
        place.bucket.overwrite(key, bytes(data))
        proxy.sent()
        for nth in range(1, 5):
            proxy.plan(nth, "501", match=is_copy)
        with pytest.raises(SafeCheckpointError, match="whose bytes are not those that were written"):
            ckpt.save(2, job.state).result(timeout_s=30)
        ckpt.save(3, job.state).result(timeout_s=30)
    assert "step-00000002" not in {key.split("/")[1].split(".")[0] for key in bucket.keys("run/")}
    proxy.sent()
    with Checkpointer(bucket.url(), config()) as ckpt:
        other = Job()
        assert ckpt.resume(other.state).step == 3
    assert digest(other.model) == digest(job.model)


def test_a_source_that_somebody_deleted_is_looked_for_further_back(bucket):
    """The newest checkpoint is gone, an older one has the same bytes. If all are gone that save fails, and says why."""
    job = Job()
    with Checkpointer(bucket.url(), config()) as ckpt:
        for number in (1, 2):
            ckpt.save(number, job.state).result(timeout_s=30)
        delete(bucket, "run/step-00000002")
        ckpt.save(3, job.state).result(timeout_s=30)
        delete(bucket, "run/step-")
        with pytest.raises(SafeCheckpointError, match="what it is a copy of is gone"):
            ckpt.save(4, job.state).result(timeout_s=30)
        ckpt.save(5, job.state).result(timeout_s=30)
    assert list(checked(bucket)) == ["step-00000005"]


def test_bytes_that_change_and_change_back_in_flight_are_whole(proxy, bucket):
    """A, B, A in three saves of which two are in flight, and retention keeps one: no save relies on what is being deleted."""
    proxy.slow_s = 0.02
    frozen = torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
    first, second = (torch.randn(SIZE, SIZE) for _ in range(2))
    with Checkpointer(bucket.url(), config(keep=1, in_flight=2)) as ckpt:
        handles = []
        for number, weight in enumerate([first, first, second, first, first, second, first, first], 1):
            frozen.weight.data.copy_(weight)
            handles.append(ckpt.save(number, {"teacher": frozen}))
        for handle in handles:
            handle.result(timeout_s=60)
        ckpt.wait()
    assert list(checked(bucket)) == ["step-00000008"]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_programs_give_back_what_was_saved(bucket, monkeypatch, seed):
    """Frozen, thawed and changed in place, several in flight, few kept, restarted: by hash, every time."""
    draw = random.Random(seed)
    if seed % 3 == 1:  # as on a GPU
        copy_all_tensors(monkeypatch)
    job, saved = Job(), {}
    settings = config(
        keep=draw.choice([1, 2, None]), in_flight=draw.choice([1, 2, 3]), full_every=draw.choice([None, 3])
    )
    number = 0
    for _ in range(2):
        with Checkpointer(bucket.url(), settings) as ckpt:
            if saved:
                blank = Job()
                step = ckpt.resume(blank.state).step
                assert digest(blank.model) == saved[step]
                job = blank
            for _ in range(draw.randint(3, 6)):
                number += 1
                what = draw.choice(["nothing", "nothing", "data", "thaw", "freeze", "back", "step"])
                weight = job.model.base.weight
                if what == "data":
                    weight.data.view(-1)[draw.randrange(weight.numel())] += 1
                elif what in ("thaw", "freeze"):
                    job.model.base.requires_grad_(what == "thaw")
                elif what == "back":
                    kept = weight.detach().clone()
                    weight.data.zero_()
                    ckpt.save(number, job.state)
                    saved[number] = digest(job.model)
                    number += 1
                    weight.data.copy_(kept)
                else:
                    job.step()
                ckpt.save(number, job.state)
                saved[number] = digest(job.model)
            ckpt.wait()
    with Checkpointer(bucket.url(), settings) as ckpt:
        for name in checked(bucket):
            step = int(name.removeprefix("step-"))
            blank = Job()
            assert ckpt.resume(blank.state, step=step).step == step
            assert digest(blank.model) == saved[step], step


def test_large_frozen_parts_are_several_objects(bucket, monkeypatch):
    """S3 copies at most 5 GiB at once: each object has at most so much, here 2 MiB, and all are read again."""
    monkeypatch.setattr(file_plan, "FROZEN_BYTES", 2 << 20)
    layers = [torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(SIZE, 2))
    teacher = torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE) for _ in range(2)]).requires_grad_(requires_grad=False)
    state, written = {"model": model, "teacher": teacher}, []

    def hook(event):
        if isinstance(event, events.Written):
            written.append(event.size_bytes)

    with Checkpointer(bucket.url(), config(), hooks=[hook]) as ckpt:
        for number in (1, 2):
            with torch.no_grad():
                model[3].weight += 1
            ckpt.save(number, state).result(timeout_s=30)
        expected = digest(model), digest(teacher)
        for part in (model, teacher):
            torch.nn.utils.vector_to_parameters(
                torch.zeros(sum(p.numel() for p in part.parameters())), part.parameters()
            )
        ckpt.resume(state)
        assert (digest(model), digest(teacher)) == expected
    manifest = checked(bucket)["step-00000002"]
    names = {entry.path for entry in manifest.files if entry.age}
    assert names == {
        *(f"model-0000{number}-of-00004.safetensors" for number in (2, 3, 4)),
        *(f"teacher-0000{number}-of-00002.safetensors" for number in (1, 2)),
    }
    assert written[1] < 100_000


def test_nothing_is_shared_where_that_is_turned_off(proxy, bucket):
    """``share: false`` and an alarm of the numbers: all is sent, and nothing copied."""
    job = Job()
    for settings in (config(share=False), CheckpointConfig(storage=STORAGE, health=Health(action="warn"))):
        with Checkpointer(bucket.url(), settings) as ckpt:
            if settings.unchanged.share:
                job.model.base.weight.data[0, 0] = float("nan")
            for number in (1, 2):
                ckpt.save(number, job.state).result(timeout_s=30)
        assert not [record for record in proxy.seen if is_copy(record)]


def test_a_lost_answer_to_a_copy_is_made_up_for(proxy, bucket, caplog):
    """Before and after it reached the store: the request is sent again, the object is there once."""
    job = Job()
    caplog.set_level(logging.ERROR)
    with Checkpointer(bucket.url(), config()) as ckpt:
        for number, (fault, when) in enumerate(FAULTS, 1):
            proxy.reset()
            proxy.plan(1, fault, when, match=is_copy)
            ckpt.save(number, job.state).result(timeout_s=30)
            assert len(proxy.hits) == (number > 1)
    assert len(checked(bucket)) == 6
    assert not caplog.records


def test_a_mirror_sends_an_unchanged_part_once(proxy, bucket, tmp_path):
    """At the next start once more, unless a fresh machine has fetched and verified it; each folder of the mirror is whole."""
    job, sent = Job(), []
    settings = dataclasses.replace(config(keep=2), mirror=Mirror(url=bucket.url(), keep_last=2, follow=True))
    for numbers in ((1, 2, 3), (4, 5)):
        with Checkpointer(tmp_path / "one", settings) as ckpt:
            ckpt.resume(job.state)
            for number in numbers:
                job.step()
                ckpt.save(number, job.state).result(timeout_s=30)
        sent.append(proxy.sent())
    assert all(QUARTER < size < 2 * QUARTER for size in sent), sent
    assert "step-00000005" in frozen_keys(bucket)
    checked(bucket)
    with Checkpointer(tmp_path / "two", settings) as ckpt:
        other = Job()
        assert ckpt.resume(other.state).step == 5
        assert digest(other.model) == digest(job.model)
        ckpt.save(6, job.state).result(timeout_s=30)
    assert proxy.sent() < 200_000
    assert "step-00000006" in checked(bucket)


@pytest.mark.parametrize("gone", ["deleted", "no copies", "full_every"])
def test_a_mirror_sends_what_cannot_be_copied(proxy, bucket, tmp_path, gone):
    """Somebody deleted the copy, the store makes none, or what was written anew is to be sent anew."""
    job, sent = Job(), []
    full_every = 2 if gone == "full_every" else None
    settings = dataclasses.replace(config(full_every=full_every), mirror=Mirror(url=bucket.url()))
    proxy.sent()
    for nth in range(1, 5):
        proxy.plan(nth, "501", match=lambda record: gone == "no copies" and is_copy(record))
    with Checkpointer(tmp_path / "one", settings) as ckpt:
        for number in (1, 2, 3, 4):
            ckpt.save(number, job.state).result(timeout_s=30)
            wait_for_mirror(ckpt)
            if gone == "deleted" and number == 1:
                delete(bucket, "run/step-00000001")
    copies = [record for record in proxy.seen if is_copy(record)]
    sent.append(proxy.sent() // QUARTER)
    assert sent == [{"deleted": 3, "no copies": 4, "full_every": 2}[gone]], copies
    assert set(checked(bucket)) >= {"step-00000002", "step-00000003"}
