"""The commands on addresses of object stores, against a server: what they say of a directory, and what they leave alone."""

import dataclasses
import json
import subprocess
import sys
import threading

import pytest
import torch
import xxhash
from typer.testing import CliRunner

from kit.object_servers import missing, start
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror
from safe_ckpt.core.formats import manifest
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.home.objects.head import TOMBSTONE, Head
from safe_ckpt.core.home.objects.home import ObjectHome
from safe_ckpt.core.resuming import host_cache
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.errors import DirectoryInUseError, SafeCheckpointError
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.inspection.files import place_at

LEFT = "step-00000009.0123456789ab"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if why := missing("ministack"):
        pytest.skip(why)
    with start("ministack", tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def store(server, monkeypatch):
    """A bucket of its own, and the environment in which it is found."""
    bucket = server.new_bucket()
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


def run(command, *args):
    done = CliRunner().invoke(app, [command, *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def told(command, *args):
    """What a command prints as JSON."""
    return json.loads(run(command, *args, "--json").stdout)


def save(url, *steps, size=10):
    with Checkpointer(url) as ckpt:
        for step in steps:
            state = {"w": {"t": torch.ones(size) * step}, "n": step}
            ckpt.save(step, state, metrics={"loss": 1 / step}).result(timeout_s=20)
    return {row["step"]: place_at(url) / row["name"] for row in told("list", url)}


def put(place, data):
    place.bucket.overwrite(place.key, data)


def flip(place, at):
    data = bytearray(place.bucket.read(place.key)[0])
    data[at] ^= 1
    put(place, bytes(data))


def rewrite_manifest(checkpoint, **changes):
    """A manifest that says something else, and is in order."""
    place = checkpoint / "manifest.json"
    facts = {**json.loads(place.bucket.read(place.key)[0]), **changes}
    facts.pop("digest")
    put(place, json.dumps({**facts, "digest": manifest._digest(facts)}).encode())


def change_head(url, **changes):
    """Replace facts in the head."""
    place = place_at(url) / ".safe_ckpt/head"
    head = Head.from_bytes(place.bucket.read(place.key)[0])
    put(place, dataclasses.replace(head, version=head.version + 1, **changes).to_bytes())


def lease(fate):
    """Of this process, of one that is gone, or of one that cannot be looked at."""
    own = own_lease(token="t", started_at="2026-01-01T00:00:00+00:00", lease_s=60.0)
    if fate == "dead":
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        return dataclasses.replace(own, pid=gone.pid, process_start=1)
    return own if fate == "alive" else dataclasses.replace(own, host="elsewhere", kernel="another")


@pytest.fixture
def requests(monkeypatch):
    """The lengths of ranges that are read, and how many were under way at a time."""
    seen = {"lengths": [], "most": 0, "now": 0}
    lock, read = threading.Lock(), Bucket.read_range

    def counted(self, key, start, length):
        with lock:
            seen["lengths"].append(length)
            seen["now"] += 1
            seen["most"] = max(seen["most"], seen["now"])
        try:
            return read(self, key, start, length)
        finally:
            with lock:
                seen["now"] -= 1

    monkeypatch.setattr(Bucket, "read_range", counted)
    return seen


def test_every_state_of_a_checkpoint_is_listed(store):
    """Newest first, then damaged, partial and quarantined ones. What has a tombstone is none. The owner is not disturbed."""
    url = store.url()
    there = save(url, 1, 2, 3, 4)
    with Checkpointer(url):
        flip(there[2] / "manifest.json", 60)
        put(place_at(url) / LEFT / "w.safetensors", b"x")
        put(place_at(url) / "step-00000008.0123456789ab/w.safetensors", b"x")
        put(place_at(url) / "step-00000007.0123456789ab/manifest.json", json.dumps({"format": TOMBSTONE}).encode())
        change_head(url, pending=(LEFT,), quarantined=(there[3].name, "step-00000006.0123456789ab"))
        before = store.keys()
        rows = told("list", url)
        assert store.keys() == before
        assert [(row["name"], row["state"]) for row in rows] == [
            (there[4].name, "valid"),
            (there[1].name, "valid"),
            (there[2].name, "damaged"),
            (LEFT, "partial"),
            ("step-00000008.0123456789ab", "partial"),
            (there[3].name, "quarantined"),
        ]
        assert "no job says that it is its own" in rows[4]["reason"]
        assert rows[0]["metrics"] == {"loss": 0.25}
    assert f"{there[4].name}  4" in run("list", url).stdout


def test_a_newer_format_in_a_store_stops_the_commands(store):
    """Listed as unreadable with status 1; resume-path, verify and gc say so and do nothing."""
    url = store.url()
    there = save(url, 1, 2)
    rewrite_manifest(there[2], format_version=99)
    assert [row["state"] for row in told("list", url)] == ["valid", "unreadable"]
    before = store.keys("run/step-")
    for command in ("list", "resume-path", "verify", "gc"):
        done = run(command, url)
        assert (done.exit_code, "99 is newer than" in done.output) == (1, True), command
    assert store.keys("run/step-") == before


def change(place, damage):
    if damage == "bytes":
        flip(place / "w.safetensors", 4100)
    elif damage == "cut":
        put(place / "w.safetensors", place.bucket.read((place / "w.safetensors").key)[0][:-1])
    elif damage == "missing":
        place.bucket.delete([(place / "n.json").key])
    elif damage == "manifest":
        flip(place / "manifest.json", 60)
    elif damage == "foreign":
        put(place / "manifest.json", b"{}")
    elif damage == "more":
        put(place / "more/of.it", b"x")


@pytest.mark.parametrize("damage", ["", "bytes", "cut", "missing", "manifest", "foreign", "more"])
def test_verify_says_what_it_says_of_a_directory(store, tmp_path, damage):
    """The same bytes here and there: the same verdict, words, figures and exit status."""
    place = save(store.url(), 3)[3]
    change(place, damage)
    copy = tmp_path / place.name
    for key in store.keys(place.key):
        file = copy / key[len(place.key) + 1 :]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(store.read(key))
    there, here = run("verify", place, "--json"), run("verify", copy, "--json")
    assert there.exit_code == here.exit_code == (0 if damage in ("", "more") else 1)
    assert json.loads(there.stdout.replace(str(place), str(copy))) == json.loads(here.stdout)
    lines = [run("verify", where).stdout for where in (place, copy)]
    assert lines[0].replace(str(place), str(copy)) == lines[1]


def test_verify_takes_directories_and_addresses_together(store, tmp_path):
    """Every checkpoint of each is judged; an address where nothing is, and a save that was never committed, are none."""
    url = store.url()
    there = save(url, 1, 2)
    save_here = tmp_path / "here"
    with Checkpointer(save_here) as ckpt:
        ckpt.save(5, {"n": 5}).result(timeout_s=20)
    done = run("verify", url, save_here)
    assert done.exit_code == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["valid", str(there[1])],
        ["valid", str(there[2])],
        ["valid", str(save_here / "step-00000005")],
    ]
    put(place_at(url) / LEFT / "manifest.json", json.dumps({"format": TOMBSTONE}).encode())
    for nothing, why in ((f"{url}/nothing", "there is no checkpoint"), (f"{url}/{LEFT}", "was never committed")):
        done = run("verify", nothing)
        assert (done.exit_code, why in done.output) == (1, True)


def test_verify_says_what_it_could_not_read_and_verifies_the_others(store):
    """As of a directory: one of a newer format is named, and the others are verified all the same."""
    saved = save(store.url("run"), 1, 2, 3)
    rewrite_manifest(saved[2], format_version=99)
    done = run("verify", store.url("run"), "--json")
    states = {row["path"]: row["state"] for row in json.loads(done.stdout)}
    assert done.exit_code == 1
    assert states == {str(saved[1]): "valid", str(saved[2]): "unreadable", str(saved[3]): "valid"}


def test_verify_keeps_a_few_parts_in_memory(store, requests):
    """Large objects are read by ranges, several at a time, but of no more than two objects."""
    place = save(store.url(), 1)[1]
    large = bytes(40 << 20)
    entries = []
    for name in "abc":
        put(place / name, large)
        digest = xxhash.xxh3_128(large).hexdigest()
        entries.append({"path": name, "size_bytes": len(large), "xxh3_128": digest, "rank": 0})
    rewrite_manifest(place, files=entries)
    assert told("verify", place)[0]["state"] == "valid"
    assert sum(requests["lengths"]) == 3 * len(large)
    assert max(requests["lengths"]) == 8 << 20
    assert 2 <= requests["most"] <= 8


def test_inspect_reads_headers_alone(store, requests):
    """The manifest's facts, the files, tensors with their types and shapes; of other files it says how to see more."""
    url = store.url()
    with Checkpointer(url) as ckpt:
        state = {
            "w": {"t": torch.ones(1 << 20, dtype=torch.bfloat16)},
            "n": 7,
            "o": {"p": [torch.ones(3)], "q": {1, 2}},
        }
        ckpt.save(7, state).result(timeout_s=20)
    place = place_at(url) / told("list", url)[0]["name"]
    facts = told("inspect", place)
    assert (facts["kind"], facts["step"], facts["world_size"]) == ("safe_ckpt directory", 7, 1)
    assert {file["path"] for file in facts["files"]} >= {"w.safetensors", "n.json"}
    assert [(one["name"], one["dtype"], one["shape"]) for one in facts["tensors"]] == [("w:t", "bfloat16", [1 << 20])]
    assert {"name": "n:", "value": 7, "text": "7"} in facts["values"]
    assert sum(requests["lengths"]) < 100_000
    done = run("inspect", place, "--match", "w*")
    assert "w.safetensors" in done.stdout
    assert f"resume-path {place} --fetch DIR" in done.stderr
    assert run("inspect", url).exit_code == 1
    assert "name one of them" in run("inspect", url).stderr
    refused = run("inspect", place, place)
    assert (refused.exit_code, "--fetch DIR" in refused.stderr) == (2, True)


def test_resume_path_of_a_store_prints_the_newest_sound_checkpoint(store):
    """The newest by order of commits that is sound, with the reasons for newer ones; one checkpoint may be named; --quick."""
    url = store.url()
    there = save(url, 9, 5, 6, 7)
    flip(there[7] / "w.safetensors", 4100)
    flip(there[6] / "manifest.json", 60)
    done = run("resume-path", url)
    assert (done.exit_code, done.stdout) == (0, f"{there[5]}\n")
    assert f"not {there[7]}: w.safetensors its bytes" in done.stderr
    assert f"not {there[6]}: manifest.json" in done.stderr
    assert run("resume-path", url, "--quick").stdout == f"{there[7]}\n"
    assert run("resume-path", there[9]).stdout == f"{there[9]}\n"
    assert run("resume-path", there[7]).exit_code == 1
    answer = told("resume-path", url)
    assert (answer["path"], answer["verified"], len(answer["rejected"])) == (str(there[5]), True, 2)
    nothing = run("resume-path", store.url("empty"))
    assert (nothing.exit_code, "a job would start afresh" in nothing.stderr) == (1, True)


def test_a_fetch_from_a_store_is_whole_or_leaves_nothing(store, tmp_path, monkeypatch):
    """What is printed is a stock directory that verify and resume accept; a target is refused, and an error leaves nothing."""
    url, goal = store.url(), tmp_path / "got"
    there = save(url, 1, 2, size=5_000_000)
    flip(there[2] / "w.safetensors", 9_000_000)
    with monkeypatch.context() as patch:
        read = host_cache._fetch_range

        def failing(source, folder, entry, start, length):
            if start:
                raise TimeoutError("no answer")
            read(source, folder, entry, start, length)

        patch.setattr(host_cache, "_fetch_range", failing)
        done = run("resume-path", there[1], "--fetch", goal)
        assert (done.exit_code, done.stdout, list(goal.iterdir())) == (1, "", [])
    done = run("resume-path", url, "--fetch", goal)
    assert (done.exit_code, done.stdout) == (0, f"{goal / 'step-00000001'}\n")
    assert f"not {there[2]}: w.safetensors its bytes" in done.stderr
    assert [path.name for path in goal.iterdir()] == ["step-00000001"]
    assert told("verify", goal / "step-00000001")[0]["state"] == "valid"
    again = run("resume-path", url, "--fetch", goal)
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)
    state = {"w": {"t": torch.zeros(5_000_000)}, "n": 0}
    with Checkpointer(goal) as ckpt:
        assert ckpt.resume(state).step == 1
    assert (state["n"], float(state["w"]["t"][-1])) == (1, 1.0)
    answer = told("resume-path", there[1], "--fetch", tmp_path / "other")
    assert (answer["path"], answer["source"]) == (str(tmp_path / "other/step-00000001"), str(there[1]))
    assert run("resume-path", goal, "--fetch", tmp_path).exit_code == 2


def test_a_mirrored_checkpoint_is_fetched_under_its_name_and_resumed(store, tmp_path):
    """A directory and a single file come back under their names, and a resume takes them."""
    url = store.url()
    with Checkpointer(tmp_path / "run", CheckpointConfig(mirror=Mirror(url=url))) as ckpt:
        ckpt.save(3, {"w": {"t": torch.ones(10)}, "n": 3}).result(timeout_s=20)
    assert run("resume-path", url, "--fetch", tmp_path / "got").exit_code == 0
    assert told("verify", tmp_path / "got/step-00000003")[0]["state"] == "valid"
    manifests = [tmp_path / name / "step-00000003/manifest.json" for name in ("run", "got")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([], [10, 20, 30]),
        (["--keep-last", "1"], [30]),
        (["--keep-best", "1", "--metric", "loss", "--mode", "max"], [10, 30]),
    ],
    ids=str,
)
def test_gc_keeps_by_the_rules(store, rules, left):
    """As in a directory: what a rule keeps and the newest stay; --dry-run says the same and changes nothing."""
    url = store.url()
    save(url, 10, 20, 30)
    before = store.keys()
    would = told("gc", url, *rules, "--dry-run")
    assert store.keys() == before
    assert (would["kept"], [row["step"] for row in would["checkpoints"]]) == (
        len(left),
        [step for step in (10, 20, 30) if step not in left],
    )
    done = run("gc", url, *rules)
    assert done.exit_code == 0
    assert sorted(row["step"] for row in told("list", url)) == left
    assert len(store.keys("run/step-")) == 3 * len(left)
    assert run("unlock", url).stdout == f"{url} is free\n"


def test_gc_by_a_metric_that_none_has_is_refused(store):
    """As in a directory: every checkpoint stays, and the metrics there are named."""
    url = store.url()
    save(url, 1, 2, 3)
    done = run("gc", url, "--keep-best", "1", "--metric", "los")
    assert done.exit_code == 2
    assert "(metrics there: loss)" in done.stderr
    assert sorted(row["step"] for row in told("list", url)) == [1, 2, 3]


def test_gc_counts_no_damaged_one(store):
    """A damaged checkpoint that would be kept does not count: it stays, and so does the one before it."""
    url = store.url()
    there = save(url, 1, 2, 3)
    flip(there[3] / "w.safetensors", 4100)
    done = told("gc", url, "--keep-last", "1")
    assert done["damaged"] == [str(there[3])]
    assert [row["path"] for row in done["checkpoints"]] == [str(there[1])]
    assert [row["step"] for row in told("list", url)] == [3, 2]


def test_gc_leaves_a_live_job_alone(store):
    """Status 1, nothing changes, and the job goes on."""
    url = store.url()
    save(url, 1, 2)
    with Checkpointer(url) as ckpt:
        before = store.keys("run/step-")
        done = run("gc", url, "--keep-last", "1")
        assert (done.exit_code, "in use by process" in done.stderr) == (1, True)
        assert store.keys("run/step-") == before
        ckpt.save(3, {"n": 3}).result(timeout_s=20)
    assert [row["step"] for row in told("list", url)] == [3, 2, 1]


def test_gc_takes_away_what_killed_jobs_left(store):
    """A save that its head names goes; what no head names, and the quarantine, only with --quarantine; a replaced one goes."""
    url = store.url()
    there = save(url, 1, 2)
    kept = ObjectHome.discard
    try:
        ObjectHome.discard = lambda self, folders: []  # a job that dies between the commit and the deletion
        save(url, 2)
    finally:
        ObjectHome.discard = kept
    put(place_at(url) / LEFT / "w.safetensors", b"x")
    put(place_at(url) / "step-00000008.0123456789ab/w.safetensors", b"x")
    change_head(url, pending=(LEFT,), quarantined=(there[1].name,))
    done = run("gc", url)
    assert done.exit_code == 0
    assert f"deleted {there[2]}" in done.stdout
    assert "step-00000008.0123456789ab has no manifest" in done.stderr
    folders = {key.split("/")[1] for key in store.keys("run/step-")} - {LEFT}
    assert there[2].name not in folders
    assert folders >= {there[1].name, "step-00000008.0123456789ab"}
    assert list(store.keys(f"run/{LEFT}/")) == [
        f"run/{LEFT}/manifest.json"
    ]  # which says that it never will be committed
    assert run("gc", url, "--quarantine").exit_code == 0
    (row,) = told("list", url)
    assert (row["step"], row["state"]) == (2, "valid")
    assert not store.keys(f"run/{there[1].name}")


@pytest.mark.parametrize("fate", ["alive", "dead", "unknown"])
def test_unlock_of_a_store_names_the_owner(store, fate):
    """As of a directory: held is status 1, gone is status 0; with --break-lock it is free, and what may be left stays named."""
    url = store.url()
    save(url, 1)
    change_head(url, lease=lease(fate), pending=(LEFT,))
    done = run("unlock", url)
    assert done.exit_code == (0 if fate == "dead" else 1)
    word = {"alive": "which is alive", "dead": "is free", "unknown": "Whether it is alive is unknown here"}[fate]
    assert word in done.stdout
    assert told("unlock", url)["holder"]["alive"] is {"alive": True, "dead": False, "unknown": None}[fate]
    broken = run("unlock", url, "--break-lock")
    assert (broken.exit_code, "was taken away" in broken.stdout) == (0, True)
    assert run("unlock", url).stdout == f"{url} is free\n"
    head = place_at(url) / ".safe_ckpt/head"
    assert Head.from_bytes(head.bucket.read(head.key)[0]).pending == (LEFT,)
    save(url, 2)


def test_a_job_whose_directory_was_taken_away_saves_nothing_more(store):
    """It learns of it, also before the next job comes."""
    url = store.url()
    with pytest.raises(SafeCheckpointError), Checkpointer(url) as ckpt:
        ckpt.save(1, {"n": 1}).result(timeout_s=20)
        assert run("unlock", url, "--break-lock").exit_code == 0
        with pytest.raises(DirectoryInUseError):
            ckpt.save(2, {"n": 2}).result(timeout_s=20)
        raise DirectoryInUseError(path=url, message="as it said")
    assert [row["step"] for row in told("list", url)] == [1]


def test_convert_takes_an_address(store, tmp_path):
    """SRC is fetched, verified and converted, and nothing but the result is left; DST in a store is refused by name."""
    url = store.url()
    there = save(url, 1, 2)
    done = run("convert", there[2], tmp_path / "out/weights", "--to", "safetensors", "--item", "w")
    assert done.exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights"]
    assert told("inspect", tmp_path / "out/weights")["tensors"][0]["shape"] == [10]
    refused = run("convert", there[2], url, "--to", "torch")
    assert (refused.exit_code, "DST: converting writes to a file system" in refused.stderr) == (2, True)
    flip(there[1] / "w.safetensors", 4100)
    damaged = run("convert", there[1], tmp_path / "bad", "--to", "safetensors", "--item", "w")
    assert (damaged.exit_code, f"{there[1]}" in damaged.stderr, (tmp_path / "bad").exists()) == (1, True, False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["list", "s3:/b/run"], "write s3:// with two slashes: s3://b/run"),
        (["verify", "ftp://b/run"], "ftp:// is not supported"),
        (["inspect", "http://b/run"], "http:// is not supported"),
        (["doctor", "ftp://b/run"], "ftp:// is not supported"),
        (["report", "s3://b/run"], "no events are recorded"),
        (["gc", "s3:///run"], "needs a bucket"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_addresses_end_commands_with_status_2(args, why):
    """Status 2, and the cause."""
    done = run(*args)
    assert (done.exit_code, why in " ".join(done.output.split())) == (2, True)


def test_a_command_on_a_missing_bucket_prints_its_name_with_status_1(store):
    """One line with its name and status 1."""
    for command in ("list", "verify", "resume-path", "gc", "inspect"):
        done = run(command, "s3://there-is-none/run")
        assert (done.exit_code, done.stdout, "there-is-none" in done.stderr) == (1, "", True), command
        assert len(done.stderr.splitlines()) == 1
