"""What is fetched is what a resume goes on from: it stays, and a store that fails on the way says nothing about it.

Then no older one is taken, and no run starts afresh.
"""

import itertools
import json

import pytest
import torch
from small_runs import steps
from typer.testing import CliRunner

import safe_ckpt
from kit.inside import upload_at_once
from kit.limits import PATIENT
from kit.memory_store import ERRORS, MemoryStore
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror
from safe_ckpt.errors import CheckpointNotFoundError, NoValidCheckpointError
from safe_ckpt.testing import inline_saves
from safe_ckpt.tools.cli.app import app

pytestmark = pytest.mark.usefixtures("inline")
NEWEST, FILES = 3, 2
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
LAST = FILES - 1


@pytest.fixture
def inline(monkeypatch):
    upload_at_once(monkeypatch)
    with inline_saves():
        yield


@pytest.fixture
def store(monkeypatch):
    return MemoryStore(monkeypatch)


def state(value):
    return {"model": {"w": torch.full((4,), float(value))}, "step": value}


def mirrored(store):
    return CheckpointConfig(timeouts=PATIENT, mirror=Mirror(url=store.url()))


def run(folder, config, *numbers):
    with Checkpointer(folder, config) as ckpt:
        for step in numbers:
            ckpt.save(step, state(step)).result()


def damage(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def nothing(folder, store):
    """An empty disk."""
    run(folder.with_name("first"), mirrored(store), 1, 2, NEWEST)


def all_damaged(folder, store):
    """The newest is here, and is damaged."""
    run(folder, mirrored(store), 1, 2, NEWEST)
    for step in steps(folder)[:-1]:
        (folder / step).rename(folder.parent / step)
    damage(folder / "step-00000003")


def older_damaged(folder, store):
    """One that is older is here, and is damaged."""
    run(folder, mirrored(store), 1, 2, NEWEST)
    for step in steps(folder)[1:]:
        (folder / step).rename(folder.parent / step)
    damage(folder / "step-00000001")


def failing(store, error, moment, *, times):
    """So many reads of a checkpoint's bytes fail, from the ``moment``-th on."""
    left = itertools.count()

    def before(verb, key):
        if verb == "get_range" and "manifest" not in key and moment <= next(left) < moment + times:
            raise error("the store failed")

    store.before = before


PLACES = [*itertools.product([nothing, all_damaged, older_damaged], [None, NEWEST], [1, 1000])]
CASES = [
    *[(error, moment, nothing, None, 1000) for error in ERRORS for moment in range(FILES)],
    *[(ERRORS[at % len(ERRORS)], LAST, *place) for at, place in enumerate(PLACES)],
]


@pytest.mark.parametrize(("error", "moment", "here", "step", "times"), CASES)
def test_no_resume_goes_on_from_an_older_one(tmp_path, store, error, moment, here, step, times):
    """Where nothing here can be used it is the store's error, or the newest all the same; the next resume takes the newest."""
    here(tmp_path / "run", store)
    target = state(0)
    failing(store, error, moment, times=times)
    failure = None
    with Checkpointer(tmp_path / "run", mirrored(store)) as ckpt:
        try:
            info = ckpt.resume(target, step=step)
        except OSError as problem:
            failure = problem
    if failure is None:
        assert times == 1
        assert (info.step, target["step"]) == (NEWEST, NEWEST)
    else:
        assert not isinstance(failure, NoValidCheckpointError | CheckpointNotFoundError)
        assert target["step"] == 0
    store.before = None
    with Checkpointer(tmp_path / "run", mirrored(store)) as ckpt:
        assert ckpt.resume(target, step=step).step == NEWEST
    assert target["model"]["w"].equal(state(NEWEST)["model"]["w"])


@each_error
def test_what_is_here_is_taken_rather_than_an_older_one_from_the_store(tmp_path, store, error):
    """It is sound, and newer than what the store gives besides; the newest is fetched by the next resume."""
    run(tmp_path / "run", mirrored(store), 1, 2, NEWEST)
    (tmp_path / "run/step-00000003").rename(tmp_path / "away")
    failing(store, error, LAST, times=1000)
    with Checkpointer(tmp_path / "run", mirrored(store)) as ckpt:
        assert ckpt.resume(state(0)).step == 2
        store.before = None
        assert ckpt.resume(state(0)).step == NEWEST


@each_error
@pytest.mark.parametrize("way", ["resume", "load", "resume-path --fetch"])
def test_a_root_in_a_store_that_fails_is_the_stores_error(tmp_path, store, error, way):
    """Nothing older, nothing in quarantine, and nothing at the place to which it was to be fetched."""
    run(store.url(), CheckpointConfig(timeouts=PATIENT), 1, NEWEST)
    target = state(0)

    def act():
        if way == "load":
            return safe_ckpt.load(store.url(), target)
        with Checkpointer(store.url(), CheckpointConfig(timeouts=PATIENT)) as ckpt:
            return ckpt.resume(target)

    def fetched():
        return CliRunner().invoke(app, ["resume-path", store.url(), "--fetch", str(tmp_path / "to"), "--json"])

    failing(store, error, LAST, times=1000)
    if way == "resume-path --fetch":
        done = fetched()
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr
        assert not list((tmp_path / "to").glob("step-*"))
        store.before = None
        assert json.loads(fetched().stdout)["path"].endswith("step-00000003")
        return
    with pytest.raises(OSError) as found:
        act()
    assert not isinstance(found.value, NoValidCheckpointError | CheckpointNotFoundError)
    assert target["step"] == 0
    store.before = None
    assert act().step == target["step"] == NEWEST


@pytest.mark.parametrize("gone", [["model.safetensors"], ["model.safetensors", "step.json"]])
def test_a_copy_of_which_something_is_gone_is_damaged_and_is_passed_over(tmp_path, store, gone):
    """That is what the store says of the checkpoint itself, as often as it is asked."""
    nothing(tmp_path / "run", store)

    def before(verb, key):
        if verb == "get_range" and "step-00000003" in key and key.rpartition("/")[2] in gone:
            raise FileNotFoundError(2, "no such object", key)

    store.before = before
    with Checkpointer(tmp_path / "run", mirrored(store)) as ckpt:
        assert ckpt.resume(state(0)).step == 2


DAMAGES = {
    "bytes": {3: "bytes"},
    "manifest": {3: "manifest"},
    "all": {1: "bytes", 2: "bytes", 3: "bytes"},
    "all, each in its way": {1: "bytes", 2: "manifest", 3: "bytes"},
    "but the oldest": {2: "manifest", 3: "bytes"},
}


@pytest.mark.parametrize("step", [None, NEWEST])
@pytest.mark.parametrize("damages", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside a sound one"])
def test_what_a_resume_has_taken_is_in_its_place_and_what_was_damaged_in_quarantine(
    tmp_path, store, damages, step, alone
):
    """Also where the one was fetched under the name of the other. All that is not damaged stays, and a second resume moves
    nothing.
    """
    folder = tmp_path / "run"
    run(folder, mirrored(store), 1, 2, NEWEST)
    for number in (1, 2, 3):
        path = folder / f"step-{number:08d}"
        if number in damages:
            spoil(path, damages[number])
        elif alone:
            path.rename(tmp_path / path.name)
    before = set(steps(folder))
    with Checkpointer(folder, mirrored(store)) as ckpt:
        info = ckpt.resume(state(0), step=step)
        assert info.path.is_dir()
        sound = {f"step-{number:08d}" for number in (1, 2, 3) if number not in damages}
        kept = quarantined(folder)
        assert set(kept) == before - set(steps(folder)) - sound | (
            {info.name} & before if info.name not in sound else set()
        )
        assert sound & before <= set(steps(folder))
        again = ckpt.resume(state(0), step=info.step)
        assert (again.op_id, quarantined(folder)) == (info.op_id, kept)
    verified = CliRunner().invoke(app, ["verify", str(info.path)])
    assert verified.exit_code == 0, verified.output


def spoil(path, how):
    if how == "bytes":
        return damage(path)
    file = path / "manifest.json"
    return file.write_bytes(file.read_bytes().replace(b'"op_id"', b'"op_ie"'))


def quarantined(folder):
    return sorted(path.name for path in (folder / ".safe_ckpt/quarantine").glob("*"))


AWAY = [*itertools.product([nothing, all_damaged, older_damaged], ["what there is", "a manifest"], [None, NEWEST])]


@pytest.mark.parametrize(
    ("error", "here", "asked", "step"), [(ERRORS[n % len(ERRORS)], *one) for n, one in enumerate(AWAY)]
)
def test_a_store_that_is_away_makes_no_run_a_fresh_one(tmp_path, store, error, here, asked, step):
    """Nothing here can be used, and what the store has is not known: that is an error, and nothing is restored or moved."""
    here(tmp_path / "run", store)
    before = steps(tmp_path / "run") if (tmp_path / "run").exists() else []

    def fail(verb, key):
        if verb.startswith("list") if asked == "what there is" else key.endswith("/manifest.json"):
            raise error("the store failed")

    target = state(0)
    with Checkpointer(tmp_path / "run", mirrored(store)) as ckpt:
        store.before = fail
        with pytest.raises(OSError, match=r"the store failed|no answer") as caught:
            ckpt.resume(target, step=step)
        assert not isinstance(caught.value, NoValidCheckpointError | CheckpointNotFoundError)
        store.before = None
        assert target["step"] == 0
        assert steps(tmp_path / "run") == before
        assert ckpt.resume(target, step=step).step == NEWEST
