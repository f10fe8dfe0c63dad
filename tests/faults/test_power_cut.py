"""Power cuts at every point of a save: what a disk may then hold is computed, made real, and resumed from."""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock
from namings import ROWS
from sweep import MARKER, SCENARIOS
from trials import records, sampled

from kit import names
from kit.power_cut import FileOperation, crash_states, read_trace
from kit.thorough import THOROUGH
from safe_ckpt.core.home import file_lock
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import SafeCheckpointError

_ON_HOSTS = "a directory on each host: kills are in tests/faults/test_kills_of_hosts.py, power cuts were not run"
# What gives a name and need not outlast a power cut, with the reason; or was not run.
EXCUSED = {
    "core.home.host_home:HostHome._repair": _ON_HOSTS,
    "core.home.host_home:HostHome._fill_here": _ON_HOSTS,
    "core.home.host_home:HostHome._make_here": _ON_HOSTS,
    "core.home.host_home:_adopt": _ON_HOSTS,
    "core.home.file_home:FileHome._delete": "where it renames, that goes to a folder of scratch, to be deleted beside training",
    "core.home.file_home:FileHome._bring_back_if_held": "a reader holds it, and no rule keeps it: nobody resumes from it",
    "core.home.file_lock:_put_back": "a lock that another job makes at that moment: tests/unit/home/test_lock.py",
    "core.home.file_lock:JobLock._waited_s": "a record of how long somebody has waited: without it he waits again",
    "core.home.pins.shelf:FileShelf.write": "a reader's word, which counts for a minute",
    "core.storage.durable:_exchange_back": "it undoes what the disk did not confirm: tests/faults/test_other_disks.py",
    "hooks.event_log:JsonlHook._rotate": "a record for people; what is torn in it is read over",
    "hooks.prometheus:PrometheusHook._write": "a page of numbers, written anew with the next event",
    "ray.run_config:mend": "Ray's own list, for which a resume does not ask: it looks into the folder",
    "tools.cli.report:_replace": "a page for people, made from the record",
    "tools.convert.swap:export": "a folder for a server, made anew from its checkpoint",
    "tools.doctor.disk:renaming": "it asks a disk what it can, in a folder of scratch",
}
TABLE = {**SCENARIOS, **ROWS}
LENGTHY = list(SCENARIOS).index("directory, shares without hard links")  # it verifies five checkpoints each time
CASES = sampled(
    [(name,) for name in TABLE],
    lambda number: (number % 5 == 1 and number != LENGTHY) or number >= len(SCENARIOS),
)
OF_A_HOME, OF_DISKS = "core.home.file_home", "core.storage.durable"
# Which functions of the package that give a name a row comes through: at least one row for each of them.
REACHED = {
    "file, next save, link and removal": (f"{OF_A_HOME}:FilePublication._link", f"{OF_A_HOME}:FileHome._discard"),
    "directory, shares what did not change": ("core.writer.existing:Existing.link", f"{OF_DISKS}:link_open_file"),
    "a further name, hard links, file, taken": (
        f"{OF_DISKS}:publish_link", f"{OF_DISKS}:link_or_copy", f"{OF_DISKS}:publish", f"{OF_DISKS}:publish_file",
        f"{OF_DISKS}:_keep", f"{OF_DISKS}:_replace",
    ),
    "a further name, hard links, directory, taken": (
        f"{OF_DISKS}:_link_tree", f"{OF_DISKS}:publish_directory", f"{OF_DISKS}:exchange",
    ),
    "a pointer, replaced": (f"{OF_A_HOME}:FilePublication._point",),
    "fetched from a mirror": (f"{OF_A_HOME}:FilePublication._give_final_name",),
    "fetched by hand": ("tools.inspection.fetch:fetch",),
    "published, the next": (f"{OF_A_HOME}:FilePublication.prepare",),
    "exported, replaces": ("core.home.extra_files:keep_foreign",),
    "given back, replaces": ("offload.restore:_place",),
    "one file, replaces": ("adapters.one_shot:save_archive",),
    "save_model, two files after one": ("accelerate.save_model:_publish", "accelerate.save_model:_put_in_place"),
    "mode overwrite": ("core.saving.set_up:_move_away",),
    "quarantined": (f"{OF_A_HOME}:FileHome.quarantine", f"{OF_A_HOME}:FileHome._into_quarantine"),
    "a start that repairs": (f"{OF_A_HOME}:FileHome._repair", f"{OF_A_HOME}:FileHome._sweep_away"),
    "a start that repairs what an earlier version left": (f"{OF_A_HOME}:FileHome._take_former",),
    "a start that finds half of a quarantine": (f"{OF_A_HOME}:FileHome._sweep",),
    "the lock": ("core.home.file_lock:put", "core.home.file_lock:take_away"),
}  # fmt: skip


@pytest.fixture(scope="session")
def recordings(request, tmp_path_factory):
    """Row -> the folder with what was recorded of it: of all that are to run, once, also where several processes run tests."""
    names = [item.callspec.params["name"] for item in request.session.items if "recordings" in item.fixturenames]
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    with FileLock(shared / "recordings.lock"):
        if not (shared / "recordings").exists():
            records(shared / "recordings.part", names)
            (shared / "recordings.part").rename(shared / "recordings")
    return {name: shared / "recordings/exp" / str(number) for number, name in enumerate(names)}


def recorded(log, *, keeps_lock=False):
    """The trace, without the lock: its holder does not live through a power cut, and taking over its remains takes seconds."""
    return [op for op in read_trace(log) if keeps_lock or not Path(op.path).name.startswith("lock")]


def reached(was):
    """The functions of the package that gave a name, and those above; before Python 3.11 none knows its class."""
    found = set((was / "reached").read_text().split())
    if sys.version_info >= (3, 11):
        return found
    return {place for one in REACHED.values() for place in one if _without_class(place) in found}


def _without_class(place):
    module, _, name = place.partition(":")
    return f"{module}:{name.rpartition('.')[2]}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_power_cut_leaves_the_old_or_the_new(tmp_path, recordings, name, monkeypatch, matrix):
    """Every place that gives a name, and every prefix of its operations, what was not fsynced dropped or reordered: the old or
    the new, never a mix, never none; and the new one once it had been reported.
    """
    row, was = TABLE[name], recordings[name]
    assert set(REACHED.get(name, ())) <= reached(was), "it does not come there any more"
    # Nothing is written here: thousands of processes would be.
    monkeypatch.setattr(WriterSupervisor, "start", lambda _: None)
    monkeypatch.setattr(file_lock, "_HALF_WRITTEN_S", 0.01)
    # The paths of the trace are those under which it was recorded.
    recorded_at = next(Path(op.path) for op in read_trace(was / "log") if op.path.endswith(MARKER))
    root, trace = recorded_at.parents[1], recorded(was / "log", keeps_lock=row.keeps_lock)
    reported = next(i for i, op in enumerate(trace) if op.path.endswith(MARKER))
    seen = Counter()
    for state in crash_states(was / "before", trace, root, samples=8 if THOROUGH else 2):
        here = tmp_path / "here"
        state.write_to(here, root)
        where = f"after {state.after} operations without {[trace[i] for i in state.lost]}"
        try:
            found = row.find(here) if here.exists() else 0
        except Exception as error:
            raise AssertionError(where) from error
        assert found in (row.after if state.after > reported else row.before), where
        seen[found] += 1
        shutil.rmtree(here, ignore_errors=True)
    words = {0: "none yet", 1: "the old one", 2: "the new one"}
    matrix("power cut", name, {words[found]: count for found, count in seen.items()})
    assert min(seen[one] for one in {*row.before, *row.after}) >= row.least


def test_every_place_that_gives_a_name_is_in_the_table():
    """Each function that renames, links or exchanges is reached by a row above, or stands with its reason in ``EXCUSED``."""
    told = {place for one in REACHED.values() for place in one}
    found = names.places()
    assert found - told - EXCUSED.keys() == set(), "give it a row in tests/faults/namings.py, and name it in REACHED"
    assert (told | EXCUSED.keys()) - found == set()
    assert EXCUSED.keys() & told == set()
    assert REACHED.keys() <= TABLE.keys()


def test_the_simulation_finds_a_missing_fsync(tmp_path):
    """A file that is renamed into place without fsync: in some crash state it has the new name and not the bytes."""
    (tmp_path / "before").mkdir()
    root = str(tmp_path)
    careless = [
        FileOperation(name="create_new", path=f"{root}/new.tmp"),
        FileOperation(name="write", path=f"{root}/new.tmp", data=b"content", offset=-1),
        FileOperation(name="rename", path=f"{root}/new.tmp", other=f"{root}/final"),
    ]
    careful = [*careless[:2], FileOperation(name="sync", path=f"{root}/new.tmp"), *careless[2:]]

    def torn(trace):
        states = crash_states(tmp_path / "before", trace, tmp_path)
        return [s for s in states if s.files.get(f"{root}/final", b"content") != b"content"]

    assert torn(careless)
    assert not torn(careful)


def test_a_missing_fsync_of_ours_would_be_found(tmp_path, monkeypatch):
    """The same traces with the fsync of one file left out: the resume meets a damaged checkpoint under its final name."""
    was = records(tmp_path / "recorded", ["file, first save"])["file, first save"]
    monkeypatch.setattr(WriterSupervisor, "start", lambda _: None)
    root = was / "exp"
    trace = [op for op in recorded(was / "log") if not (op.name == "sync" and op.path.endswith(".ckpt"))]
    bad = 0
    for state in crash_states(was / "before", trace, root, samples=2):
        here = tmp_path / "here"
        state.write_to(here, root)
        try:
            SCENARIOS["file, first save"].find(here)
        except (AssertionError, SafeCheckpointError):
            bad += 1
        shutil.rmtree(here, ignore_errors=True)
    assert bad
