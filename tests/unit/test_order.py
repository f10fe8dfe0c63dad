"""The order of commits of files that are saved past a running pipeline."""

import json
import os
import threading
import time

import pytest

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core import order, select
from safe_ckpt.core.direct import save_archive
from safe_ckpt.core.manifest import read_manifest


@pytest.fixture
def new_process(monkeypatch):
    """What a process remembers is forgotten: the next save comes from another one."""
    return lambda: monkeypatch.setattr(order, "_given", {})


def save(path):
    return save_archive({"x": 1}, path, sequence=order.sequence_beside(path)).sequence


def test_each_is_newer_than_those_before_it_whatever_the_clocks_say(tmp_path, new_process, monkeypatch):
    """Several processes save a file beside what a job committed, and the clock goes back each time: the record counts."""
    with Checkpointer(tmp_path) as ckpt:
        newest = ckpt.save(1, {"x": 1}).result().sequence
    for number in range(3):
        new_process()
        monkeypatch.setattr(time, "time", lambda number=number: 1000.0 - number)
        sequence = save(tmp_path / f"{number}.ckpt")
        assert sequence > newest
        newest = sequence
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(2, {"x": 1}).result().sequence == 2  # directories have an order of their own
    found = select.newest_first(select.list_files(tmp_path, ".ckpt"))
    assert [candidate.path.name for candidate in found] == ["2.ckpt", "1.ckpt", "0.ckpt"]


def test_a_record_that_is_torn_or_hostile_is_read_as_far_as_it_goes(tmp_path, new_process):
    """Lines of other kinds, halves of lines and absurd numbers count for nothing; a record that was just renamed counts."""
    hidden = tmp_path / ".safe_ckpt"
    hidden.mkdir()
    lines = [json.dumps({"event": "committed", "sequence": number}) for number in (7, -1, True, 1 << 60, "9", None)]
    (hidden / "events.jsonl.1").write_text("\n".join(["ted", '["committed"]', *lines, '{"event": "committed", "seq']))
    (hidden / "events.jsonl").write_text('{"event": "agreed"}\n')
    assert order.sequence_beside(tmp_path / "a/b/x.ckpt") == 8
    assert order.sequence_beside(tmp_path / "y.ckpt") == 9
    new_process()
    assert order.last_beside(tmp_path / "y.ckpt") == 7


def test_without_a_record(tmp_path, new_process, monkeypatch):
    """Where no job was, the clock tells, and a process does not contradict itself; where a job lives that keeps no record, its
    next file is newer than the one that came in between.
    """
    first = save(tmp_path / "a.ckpt")
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert save(tmp_path / "b.ckpt") == first + 1
    assert not (tmp_path / ".safe_ckpt").exists()
    held = tmp_path / "held"
    with Checkpointer(held, CheckpointConfig(record_events=False)):
        save_archive({"x": 1}, held / "c.ckpt", sequence=5)
        (held / "lost.ckpt").mkdir()
        new_process()
        assert save(held / "d.ckpt") == 6
    assert read_manifest(held / "d.ckpt").sequence == 6


def test_of_equal_numbers_the_later_one_is_the_newer(tmp_path):
    """A job and another process that saved at the same moment gave out one number."""
    save_archive({"x": 1}, tmp_path / "b.ckpt", sequence=5)
    time.sleep(0.002)  # the manifest has milliseconds
    save_archive({"x": 1}, tmp_path / "a.ckpt", sequence=5)
    found = select.newest_first(select.list_files(tmp_path, ".ckpt"))
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
            assert [candidate.path.name for candidate in select.list_files(tmp_path, ".ckpt")] == ["x.ckpt"]
    finally:
        over.set()
        thread.join()
