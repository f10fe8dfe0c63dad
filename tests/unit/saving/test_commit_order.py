"""The order of commits of files that are saved past a running pipeline."""

import json
import os
import threading
import time

import pytest

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.core.saving import commit_order
from safe_ckpt.core.saving.one_shot import save_archive


@pytest.fixture
def new_process(monkeypatch):
    """What a process remembers is forgotten: the next save comes from another one."""
    return lambda: monkeypatch.setattr(commit_order, "_given", {})


def save(path):
    return save_archive({"x": 1}, path, sequence=commit_order.sequence_beside(path)).sequence


def test_each_is_newer_than_those_before_it_whatever_the_clocks_say(tmp_path, new_process, monkeypatch):
    """Several processes save a file beside what a job committed, and the clock goes back each time: the record counts."""
    with Checkpointer(tmp_path) as ckpt:
        newest = first = ckpt.save(1, {"x": 1}).result().sequence
    for number in range(3):
        new_process()
        monkeypatch.setattr(time, "time", lambda number=number: 1000.0 - number)
        sequence = save(tmp_path / f"{number}.ckpt")
        assert sequence > newest
        newest = sequence
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(2, {"x": 1}).result().sequence == first + 1  # directories have an order of their own
    found = catalog.newest_first(catalog.list_files(tmp_path, ".ckpt"))
    assert [candidate.path.name for candidate in found] == ["2.ckpt", "1.ckpt", "0.ckpt"]


def test_a_record_that_is_torn_or_hostile_is_read_as_far_as_it_goes(tmp_path, new_process, monkeypatch):
    """Lines of other kinds, halves of lines and absurd numbers count for nothing; a record that was just renamed counts."""
    monkeypatch.setattr(time, "time", lambda: 0.001)
    hidden = tmp_path / ".safe_ckpt"
    hidden.mkdir()
    lines = [json.dumps({"event": "committed", "sequence": number}) for number in (7, -1, True, 1 << 60, "9", None)]
    (hidden / "events.jsonl.1").write_text("\n".join(["ted", '["committed"]', *lines, '{"event": "committed", "seq']))
    (hidden / "events.jsonl").write_text('{"event": "agreed"}\n')
    assert commit_order.sequence_beside(tmp_path / "a/b/x.ckpt") == 8
    assert commit_order.sequence_beside(tmp_path / "y.ckpt") == 9
    new_process()
    assert commit_order.last_beside(tmp_path / "y.ckpt") == 7


def test_without_a_record(tmp_path, new_process, monkeypatch):
    """Where no job was, the clock tells, and a process does not contradict itself; where a job lives that keeps no record, its
    next save is newer than the file that came in between.
    """
    held = tmp_path / "held"
    with Checkpointer(held, CheckpointConfig(record_events=False)) as ckpt:
        before = ckpt.save(1, {"x": 1}).result().sequence
        between = save(held / "d.ckpt")
        assert before < between < ckpt.save(2, {"x": 1}).result().sequence
    assert read_manifest(held / "d.ckpt").sequence == between
    new_process()
    first = save(tmp_path / "a.ckpt")
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert save(tmp_path / "b.ckpt") == first + 1
    assert not (tmp_path / ".safe_ckpt").exists()


def test_those_who_do_not_know_of_each_other_have_one_order(tmp_path, new_process):
    """A record that later jobs did not go on with, and one that appears in a folder above: what is saved after is newer."""
    before = save(tmp_path / "manual/a.ckpt")
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).result()
    new_process()
    assert save(tmp_path / "manual/b.ckpt") > before
    with Checkpointer(tmp_path, CheckpointConfig(record_events=False)) as ckpt:
        last = [ckpt.save(step, {"x": 1}).result().sequence for step in (2, 3, 4)][-1]
    new_process()
    assert save(tmp_path / "c.ckpt") > last


@pytest.mark.parametrize("what", ["a pipe", "a link", "a linked folder", "a folder for everybody"])
def test_a_record_that_somebody_put_there_is_left_alone(tmp_path, new_process, monkeypatch, what):
    """A pipe holds nobody, what is behind a link is neither read nor written to, and no record in a folder like /tmp is."""
    theirs = tmp_path / "theirs/events.jsonl"
    theirs.parent.mkdir()
    theirs.write_text(text := json.dumps({"event": "committed", "sequence": 1 << 52}) + "\n")
    hidden = tmp_path / "runs/.safe_ckpt"
    hidden.parent.mkdir()
    if what == "a linked folder":
        hidden.symlink_to(theirs.parent)
    else:
        hidden.mkdir()
    if what == "a pipe":
        os.mkfifo(hidden / "events.jsonl")
    elif what == "a link":
        (hidden / "events.jsonl").symlink_to(theirs)
    elif what == "a folder for everybody":
        theirs = theirs.rename(hidden / "events.jsonl")
        hidden.parent.chmod(0o1777)
    thread = threading.Thread(target=save, args=[tmp_path / "runs/exp/x.ckpt"], daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert read_manifest(tmp_path / "runs/exp/x.ckpt").sequence < 1 << 52
    assert theirs.read_text() == text


def test_of_equal_numbers_the_later_one_is_the_newer(tmp_path):
    """A job and another process that saved at the same moment gave out one number."""
    save_archive({"x": 1}, tmp_path / "b.ckpt", sequence=5)
    time.sleep(0.002)  # the manifest has milliseconds
    save_archive({"x": 1}, tmp_path / "a.ckpt", sequence=5)
    found = catalog.newest_first(catalog.list_files(tmp_path, ".ckpt"))
    assert [candidate.path.name for candidate in found] == ["a.ckpt", "b.ckpt"]


def test_folders_that_come_and_go_do_not_matter(tmp_path):
    """Folders that others make and remove while a directory is listed, 200 times."""
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            for name in "abcdefgh":
                os.makedirs(tmp_path / name / "deep")
            for name in "abcdefgh":
                (tmp_path / name / "deep").rmdir()
                (tmp_path / name).rmdir()

    save(tmp_path / "x.ckpt")
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            assert [candidate.path.name for candidate in catalog.list_files(tmp_path, ".ckpt")] == ["x.ckpt"]
    finally:
        over.set()
        thread.join()
