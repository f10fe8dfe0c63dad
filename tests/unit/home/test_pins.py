"""What a pin keeps, for how long, and how the side that deletes and the side that reads meet."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kit.memory_store import MemoryStore
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.home.pins.book import Book
from safe_ckpt.core.home.pins.hold import Hold
from safe_ckpt.core.home.pins.observer import PinWatch
from safe_ckpt.core.home.pins.record import Due, Pin, Silence, ruling_on
from safe_ckpt.core.home.pins.shelf import FileShelf, ObjectShelf, to_tell, told_of
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

pytestmark = pytest.mark.timeout(30)


def pin(**facts):
    return Pin(reader="r", title="eval", host="h", pid=7, since="then", ttl_s=60.0, **facts)


def due(*numbers, marked=()):
    return [Due(name=f"s{number}", sequence=number, marked=number in marked) for number in numbers]


def info(number, path, **facts):
    return CheckpointInfo(
        path=path,
        name=f"s{number}",
        step=number,
        sequence=number,
        metrics={},
        created_at=f"{number:04}",
        world_size=1,
        size_bytes=1,
        op_id=f"op{number}",
        **facts,
    )


def infos(*numbers, **facts):
    return [info(number, Path(f"/run/s{number}"), **facts) for number in numbers]


def test_a_pin_is_the_same_when_it_is_read_again():
    """What a reader writes is what the side that deletes reads, also where a later version says more."""
    one = pin(holds="s1", wants=("s2", "s3"), seen=3, every=2, limit=4)
    assert Pin.from_bytes(one.to_bytes()) == one
    assert Pin.from_bytes(one.to_bytes().replace(b'{"reader"', b'{"later": 1, "reader"')) == one


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"reader": "r"}', b"[" * 100_000, pin().to_bytes()[:-20]])
def test_a_torn_pin_is_none(data):
    """A pin that was not written to its end, or by something else, holds nothing."""
    assert Pin.from_bytes(data) is None


@pytest.mark.parametrize("facts", [{"every": 0}, {"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"holds": 3}, {"pid": "x"}])
def test_a_pin_with_nonsense_is_none(facts):
    """A pin in which a field is of the wrong type, or out of bounds, holds nothing."""
    assert Pin.from_bytes(json.dumps({**vars(pin()), **facts}).encode()) is None


def test_what_a_reader_holds_stays_and_what_it_wants():
    """Held and wanted ones are kept for their reader, those before its place are not."""
    verdict = ruling_on([pin(holds="s3", wants=("s5",), seen=6, limit=10)], due(1, 2, 3, 4, 5))
    assert set(verdict.kept) == {"s3", "s5"}
    assert "eval (process 7 on h)" in verdict.kept["s3"]
    assert not verdict.missed


def test_behind_a_place_the_newest_are_kept_up_to_the_limit_and_the_rest_is_told():
    """A reader that stands still costs at most its limit, and is told what it misses."""
    verdict = ruling_on([pin(seen=0, limit=2)], due(1, 2, 3, 4))
    assert set(verdict.kept) == {"s3", "s4"}
    assert [one.name for one in verdict.missed["r"]] == ["s1", "s2"]


def test_a_reader_of_each_third_costs_a_third_of_its_limit_for_what_it_has_not_seen():
    """Which of the unseen ones it will take is not known: three of them count as one."""
    verdict = ruling_on([pin(seen=0, every=3, limit=2)], due(*range(1, 9)))
    assert set(verdict.kept) == {f"s{number}" for number in range(3, 9)}


def test_bad_numbers_are_not_kept_for_a_reader_of_healthy_ones():
    """What a reader leaves out anyway is deleted."""
    assert set(ruling_on([pin(seen=0, limit=9)], due(1, 2, marked=[1])).kept) == {"s2"}
    assert set(ruling_on([pin(seen=0, limit=9, healthy=False)], due(1, 2, marked=[1])).kept) == {"s1", "s2"}


def test_a_reader_without_a_place_keeps_what_it_holds_alone():
    """Without ``every`` nothing is kept behind a reader."""
    assert set(ruling_on([pin(holds="s2", limit=5)], due(1, 2, 3)).kept) == {"s2"}


def test_silence_is_measured_by_whoever_looks():
    """A pin ends when it has not changed for its time, counted from the first look; any change begins anew."""
    silence = Silence()
    assert silence.over({"p": (b"1", 60.0)}, now=1000.0) == set()
    assert silence.over({"p": (b"1", 60.0)}, now=1060.0) == set()
    assert silence.over({"p": (b"2", 60.0)}, now=1061.0) == set()
    assert silence.over({"p": (b"2", 60.0)}, now=1121.0) == set()
    assert silence.over({"p": (b"2", 60.0)}, now=1122.0) == {"p"}


def test_a_book_takes_each_once_in_order():
    """Whatever a look finds, in whichever order, each is taken once."""
    book = Book()
    book.look(infos(2, 1))
    book.look(infos(3, 1, 2))
    assert [one.step for one in book.waiting] == [1, 2, 3]
    assert book.seen == 3


def test_a_book_takes_each_second():
    """With ``every=2`` the second, the fourth and so on."""
    book = Book(every=2, limit=5)
    for number in range(1, 8):
        book.look(infos(*range(1, number + 1)))
    assert [one.step for one in book.waiting] == [2, 4, 6]


def test_a_book_says_what_is_gone_and_what_there_was_no_room_for():
    """What vanished before it was taken is missed, and what exceeds the limit."""
    book = Book(limit=2)
    book.look(infos(1, 2))
    book.look(infos(2, 3, 4))
    assert book.take_missed() == ("s1", "s2")
    assert [one.step for one in book.waiting] == [3, 4]
    assert book.take_missed() == ()


def test_a_book_does_not_miss_what_was_saved_again():
    """A step that is saved again comes once more, as it is now."""
    book = Book()
    book.look(infos(1))
    again = CheckpointInfo(**{**vars(infos(1)[0]), "op_id": "again", "sequence": 9})
    book.look([again])
    assert book.waiting == [again]
    assert book.take_missed() == ()


def test_a_book_of_the_newest_alone():
    """Those in between are passed over, and not missed."""
    book = Book(newest_only=True)
    book.look(infos(1, 2, 3))
    assert [one.step for one in book.waiting] == [3]
    assert book.take_missed() == ()


def test_a_book_leaves_bad_numbers_out():
    """Unless they are asked for."""
    for healthy, steps in ((True, [2]), (False, [1, 2])):
        book = Book(healthy=healthy)
        book.look([*infos(1, marked=True), *infos(2)])
        assert [one.step for one in book.waiting] == steps


def test_a_silent_pin_is_taken_away(tmp_path):
    """A dead reader's pin ends within its time, and its file goes."""
    now = [0.0]
    shelf = FileShelf(tmp_path / HIDDEN)
    (tmp_path / HIDDEN).mkdir()
    shelf.write("r.pin", pin(holds="s1").to_bytes())
    observer = PinWatch(shelf, clock=lambda: now[0])
    assert observer.kept([tmp_path / "s1"]) == {tmp_path / "s1": "reader eval (process 7 on h) holds it"}
    now[0] = 59.0
    assert observer.kept([tmp_path / "s1"])
    now[0] = 61.0
    assert not observer.kept([tmp_path / "s1"])
    assert not (tmp_path / HIDDEN / "pins" / "r.pin").exists()


def test_what_a_killed_reader_left_is_taken_away(tmp_path):
    """Half of a word, and what it was told; not what belongs to a reader that is there."""
    now = [0.0]
    shelf = FileShelf(tmp_path / HIDDEN)
    (tmp_path / HIDDEN).mkdir()
    for name in ("r.pin", "r.missed", "gone.missed", ".gone.pin.1234"):
        shelf.write(name, pin(holds="s1").to_bytes())
    watch = PinWatch(shelf, clock=lambda: now[0])
    for seconds in (0.0, 50.0, 61.0):
        now[0] = seconds
        shelf.write("r.pin", pin(holds="s1", beat=int(seconds)).to_bytes())
        watch.kept([tmp_path / "s1"])
    assert {path.name for path in shelf.place.iterdir()} == {"r.pin", "r.missed"}


def test_the_second_look_heeds_all_that_a_new_reader_wants(tmp_path):
    """A reader that has come since the first look keeps what it wants; one that was there then, what it holds alone."""
    (tmp_path / HIDDEN).mkdir()
    shelf, place = FileShelf(tmp_path / HIDDEN), tmp_path / "s1"
    watch = PinWatch(shelf)
    assert watch.kept([place]) == {}
    shelf.write("r.pin", pin(wants=("s1",), limit=1).to_bytes())
    assert set(watch.held([place])) == {place}
    shelf.write("r.pin", pin(wants=("s1",), limit=0).to_bytes())
    assert watch.kept([place]) == {}  # its limit is reached: it was told
    shelf.write("r.pin", pin(wants=("s1",), limit=1).to_bytes())
    assert watch.held([place]) == {}  # what it was told stays true
    shelf.write("r.pin", pin(holds="s1").to_bytes())
    assert set(watch.held([place])) == {place}


def test_a_reader_is_not_told_of_what_stays_for_another(tmp_path):
    """What is beyond its limit, and kept for somebody else, is there when it comes to it."""
    (tmp_path / HIDDEN).mkdir()
    shelf, places = FileShelf(tmp_path / HIDDEN), [tmp_path / f"s{number}" for number in (3, 2, 1)]
    shelf.write("r.pin", pin(wants=("s1", "s2", "s3"), limit=1).to_bytes())
    shelf.write("q.pin", replace(pin(holds="s2"), reader="q").to_bytes())
    assert set(PinWatch(shelf).kept(places)) == {tmp_path / "s2", tmp_path / "s3"}
    assert [one["name"] for one in told_of(shelf.told("r.missed"))] == ["s1"]


def test_a_sign_of_life_behind_a_failed_write_is_whole(tmp_path):
    """The pin changed and could not be written: what follows is another length, and replaces the file."""
    (tmp_path / HIDDEN).mkdir()
    shelf = FileShelf(tmp_path / HIDDEN)
    shelf.write("r.pin", pin(holds="a-long-name").to_bytes())
    for after in (pin(holds="s1"), pin(holds="a-longer-name"), pin(holds="a-longer-game")):
        shelf.renew("r.pin", after.to_bytes())
        assert Pin.from_bytes(shelf.told("r.pin")) == after


def test_of_much_that_was_missed_the_newest_is_told():
    """The word to a reader is bounded; what it says already is not said twice."""
    before = [{"name": f"s{number}", "sequence": number} for number in range(1000)]
    more = [{"name": f"s{number}", "sequence": number} for number in (999, 1000, 1001)]
    said = [one["name"] for one in told_of(to_tell(before, more))]
    assert said == [f"s{number}" for number in range(2, 1002)]


@pytest.fixture
def home(tmp_path):
    home = FileHome(tmp_path / "run", lease_s=60)
    home.open()
    for name in ("a", "b"):
        (home.path / name).mkdir()
    yield home
    home.close()


def test_what_is_held_is_not_deleted(home):
    """Whoever asks for the deletion: a file system's home looks itself."""
    hold = Hold(title="eval", ttl_s=60)
    assert hold.take(home.path / "a", (home.path / "a").is_dir, ours=False)
    assert home.discard([home.path / "a", home.path / "b"]) == [home.path / "b"]
    assert (home.path / "a").is_dir()
    hold.close()
    assert home.discard([home.path / "a"]) == [home.path / "a"]
    assert not os.listdir(home.trash)
    assert not (home.hidden / "pins").exists()


def test_a_reader_that_ends_leaves_no_word_to_it(home):
    """What it was told goes with its pin: nobody else reads it."""
    hold = Hold(title="eval", ttl_s=60)
    hold.take(home.path / "a", lambda: True, ours=False)
    (file,) = (home.hidden / "pins").iterdir()
    file.with_suffix(".missed").write_bytes(to_tell([], [{"name": "b", "sequence": 1}]))
    assert hold.told() == ["b"]
    hold.close()
    assert not (home.hidden / "pins").exists()


def test_a_forked_child_leaves_the_pin_of_its_parent(home):
    """A data loader's worker that ends closes what it inherited; its parent still reads."""
    hold = Hold(title="eval", ttl_s=60)
    hold.take(home.path / "a", lambda: True, ours=False)
    child = os.fork()
    if child == 0:
        hold.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert home.discard([home.path / "a"]) == []
    hold.close()


def test_a_pin_that_comes_before_the_rename_is_heeded(home, monkeypatch):
    """A reader that writes its pin while a deletion begins waits for it, and keeps what it sees then."""
    hold = Hold(title="eval", ttl_s=60)
    confirm, waited = home.confirm, []

    def reader_comes():
        confirm()
        assert hold.change(holds="a")
        waited.extend(hold._shelf.undecided("a"))

    hold.place_at(home.path / "a", ours=False)
    monkeypatch.setattr(home, "confirm", reader_comes)
    home.discard([home.path / "a"])
    assert waited
    assert (home.path / "a").is_dir()
    hold.close()


def test_a_reader_waits_for_a_deletion_that_is_under_way(home, monkeypatch):
    """It does not count what may be deleted a moment later."""
    hold, looks = Hold(title="eval", ttl_s=60), []
    hold.place_at(home.path / "a", ours=False)
    (home.trash / "x").mkdir(parents=True)

    def moved(_):  # while the reader waits
        looks.append(1)
        (home.path / "a").rename(home.trash / "x" / "a")

    monkeypatch.setattr("safe_ckpt.core.home.pins.hold.time.sleep", moved)
    assert not hold.take(home.path / "a", (home.path / "a").is_dir, ours=False)
    assert looks == [1]
    hold.close()


def test_a_directory_that_one_may_not_write_is_read_without_a_pin(home, monkeypatch, caplog):
    """The reader is told once, and goes on."""

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FileShelf, "write", refused)
    hold = Hold(title="eval", ttl_s=60)
    for _ in range(3):
        assert hold.take(home.path / "a", (home.path / "a").is_dir, ours=False)
    assert not hold.is_written
    assert caplog.text.count("is not pinned") == 1
    hold.close()


def test_a_pin_is_renewed_while_its_reader_lives(home):
    """Without a change of what it holds the file changes all the time."""
    hold = Hold(title="eval", ttl_s=1.0)
    hold.take(home.path / "a", lambda: True, ours=False)
    (file,) = (home.hidden / "pins").iterdir()
    before = file.read_bytes()
    while file.read_bytes() == before:
        os.sched_yield()
    hold.close()


def test_a_reader_in_a_bucket_keeps_what_the_head_already_gave_up(monkeypatch):
    """The side that deletes says so first, looks at the pins, and takes it back; with no reader that is one request."""
    pytest.importorskip("obstore")
    store = MemoryStore(monkeypatch)
    run = open_place(store.url(), StorageOptions(give_up_after_s=5, request_timeout_s=2))
    from safe_ckpt.core.home.objects.home import ObjectHome

    home = ObjectHome(run, lease_s=60)
    home.open()
    a, b = run / f"a.{'1' * 8}", run / f"b.{'2' * 8}"
    for folder in (a, b):
        run.bucket.create((folder / "manifest.json").key, b"{}")
    hold = Hold(title="eval", ttl_s=60)
    assert hold.take(a, lambda: True, ours=True)
    assert home.pinned([a, b]) == {}  # no request before a deletion has met a reader
    assert home.discard([a, b]) == [b]
    assert run.bucket.read((a / "manifest.json").key)
    assert set(home.pinned([a])) == {a}
    assert ObjectShelf(run).undecided(a.name) == set()
    hold.close()
    assert home.pinned([a]) == {}
    assert home.discard([a]) == [a]
    home.close()


def test_a_deletion_in_a_bucket_that_a_kill_cut_short_heeds_pins(monkeypatch):
    """The next job does not finish the deletion of what a reader holds."""
    pytest.importorskip("obstore")
    store = MemoryStore(monkeypatch)
    run = open_place(store.url(), StorageOptions(give_up_after_s=5, request_timeout_s=2))
    from safe_ckpt.core.home.objects.home import ObjectHome

    home, a = ObjectHome(run, lease_s=60), run / f"a.{'1' * 8}"
    home.open()
    run.bucket.create((a / "manifest.json").key, b"{}")
    home._owner.update(lambda head: head.deleting([a.name]))
    hold = Hold(title="eval", ttl_s=60)
    hold.place_at(a, ours=True)
    hold.change(holds=a.name)
    home.close()
    home = ObjectHome(run, lease_s=60)
    home.open()
    assert run.bucket.read((a / "manifest.json").key)
    hold.close()
    home.close()
