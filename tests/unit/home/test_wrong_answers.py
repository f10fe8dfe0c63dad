"""A store that answers wrongly once: nothing is condemned, replaced or begun anew because of one read."""

import contextlib
import dataclasses
import re
import threading

import pytest
import torch

from kit.fault_proxy import FaultProxy
from kit.inside import fall_silent, judge_owners, ownership, put_owners_elsewhere
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.config import Mirror
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home.objects import head as object_head
from safe_ckpt.core.home.objects.head import Head, folders_of, list_objects, read_head
from safe_ckpt.core.home.objects.home import ObjectHome
from safe_ckpt.core.home.objects.lock import owner_of, take_directory_away
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.fetch import fetch
from safe_ckpt.tools.inspection.listing import read_listing

HEAD = ".safe_ckpt/head"
AGAIN = "reads disagreed, try again"
WRONG = {
    "flipped": lambda body: body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :],
    "short": lambda body: body[: len(body) // 2],
    "empty": lambda _: b"",
    "absent": lambda _: None,
}


class Liar:
    """Answers the first so many requests that match wrongly."""

    def __init__(self, match, change, times=1):
        self.match, self.change, self.left, self.told = match, change, times, 0
        self._lock = threading.Lock()

    def __call__(self, record, body):
        with self._lock:
            asked = record.method == "GET" or (record.method == "HEAD" and self.change is WRONG["absent"])
            if not asked or not self.match(record) or not self.left:
                return body
            self.left, self.told = self.left - 1, self.told + 1
        return self.change(body)


def is_list(record):
    return "list-type" in record.path and "delimiter" in record.path


def of(name):
    """Requests for an object whose key ends so."""
    return lambda record: record.path.partition("?")[0].endswith(name)


def without(*steps):
    """A list that lacks these."""

    def change(body):
        for step in steps:
            body = re.sub(rb"<CommonPrefixes><Prefix>[^<]*step-0*%d\.[^<]*</Prefix></CommonPrefixes>" % step, b"", body)
        return body

    return change


@pytest.fixture
def proxy(bucket, monkeypatch):
    with FaultProxy(bucket.endpoint) as proxy:
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def place(bucket, proxy):
    return open_place(bucket.url(), StorageOptions(give_up_after_s=20, request_timeout_s=2))


@pytest.fixture
def briefly(monkeypatch):
    """An old list is looked at as often as always, in less time."""
    monkeypatch.setattr(object_head, "_PAUSES_S", (0.01, 0.01, 0.01, None))


@pytest.fixture
def elsewhere(monkeypatch):
    """Every owner looks like one on another host: only its signs of life count."""
    put_owners_elsewhere(monkeypatch)


def state(value):
    return {"w": {"t": torch.ones(4) * value}, "n": value}


def run(bucket, *steps):
    with Checkpointer(bucket.url()) as ckpt:
        for step in steps:
            ckpt.save(step, state(step)).result(timeout_s=30)


def resumed(bucket):
    """The step that a new job goes on from; None for none."""
    with Checkpointer(bucket.url()) as ckpt:
        info = ckpt.resume(state(0))
        return None if info is None else info.step


def opened(place, **more):
    patience_s = more.pop("patience_s", None)
    root = ObjectHome(place, lease_s=more.pop("lease_s", 60), **more)
    root.open(patience_s)
    return root


def announced(root, step):
    """A save that is under way: its folder has an object, and no manifest."""
    manifest = Manifest(name=f"step-{step}", sequence=root.next_sequence(), step=step, world_size=1)
    folder = root.place(manifest.name, manifest.op_id)
    root.announce(folder, manifest.sequence)
    root.path.bucket.overwrite((folder / "x").key, b"data")
    return folder, manifest


@pytest.mark.parametrize("lacking", [(3,), (2, 3), (1, 2, 3)], ids=str)
def test_an_old_list_is_no_answer(bucket, proxy, place, briefly, lacking):
    """A list that lacks what the head names is read again; one that stays so is an error, never an older step or none."""
    run(bucket, 1, 2, 3)
    for times in (1, 2):
        proxy.rewrite = liar = Liar(is_list, without(*lacking), times)
        assert (resumed(bucket), liar.told) == (3, times)
    for _ in range(2):
        proxy.rewrite = Liar(is_list, without(*lacking), 1)
        assert [one.manifest.step for one in read_listing(place).standing.usable] == [3, 2, 1]
    before = place.bucket.entries(place.key)
    proxy.rewrite = Liar(is_list, without(*lacking), 1000)
    for look in (resumed, lambda _: list_objects(place), lambda _: read_listing(place)):
        with pytest.raises(DirectoryError, match=f"{AGAIN}: its head names step-.*3.* delete .*{HEAD}"):
            look(bucket)
    proxy.rewrite = None
    assert [entry.key for entry in place.bucket.entries(place.key)] == [entry.key for entry in before]
    assert resumed(bucket) == 3


def test_an_old_list_without_a_killed_jobs_commit_is_noticed(bucket, proxy, place, monkeypatch):
    """It died before its head said so: both the next owner and who only looks know of it all the same."""
    run(bucket, 1)
    root = opened(place)
    folder, manifest = announced(root, 2)
    fall_silent(root)
    root.commit(folder, manifest.to_bytes())
    assert read_head(place).pending == (folder.name,)
    proxy.rewrite = Liar(is_list, without(2), 1)
    assert [one.manifest.step for one in read_listing(place).standing.usable] == [2, 1]
    judge_owners(monkeypatch, "dead")
    again = opened(place)
    assert read_head(place).committed[-1] == folder.name
    proxy.rewrite = Liar(is_list, without(1, 2), 1)
    assert sorted(one.manifest.step for one in list_objects(place)) == [1, 2]
    again.close()


def test_where_nothing_was_committed_a_run_starts_afresh(bucket, place):
    """A first save that failed, or was killed, leaves nothing to miss; nor does what was quarantined, replaced or deleted."""
    root = opened(place)
    folder, _ = announced(root, 1)
    root.drop(folder)
    announced(root, 2)
    root.close()
    assert resumed(bucket) is None
    run(bucket, 1, 1, 2)
    root = opened(place)
    newest = next(one.path for one in list_objects(place) if one.manifest.step == 2)
    root.quarantine(newest)
    root.close()
    assert resumed(bucket) == 1


def test_a_head_of_an_earlier_version_is_believed_with_care(bucket, place, proxy, briefly):
    """It names no checkpoints and has no digest: what it says counts, and an empty list below it does not."""
    run(bucket, 1)
    head = dataclasses.replace(read_head(place), committed=None)
    old = re.sub(rb', "committed": null', b"", re.sub(rb', "digest": "\w+"', b"", head.to_bytes()))
    assert Head.from_bytes(old) == head
    for lies, outcome in ((1, 1), (1000, DirectoryError)):
        place.bucket.overwrite((place / HEAD).key, old)
        proxy.rewrite = Liar(is_list, without(1), lies)
        with pytest.raises(outcome, match=AGAIN) if outcome is DirectoryError else contextlib.nullcontext():
            assert resumed(bucket) == outcome


@pytest.mark.parametrize("wrong", WRONG)
def test_one_wrong_read_of_the_head_replaces_nobody(place, proxy, elsewhere, wrong):
    """A live owner stays the owner, for another job, for itself and for the command; what a killed one left goes."""
    root = opened(place, lease_s=6)
    folder, manifest = announced(root, 1)
    proxy.rewrite = liar = Liar(of(HEAD), WRONG[wrong])
    with pytest.raises(DirectoryInUseError, match=r"lease ends in [56] s|it is alive"):
        opened(place, patience_s=0.1)
    assert liar.told == 1
    proxy.rewrite = Liar(of(HEAD), WRONG[wrong])
    assert owner_of(place).lease_s == 6
    assert root.taken_over() is None
    root.commit(folder, manifest.to_bytes())
    announced(root, 2)
    proxy.rewrite = liar = Liar(of(HEAD), WRONG[wrong])
    take_directory_away(place, unfenced=False)
    assert (liar.told, read_head(place).lease) == (1, None)
    proxy.rewrite = liar = Liar(of(HEAD), WRONG[wrong])
    again = opened(place)
    assert liar.told == 1
    assert [one.name for one in folders_of(place) if len(place.bucket.entries((place / one.name).key)) > 1] == [
        folder.name
    ]
    again.close()
    fall_silent(root)


def test_an_old_state_of_the_head_replaces_nobody(place, proxy, elsewhere):
    """The owner reads the head of the one before it: another connection has to say so, too. That is how a takeover is seen."""
    first = opened(place)
    first.close()
    old = place.bucket.read((place / HEAD).key)[0]
    root = opened(place)
    proxy.rewrite = liar = Liar(of(HEAD), lambda _: old)
    assert (root.taken_over(), liar.told) == (None, 1)
    announced(root, 1)
    fall_silent(root)
    take_directory_away(place, unfenced=False)
    assert "took the directory over" in str(root.taken_over())


def test_two_wrong_reads_that_differ_decide_nothing(bucket, place, proxy):
    """Of a head or a manifest: an error that says to try again, and nothing is written, moved or replaced."""
    run(bucket, 1, 2)
    before = {entry.key for entry in place.bucket.entries(place.key)}
    for name in (HEAD, "manifest.json"):
        cuts = iter(range(10, 1000))
        proxy.rewrite = Liar(of(name), lambda body, cuts=cuts: body[: next(cuts)], 1000)
        with pytest.raises(DirectoryError, match=AGAIN):
            resumed(bucket)
    proxy.rewrite = None
    assert before == {entry.key for entry in place.bucket.entries(place.key)}
    assert resumed(bucket) == 2


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["manifest.json", "n.json", "w.safetensors"])
def test_one_wrong_read_condemns_no_checkpoint(bucket, place, proxy, tmp_path, wrong, name):
    """Of a manifest or a payload: a resume takes the newest, nothing is quarantined, passed over, or called damaged."""
    run(bucket, 1, 2)
    (newest,) = (one.path for one in list_objects(place) if one.manifest.step == 2)

    def lie():
        proxy.rewrite = Liar(of(f"{newest.name}/{name}"), WRONG[wrong])
        return proxy.rewrite

    looks = {
        "list": lambda: [one.manifest.step for one in read_listing(place).standing.usable] == [2, 1],
        "verify": lambda: verify_tasks([plan_tasks(newest)])[0].state == "valid",
        "fetch": lambda: fetch(newest, tmp_path).is_dir(),
        "resume": lambda: resumed(bucket) == 2,
    }
    for what, look in looks.items():
        liar = lie()
        assert look(), what
        assert liar.told == 1 or (what == "list" and name != "manifest.json"), what
    proxy.rewrite = None
    assert read_head(place).quarantined == ()


def test_a_manifest_said_once_not_to_be_there_is_asked_for_again(bucket, place, proxy, monkeypatch):
    """A folder whose manifest is said not to be there, once, is no folder that nobody knows; gc would delete it."""
    run(bucket, 1)
    (folder,) = folders_of(place)
    place.bucket.delete([(place / HEAD).key])
    proxy.rewrite = Liar(of(f"{folder.name}/manifest.json"), WRONG["absent"])
    listing = read_listing(place)
    assert (listing.unknown, len(listing.standing.usable)) == ((), 1)


def test_an_upload_that_one_list_lacks_fails_no_save(bucket, proxy):
    """One list that does not have it yet fails no save."""
    with Checkpointer(bucket.url()) as ckpt:
        empty = Liar(lambda record: "list-type" in record.path and "step-" in record.path, without_contents)
        proxy.rewrite = empty
        ckpt.save(1, state(1)).result(timeout_s=30)
        assert empty.told == 1


def without_contents(body):
    return re.sub(rb"<Contents>.*</Contents>", b"", body, flags=re.DOTALL)


@pytest.mark.parametrize("cut_off", ["everything", "replacing"])
def test_an_outage_is_not_the_silence_of_the_owner(bucket, place, proxy, elsewhere, monkeypatch, cut_off):
    """The store answers nobody for longer than the lease: the owner has its time afterwards, and the waiting job is refused."""
    lease_s, down, over, looked, replaced = 1.5, *(threading.Event() for _ in range(4))
    root = opened(place, lease_s=lease_s)
    with FaultProxy(bucket.endpoint) as other:
        for name, value in bucket.environment(other.endpoint).items():
            monkeypatch.setenv(name, value)
        near = open_place(bucket.url(), StorageOptions(give_up_after_s=20, request_timeout_s=2))

        def of_owner(record):
            if over.is_set() and record.method == "PUT":
                looked.wait(5)  # the other job is quicker to see that the store is back
                replaced.wait(0.3)
            return not down.is_set() or (cut_off == "replacing" and record.method != "PUT")

        def of_waiting(record):
            replaced.set() if over.is_set() and record.method == "PUT" else None
            return not down.is_set() or (cut_off == "replacing" and record.method != "PUT")

        def ends():
            down.clear()
            over.set()

        def answered(record):
            if over.is_set():
                looked.set()
            elif not down.is_set() and record.method == "GET":
                down.set()
                threading.Timer(1.4 * lease_s, ends).start()  # how long the outage is

        proxy.on_request, other.on_request, other.on_answer = of_owner, of_waiting, answered
        with pytest.raises(DirectoryInUseError, match="it is alive"):
            opened(near, lease_s=lease_s)
        assert over.is_set()
        folder, manifest = announced(root, 1)
        root.commit(folder, manifest.to_bytes())
        root.close()


def test_an_owner_that_is_gone_is_replaced_after_an_outage(place, proxy, elsewhere):
    """An outage makes the wait longer, and not endless."""
    root = opened(place, lease_s=1.5)
    fall_silent(root)
    timer = threading.Timer(0.5, lambda: setattr(proxy, "down", False))
    proxy.down = True
    timer.start()
    opened(place, lease_s=1.5).close()


@pytest.mark.parametrize("moment", ["list-type", "manifest.json"])
def test_a_replaced_owner_that_wakes_up_names_the_new_one(bucket, place, proxy, monkeypatch, moment):
    """Its objects were swept away while it stood still: the error is that another job has the directory, and which."""
    taken, again = threading.Event(), []

    def held(record):
        if "step-" in record.path and moment in record.path and not taken.is_set():
            taken.set()
            with monkeypatch.context() as dead:
                judge_owners(dead, "dead")
                again.append(opened(place))

    with Checkpointer(bucket.url(), CheckpointConfig(lease_s=60)) as ckpt:
        proxy.on_request = held
        with pytest.raises(DirectoryInUseError, match="took the directory over") as caught:
            ckpt.save(1, state(1)).result(timeout_s=30)
        assert caught.value.started_at == ownership(again[0]).head.lease.started_at
        proxy.on_request = None
    again[0].close()


def test_an_object_that_the_store_cannot_find_to_copy_is_sent(bucket, proxy):
    """The store does not find what it should copy, or the copy: the bytes are read and sent, and the save is whole."""
    frozen = torch.nn.Linear(600, 600).requires_grad_(requires_grad=False)
    with Checkpointer(bucket.url()) as ckpt:
        ckpt.save(1, {"m": frozen, "n": 1}).result(timeout_s=30)
        first = True

        def copied(record):
            return record.method == "PUT" and "x-amz-copy-source" in record.headers

        def lie(record, body):
            nonlocal first
            lies, first = first and copied(record), first and not copied(record)
            return None if lies else body

        proxy.rewrite = lie
        ckpt.save(2, {"m": frozen, "n": 2}).result(timeout_s=30)
        assert not first
        assert ckpt.resume({"m": torch.nn.Linear(600, 600), "n": 0}).step == 2


def mirrored(bucket, folder):
    return Checkpointer(folder, CheckpointConfig(mirror=Mirror(url=bucket.url())))


@pytest.mark.parametrize("wrong", ["an old list", "manifest.json", "w.safetensors"])
def test_a_mirror_that_answers_wrongly_once_gives_its_newest(bucket, proxy, tmp_path, briefly, wrong):
    """On a fresh machine the newest is fetched, and nothing older; a list that stays empty is an error, and no fresh start."""
    with mirrored(bucket, tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).result(timeout_s=30)
    (newest,) = (one for one in bucket.keys("run/step-00000002") if one.endswith("manifest.json"))
    at = of(newest.replace("manifest.json", wrong))
    proxy.rewrite = liar = Liar(is_list, without(1, 2)) if wrong == "an old list" else Liar(at, WRONG["flipped"])
    with mirrored(bucket, tmp_path / "again" / "run") as ckpt:
        assert ckpt.resume(state(0)).step == 2
        assert liar.told == 1
    proxy.rewrite = Liar(is_list, without(1, 2), 1000)
    with (
        mirrored(bucket, tmp_path / "third" / "run") as ckpt,
        pytest.raises(DirectoryError, match=AGAIN),
    ):
        ckpt.resume(state(0))
    proxy.rewrite = None
