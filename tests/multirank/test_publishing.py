"""``safe_ckpt.publishing``: what several real ranks write into a folder appears as a whole, or not at all."""

import os
import resource
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

import safe_ckpt
from kit import limits
from kit.patience import wait_until
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Timeouts
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import DesyncError, PeerLostError, RendezvousTimeout, SafeCheckpointError, StateError

QUICK = CheckpointConfig(timeouts=limits.QUICK)


def _each_writes(rank, path):
    infos = []
    for step in range(1, 6):
        with safe_ckpt.publishing(path, step, config=CheckpointConfig(retention=Retention(keep_last=2))) as folder:
            torch.save(torch.full((1000,), float(step)), folder / f"rank-{rank}.pt")
            if rank == 1:
                (folder / "deep" / "er").mkdir(parents=True)
                command = "import sys; open(sys.argv[1], 'w').write('child')"
                subprocess.run(
                    [sys.executable, "-c", command, folder / "deep" / "er" / "child"], check=True, timeout=30
                )
            if rank == 0:
                (folder / "link").symlink_to("rank-1.pt")
                (folder / "empty").mkdir()
        infos.append((folder, safe_ckpt.newest(path).step))
    return infos


def test_files_of_all_ranks_are_published_and_in_the_manifest(tmp_path):
    """Files of all ranks, nested ones, a child's, links, empty folders: all are there, each file in the manifest."""
    outcomes = values(spawn_ranks(_each_writes, 3, tmp_path / "run"))
    assert [step for _, step in outcomes[0]] == [1, 2, 3, 4, 5]
    assert [step for _, step in outcomes[2]] == [1, 2, 3, 4, 5]
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-00000004", "step-00000005"]
    newest = tmp_path / "run/step-00000005"
    assert {torch.load(newest / f"rank-{rank}.pt")[7].item() for rank in range(3)} == {5.0}
    assert (newest / "deep/er/child").read_text() == "child"
    assert os.readlink(newest / "link") == "rank-1.pt"
    assert list((newest / "empty").iterdir()) == []
    listed = {entry.path: entry for entry in read_manifest(newest).files}
    assert sorted(listed) == ["deep/er/child", "rank-0.pt", "rank-1.pt", "rank-2.pt"]
    assert {entry.rank for entry in listed.values()} == {0, 1, 2}
    for path, entry in listed.items():
        assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest((newest / path).read_bytes())


def _one_raises(rank, path, size):
    begun = time.monotonic()
    try:
        with safe_ckpt.publishing(path, 2, config=QUICK) as folder:
            (folder / f"{rank}").write_text("x")
            if rank == size - 1:
                raise ZeroDivisionError("mine alone")
    except Exception as error:
        first = error, time.monotonic() - begun
    with safe_ckpt.publishing(path, 3, config=QUICK) as folder:  # and the ranks are together again
        (folder / f"{rank}").write_text("y")
    return first


def test_a_rank_that_raises_within_publishing_fails_it_on_all(tmp_path):
    """Nothing appears; the rank raises its own exception, the others one that names it, within seconds; the next one works."""
    with safe_ckpt.publishing(tmp_path / "run", 1) as folder:
        (folder / "before").write_text("x")
    outcomes = values(spawn_ranks(_one_raises, 3, tmp_path / "run", 3))
    assert isinstance(outcomes[2][0], ZeroDivisionError)
    for error, seconds in outcomes[:2]:
        assert isinstance(error, SafeCheckpointError)
        assert "mine alone" in str(error)
        assert "rank 2" in str(error)
        assert seconds < QUICK.timeouts.peer_stall_s + 5
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-00000001", "step-00000003"]
    assert os.listdir(tmp_path / "run/.safe_ckpt") == ["events.jsonl"]


def _differ(rank, path):
    try:
        with safe_ckpt.publishing(path, 1 + rank, config=QUICK):
            pass
    except Exception as error:
        return error
    return None


def test_publishing_at_different_steps_raises_on_all_ranks(tmp_path):
    """All raise ``DesyncError``; nothing appears."""
    for error in values(spawn_ranks(_differ, 2, tmp_path / "run")):
        assert isinstance(error, DesyncError)
    assert not (tmp_path / "run").exists()


def _never_leaves(rank, path, event):
    short = CheckpointConfig(timeouts=Timeouts(barrier_s=5, lengthy_s=6, peer_stall_s=3))
    try:
        with safe_ckpt.publishing(path, 1, config=short) as folder:
            (folder / f"{rank}").write_text("x")
            if rank == 1:
                event.wait(60)
    except Exception as error:
        event.set()
        return error
    return None


def test_a_rank_that_never_leaves_the_block_is_named(tmp_path):
    """The others raise ``RendezvousTimeout`` with its number; what it wrote is taken away."""
    event = torch.multiprocessing.get_context("spawn").Manager().Event()
    outcomes = values(spawn_ranks(_never_leaves, 3, tmp_path / "run", event))
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RendezvousTimeout | PeerLostError), outcomes[rank]
        assert "1" in str(outcomes[rank])
    assert outcomes[1] is not None
    assert not (tmp_path / "run").exists()


def _asynchronous(rank, path):
    found = []
    for step in range(1, 4):
        one = safe_ckpt.publishing(path, step, asynchronous=True)
        with one as folder:
            (folder / f"{rank}").write_bytes(os.urandom(4 << 20))
        found.append(one)
    dist.barrier()
    return [one.result().step for one in found]


def test_background_publications_are_committed_in_their_order(tmp_path):
    """Each waits for the one before it; every one is committed, and each handle tells of its own."""
    assert values(spawn_ranks(_asynchronous, 2, tmp_path / "run")) == [[1, 2, 3], [1, 2, 3]]
    assert safe_ckpt.newest(tmp_path / "run").step == 3


def _groups(rank, path):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, name = groups[rank // 2], "ab"[rank // 2]
    with safe_ckpt.publishing(path / name, 1, group=mine) as folder:
        (folder / f"{rank}").write_text("x")
    found = sorted(os.listdir(safe_ckpt.newest(path / name, mine).path))
    dist.barrier()  # of all: rank 0 hosts the store of the process group
    return found


def test_disjoint_groups_do_not_wait_for_each_other(tmp_path):
    """Two groups of ranks publish into directories of their own."""
    found = values(spawn_ranks(_groups, 4, tmp_path))
    assert found[0] == found[1] == ["0", "1", "manifest.json"]
    assert found[2] == found[3] == ["2", "3", "manifest.json"]


def test_a_file_published_with_its_digest_is_not_read(tmp_path):
    """Its digest goes into the manifest as it was given; a wrong one is found by whoever verifies."""
    right = safe_ckpt.publishing(tmp_path / "run", 1)
    with right as folder:
        (folder / "w").write_bytes(b"abc")
        right.hashed({"w": xxhash.xxh3_128_hexdigest(b"abc")})
    wrong = safe_ckpt.publishing(tmp_path / "run", 2)
    with wrong as folder:
        (folder / "w").write_bytes(b"abc")
        wrong.hashed({"w": "0" * 32})
    assert [entry.xxh3_128 for entry in read_manifest(tmp_path / "run/step-00000002").files] == ["0" * 32]
    assert safe_ckpt.newest(tmp_path / "run").step == 1


def _in_the_background(rank, path):
    said = []
    for step in (1, 2):
        try:
            with safe_ckpt.publishing(path, step, config=QUICK) as folder:
                if step == 2:
                    dcp.async_save({"t": torch.ones(8)}, checkpoint_id=folder / "model").result()
                    dist.barrier()
                    (folder / "model/.metadata").unlink(missing_ok=True)  # DCP writes it last: as if it had not yet
        except StateError as error:
            said.append(str(error))
    with safe_ckpt.publishing(path, 3, config=QUICK) as folder:
        dcp.async_save({"t": torch.ones(8)}, checkpoint_id=folder / "model").result()
    return said, safe_ckpt.newest(path).step


def test_a_folder_published_before_its_saver_is_done_is_refused(tmp_path):
    """An empty folder is no checkpoint, nor is what DCP has not described: all ranks are told to wait, and nothing appears."""
    for said, newest in values(spawn_ranks(_in_the_background, 2, tmp_path / "run")):
        assert "no rank has written a file" in said[0]
        assert "has written no .metadata" in said[1]
        assert all("wait in the block" in text for text in said)
        assert newest == 3
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-00000003"]


def _fails_and_nobody_asks(rank, path):
    one = safe_ckpt.publishing(path, 1, config=QUICK, asynchronous=True)
    limits_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with one as folder:
        (folder / f"{rank}").write_bytes(b"x" * 100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits_before[1]))  # the manifest is longer
    wait_until(one.done, 60)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits_before)
    with pytest.raises(SafeCheckpointError) as caught, safe_ckpt.publishing(path, 2, config=QUICK):
        pass
    with safe_ckpt.publishing(path, 3, config=QUICK) as folder:
        (folder / f"{rank}").write_bytes(b"x")
    return str(caught.value), safe_ckpt.newest(path).step


def test_the_next_publication_raises_the_error_that_nobody_asked_for(tmp_path):
    """On every rank: else the program believes that it has the first one."""
    for said, newest in values(spawn_ranks(_fails_and_nobody_asks, 2, tmp_path / "run")):
        assert "step-00000001" in said
        assert "File too large" in said
        assert newest == 3
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-00000003"]


@pytest.mark.quick
def test_the_result_of_an_earlier_publication_takes_no_later_one_away(tmp_path):
    """A program asks the first one again while a second is not over: the third waits for the second, as ever."""
    first, second, third = (safe_ckpt.publishing(tmp_path / "run", step, asynchronous=True) for step in (1, 2, 3))
    with first as folder:
        (folder / "w").write_bytes(b"1")
    assert first.result(60).step == 1
    with second as folder:
        (folder / "w").write_bytes(b"2")
    assert first.result(60).step == 1
    with third as folder:
        assert safe_ckpt.newest(tmp_path / "run").step == 2
        (folder / "w").write_bytes(b"3")
    assert [one.result(60).step for one in (third, second)] == [3, 2]
    assert safe_ckpt.newest(tmp_path / "run").step == 3


def test_a_publication_is_the_newest_whatever_the_clock(tmp_path, monkeypatch):
    """A Checkpointer on a host whose clock is an hour ahead has saved in the directory: what is published now comes later."""
    clock = time.time
    with monkeypatch.context() as ahead, Checkpointer(tmp_path / "run") as ckpt:
        ahead.setattr(time, "time", lambda: clock() + 3600)
        ckpt.save(7, {"x": {"n": 1}}).result(60)
    with safe_ckpt.publishing(tmp_path / "run", 8) as folder:
        (folder / "w").write_bytes(b"abc")
    then, now = (read_manifest(tmp_path / f"run/step-0000000{step}").sequence for step in (7, 8))
    assert now > then
