"""A directory in an object store: one owner, commits that a takeover decides, and nothing left behind."""

import contextlib
import dataclasses
import json
import os
import threading
import time
import uuid

import pytest

from kit.fault_proxy import FaultProxy
from kit.inside import fall_silent, judge_owners, ownership, put_owners_elsewhere
from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.home.objects import head as object_head
from safe_ckpt.core.home.objects import lock as object_lock
from safe_ckpt.core.home.objects.head import Head, folders_of, list_objects, missing_condition
from safe_ckpt.core.home.objects.home import ObjectHome, UndecidedError
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.storage.objects import bucket as buckets
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.core.storage.objects.clients import ExistsError
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import (
    CorruptCheckpointError,
    DirectoryError,
    DirectoryInUseError,
    ForkedError,
    UnsupportedFormatError,
)


@pytest.fixture(params=["memory", pytest.param("server", marks=pytest.mark.server)])
def place(request, monkeypatch):
    """In a store in this process, and in one that a server has."""
    options = StorageOptions(give_up_after_s=5, request_timeout_s=2)
    if request.param == "server":
        return open_place(request.getfixturevalue("bucket").url(), options)
    store = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(buckets, "connect", lambda *_: store)
    return open_place(f"s3://{uuid.uuid4().hex}", options)


@pytest.fixture
def elsewhere(monkeypatch):
    """Every owner looks like one on another host: only its signs of life count."""
    put_owners_elsewhere(monkeypatch)


def opened(place, **more):
    root = ObjectHome(place, lease_s=more.pop("lease_s", 60), **more)
    root.open()
    return root


def save(root, step, *, commit=True, data=b"data"):
    manifest = Manifest(name=f"step-{step}", sequence=root.next_sequence(), step=step, world_size=1)
    folder = root.place(manifest.name, manifest.op_id)
    root.announce(folder, manifest.sequence)
    root.path.bucket.overwrite((folder / "x").key, data)
    entry = FileEntry(path="x", size_bytes=len(data), xxh3_128="0" * 32, rank=0)
    manifest = dataclasses.replace(manifest, files=(entry,))
    if commit:
        root.commit(folder, manifest.to_bytes())
    return folder, manifest


def age_tombstone(folder):
    """As if it had been set eight days ago."""
    key = (folder / "manifest.json").key
    stone = json.loads(folder.bucket.read(key)[0])
    stone["buried_at"] = time.time() - 8 * 24 * 3600
    folder.bucket.overwrite(key, json.dumps(stone).encode())


def names(place):
    return sorted(one.manifest.name for one in list_objects(place) if one.manifest is not None)


def test_a_head_comes_back_from_its_bytes_as_it_was():
    """Every change is another version; what is no head of ours, or newer, is None."""
    lease = own_lease(token="t", started_at="now", lease_s=1.0)
    head = Head().taken(lease).announced("a", 7).announced("b", 9).deleting(["b", "c"]).settled(["a"]).quarantining("d")
    head = head.heartbeat().seen_to_be_conditional()
    assert Head.from_bytes(head.to_bytes()) == head
    assert (head.version, head.fence, head.sequence, head.pending, head.trash) == (8, 1, 9, (), ("b", "c"))
    assert Head.from_bytes(head.released().to_bytes()).lease is None
    for bad in (b"", b"[]", b"{}", b'{"format": "safe_ckpt-head", "format_version": "x"}', head.to_bytes()[:-20]):
        assert Head.from_bytes(bad) is None
    assert len(Head().deleting([str(n) for n in range(500)]).trash) == 500  # what is being deleted is never forgotten
    for number in range(300):
        head = head.deleting([str(number)])
    assert head.trash[-1] == "299"
    assert len(head.trash) == 100
    with pytest.raises(UnsupportedFormatError, match="update safe_ckpt"):
        Head.from_bytes(Head().to_bytes().replace(b'"format_version": 1', b'"format_version": 2'))


def test_a_second_job_is_refused_while_the_first_lives(place, elsewhere):
    """By a sign of life, not by the name of its host; when it has gone, at once."""
    first = opened(place, lease_s=1.2)
    with pytest.raises(DirectoryInUseError, match="alive"):
        ObjectHome(place, lease_s=1.2).open()
    first.close()
    opened(place).close()


def test_a_lease_that_ran_out_is_taken_over(place, elsewhere):
    """An owner that shows no sign of life loses the directory; it can commit nothing more, and says who has it."""
    first = opened(place, lease_s=60)
    fall_silent(first)  # as if it were stopped
    save(first, 1)
    folder, manifest = save(first, 2, commit=False)
    ownership(first).head = dataclasses.replace(ownership(first).head)
    place.bucket.overwrite((place / ".safe_ckpt/head").key, _with_lease(ownership(first).head, 0.3))
    second = opened(place, lease_s=60)
    with pytest.raises(DirectoryInUseError, match="took the directory over"):
        first.commit(folder, manifest.to_bytes())
    with pytest.raises(DirectoryInUseError):
        first.announce(first.place("step-3", "0" * 32), 3)
    with pytest.raises(DirectoryInUseError):
        first.discard([folder])
    assert names(place) == ["step-1"]
    assert [entry.key for entry in place.bucket.entries(folder.key)] == [
        (folder / "manifest.json").key
    ]  # the tombstone
    save(second, 3)
    assert names(place) == ["step-1", "step-3"]
    second.close()


def _with_lease(head, lease_s):
    return dataclasses.replace(
        head, version=head.version + 1, lease=dataclasses.replace(head.lease, lease_s=lease_s)
    ).to_bytes()


def test_a_commit_before_the_takeover_counts(place, monkeypatch):
    """The manifest was created, and the owner died before the head said so."""
    first = opened(place)
    folder, manifest = save(first, 1, commit=False)
    place.bucket.create((folder / "manifest.json").key, manifest.to_bytes())
    judge_owners(monkeypatch, "dead")
    second = opened(place)
    assert names(place) == ["step-1"]
    assert ownership(second).head.pending == ()
    second.close()


def test_one_of_sixteen_that_start_at_once_owns_the_head(place, monkeypatch):
    """Of sixteen that start at the same time exactly one owns it, also when they take over from a dead one."""
    monkeypatch.setattr(object_lock, "fate_of_process", lambda lease: "dead" if lease.token == gone else "alive")
    gone = ""
    for _ in range(2):
        roots = [ObjectHome(place, lease_s=60) for _ in range(16)]
        outcomes = []

        def take(root, outcomes=outcomes):
            with contextlib.suppress(DirectoryInUseError):
                root.open()
                outcomes.append(root)

        threads = [threading.Thread(target=take, args=(root,)) for root in roots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 1
        fall_silent(outcomes[0])
        gone = ownership(outcomes[0]).head.lease.token


def test_a_failed_save_leaves_nothing(place):
    """What another rank still sent after that goes before the next save; the folder never comes back."""
    root = opened(place)
    folder, manifest = save(root, 1, commit=False)
    root.drop(folder)
    place.bucket.overwrite((folder / "late").key, b"late")
    save(root, 2)
    assert place.bucket.entries(folder.key) == []
    root.close()
    assert names(place) == ["step-2"]


def test_an_answer_that_never_comes_is_decided_or_unknown(place, monkeypatch):
    """Without an answer to the commit a tombstone decides; without one to that, the error says that it is not known."""
    root = opened(place)
    folder, manifest = save(root, 1, commit=False)
    real = root._create
    monkeypatch.setattr(root, "_create", _failing(real, times=1))
    with pytest.raises(TimeoutError):
        root.commit(folder, manifest.to_bytes())
    root.drop(folder)
    assert names(place) == []
    folder, manifest = save(root, 2, commit=False)
    real(folder / "manifest.json", manifest.to_bytes(), place.bucket)
    monkeypatch.setattr(root, "_create", _failing(real, times=1))
    root.commit(folder, manifest.to_bytes())
    folder, manifest = save(root, 3, commit=False)
    monkeypatch.setattr(root, "_create", _failing(real, times=2))
    with pytest.raises(UndecidedError):
        root.commit(folder, manifest.to_bytes())
    monkeypatch.undo()
    root.close()
    assert names(place) == ["step-2"]


def _failing(real, times):
    left = [times]

    def create(*args):
        if left[0]:
            left[0] -= 1
            raise TimeoutError(110, "no answer", "s3://x")
        return real(*args)

    return create


def test_a_step_saved_again_is_another_folder(place):
    """The old one is there until the new one is committed, and is what the catalog wants deleted then."""
    root = opened(place)
    old, _ = save(root, 1)
    catalog = Catalog(list_objects(place))
    new, manifest = save(root, 1, data=b"other")
    from safe_ckpt.core.formats.manifest import CheckpointInfo

    assert catalog.add(CheckpointInfo.of(manifest, new, 5)) == [old]
    assert root.discard([old]) == [old]
    assert folders_of(place) == [new]
    root.close()


def test_a_delayed_request_brings_nothing_back(place, monkeypatch):
    """The manifest of a deleted checkpoint that arrives once more is no checkpoint, and the next start deletes it."""
    root = opened(place)
    old, manifest = save(root, 1)
    save(root, 2)
    root.discard([old])
    place.bucket.create((old / "manifest.json").key, manifest.to_bytes())
    assert names(place) == ["step-2"]
    root.close()
    opened(place).close()
    assert place.bucket.entries(old.key) == []


def test_a_list_without_what_the_head_names_is_an_old_one_also_after_a_deletion(place, monkeypatch):
    """Never an older step, or none: an error names what it lacks, and nothing of what was deleted or is damaged."""
    monkeypatch.setattr(object_head, "_PAUSES_S", (0.01, None))
    root = opened(place)
    folders = [save(root, step)[0] for step in (1, 2, 3, 4)]
    root.discard(folders[:1])
    root.quarantine(folders[2])
    monkeypatch.setattr(Bucket, "list_folders", lambda *_: [])
    with pytest.raises(DirectoryError, match=r"its head names step-2\.\w+, step-4\.\w+, and no list"):
        list_objects(place)
    root.close()


def test_a_damaged_checkpoint_in_a_store_is_kept_in_quarantine(place):
    """In quarantine it is no candidate, and stays; a manifest that was altered is reported, not believed."""
    root = opened(place)
    folder, _ = save(root, 1)
    assert root.quarantine(folder) == folder
    assert (names(place), root.quarantined()) == ([], [folder])
    other, manifest = save(root, 2)
    place.bucket.overwrite((other / "manifest.json").key, manifest.to_bytes().replace(b'"step": 2', b'"step": 3'))
    (found,) = list_objects(place)
    assert found.damaged
    with pytest.raises(CorruptCheckpointError):
        read_manifest(other)
    root.close()


def test_a_head_that_was_deleted_or_damaged_is_begun_anew(place):
    """By hand or by a rule of the bucket: a running job goes on; what it left stays, for nobody knows whose it is."""
    root = opened(place)
    save(root, 1)
    place.bucket.delete([(place / ".safe_ckpt/head").key])
    folder, _ = save(root, 2, commit=False)
    place.bucket.overwrite((place / ".safe_ckpt/head").key, b"rubbish")
    fall_silent(root)
    again = opened(place)
    assert names(place) == ["step-1"]
    assert [entry.key for entry in place.bucket.entries(folder.key)] == [
        (folder / n).key for n in ("manifest.json", "x")
    ]
    with pytest.raises(DirectoryInUseError):  # where it would become a checkpoint, a tombstone stands
        root.commit(folder, b"{}")
    again.close()
    age_tombstone(folder)
    opened(place).close()
    assert place.bucket.read((folder / "x").key)[0] == b"data"  # also when the tombstone has gone


def test_folders_of_other_programs_are_not_deleted(place, caplog):
    """Another program's folders may have names like ours: the first job at an address, and later ones, leave them alone."""
    theirs = ["worker.3f2504e04f89/log.txt", "worker.3f2504e04f89/manifest.json", "data.0123456789ab/part"]
    for key in theirs:
        place.bucket.overwrite((place / key).key, b"theirs")
    for _ in range(2):
        root = opened(place)
        save(root, 1)
        root.close()
    assert {entry.key for entry in place.bucket.entries(place.key)} >= {(place / key).key for key in theirs}
    assert [one for one in caplog.messages if "data.0123456789ab" in one]


def test_a_manifest_of_another_program_is_named_as_that(place):
    """A listing has the folder with the reason, says no checkpoint of ours is damaged, and asks no caller to skip it."""
    place.bucket.overwrite((place / "worker.3f2504e04f89/manifest.json").key, b'{"name": "an app"}')
    (found,) = list_objects(place, on_error=lambda *_: pytest.fail("it can be looked at"))
    assert (found.foreign, found.damaged, found.manifest) == (True, False, None)
    assert found.problem == "its manifest was not written by safe_ckpt"


def test_a_start_that_the_store_does_not_answer_says_what_was_asked_and_on_which_rank(place, monkeypatch):
    """The error has the rank, what was done, and the address."""
    monkeypatch.setattr(Bucket, "read", lambda *_: (_ for _ in ()).throw(TimeoutError("no answer")))
    with pytest.raises(DirectoryError, match="no answer") as caught:
        ObjectHome(place, lease_s=60).open(patience_s=0)
    assert (caught.value.rank, caught.value.phase, caught.value.path) == (0, "taking the directory", str(place))


def test_a_kill_within_120_deletions_leaves_no_file_without_a_manifest(place, monkeypatch):
    """120 checkpoints are deleted at once, and the job dies in between: what has no manifest any more has no files either."""
    root = opened(place)
    folders = [save(root, step)[0] for step in range(120)]
    delete, done = root._delete_folder, []

    def dies(folder, **more):
        if len(done) == 60:
            raise SystemExit
        done.append(folder)
        delete(folder, **more)

    monkeypatch.setattr(root, "_delete_folder", dies)
    with pytest.raises(SystemExit):
        root.discard(folders)
    judge_owners(monkeypatch, "dead")
    again = opened(place)
    keys = {entry.key for entry in place.bucket.entries(place.key)}
    committed = {one.path.key for one in list_objects(place)}
    assert {key.rpartition("/")[0] for key in keys if key.endswith("/x")} == committed
    assert len(committed) < 60
    again.close()


def test_a_store_that_fails_within_a_deletion_leaves_no_manifest(place, monkeypatch):
    """After the first request of a deletion the store is gone, and the job with it: what is left is no checkpoint, so no resume
    tries it, and the next start takes it away.
    """
    root = opened(place)
    old, _ = save(root, 1)
    save(root, 2)
    real, asked = Bucket.delete, []

    def dies_behind_the_first(bucket, keys):
        if asked:
            raise SystemExit
        asked.append(keys)
        real(bucket, keys)

    with monkeypatch.context() as away:
        away.setattr(Bucket, "delete", dies_behind_the_first)
        with pytest.raises(SystemExit):
            root.discard([old])
    assert [entry.key for entry in place.bucket.entries(old.key)] == [(old / "x").key]
    assert [one.path for one in list_objects(place) if one.path == old] == []
    judge_owners(monkeypatch, "dead")
    opened(place).close()
    assert place.bucket.entries(old.key) == []
    assert names(place) == ["step-2"]


def test_a_commit_that_came_through_late_stays(place, monkeypatch):
    """The store answered neither the commit nor the questions after it; the next save finds the checkpoint and keeps it."""
    root = opened(place)
    folder, manifest = save(root, 1, commit=False)

    def lost(*_, **__):
        raise TimeoutError("no answer")

    with monkeypatch.context() as away:
        away.setattr(Bucket, "create", lost)
        with pytest.raises(UndecidedError):
            root.commit(folder, manifest.to_bytes())
        root.drop(folder)
    place.bucket.create((folder / "manifest.json").key, manifest.to_bytes())
    save(root, 2)
    assert names(place) == ["step-1", "step-2"]
    assert (folder / "x").key in {entry.key for entry in place.bucket.entries(folder.key)}
    root.close()


def test_a_prefix_this_process_could_not_give_back_can_be_opened_again(place, monkeypatch):
    """The store was away when the directory was closed: the same process may open it again at once."""
    root = opened(place)
    with monkeypatch.context() as away:
        away.setattr(ownership(root), "update", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("no answer")))
        root.close()
    opened(place).close()


def test_a_hanging_request_does_not_cost_the_directory(bucket, elsewhere, monkeypatch):
    """One sign of life gets no answer for longer than the lease: those that follow do, and another job is refused."""
    with FaultProxy(bucket.endpoint) as proxy:
        proxy.hold_s = 20
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        near = open_place(bucket.url(), StorageOptions(give_up_after_s=5, request_timeout_s=30))
        root = opened(near, lease_s=3.0)
        begun = len(proxy.seen)
        proxy.plan(1, "timeout", match=lambda record: record.method == "PUT" and record.number > begun)
        with pytest.raises(DirectoryInUseError, match="alive"):
            ObjectHome(near, lease_s=3.0).open()
        assert proxy.hits
        root.close()


def test_a_request_in_a_forked_child_raises_forked_error(place):
    """It has none of the client's threads: an error, and no wait without end."""
    place.bucket.overwrite((place / "x").key, b"x")
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            place.bucket.read((place / "x").key)
        except ForkedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"forked child" in os.read(read, 1000)


def test_tombstones_are_deleted_after_a_week(place, monkeypatch):
    """No request is on its way for so long."""
    root = opened(place)
    folder, _ = save(root, 1, commit=False)
    judge_owners(monkeypatch, "dead")
    opened(place)
    assert [one.name for one in folders_of(place)] == [folder.name]
    age_tombstone(folder)
    last = opened(place)
    save(last, 2, commit=False)
    opened(place).close()
    assert folder not in folders_of(place)


@pytest.mark.parametrize(
    ("condition", "without"),
    [
        ("If-None-Match", ("create", lambda bucket, key, data: bucket.overwrite(key, data))),
        ("If-Match", ("replace", lambda bucket, key, data, _: bucket.overwrite(key, data))),
    ],
)
def test_a_store_without_conditions_is_refused(place, monkeypatch, condition, without):
    """It is tried, not believed, and the object of the trial is gone."""
    assert missing_condition(place) == ""
    monkeypatch.setattr(Bucket, *without)
    with pytest.raises(DirectoryError, match=rf"{condition}\b.*storage\.unfenced"):
        ObjectHome(place, lease_s=60).open()
    assert folders_of(place) == []


def test_a_store_is_tried_once(place, monkeypatch):
    """Not by each job: the head says that its conditions were kept."""
    opened(place).close()
    monkeypatch.setattr(Bucket, "replace", lambda bucket, key, data, _: bucket.overwrite(key, data))
    opened(place).close()


def test_what_the_trial_of_a_store_could_not_delete_goes_at_the_next_start(place, monkeypatch):
    """The store made the object and deletes nothing: the head names the object, as after a kill in between."""
    with monkeypatch.context() as away:
        away.setattr(Bucket, "delete", lambda *_: (_ for _ in ()).throw(TimeoutError("no answer")))
        with pytest.raises(DirectoryError, match="no answer"):
            ObjectHome(place, lease_s=60).open()
    assert len(folders_of(place)) == 1
    opened(place).close()
    assert folders_of(place) == []


def test_unfenced_takes_a_store_without_conditions(place, monkeypatch):
    """It saves as ever, and looks whether a manifest is there where no condition would tell."""
    monkeypatch.setattr(Bucket, "create", Bucket.overwrite)
    root = opened(place, unfenced=True)
    folder, manifest = save(root, 1)
    with pytest.raises(ExistsError):
        root.commit(folder, b"{}")
    root.close()
    assert names(place) == ["step-1"]
    assert read_manifest(folder).op_id == manifest.op_id
    assert place.bucket.read((folder / "x").key)[0] == b"data"
