"""Goes through every file operation of a save and lets it go wrong. Started by the tests under FaultyStorage's environment.

Each trial is a forked child in a session of its own, with its own writer process, so a whole job dies at its n-th operation
in a fraction of a second. A second child then starts the job again and says what it found. Prints one JSON object per trial.

    python sweep.py KIT FOLDER SCENARIO FAULT FIRST STEP

With "record" for FAULT it records a save of each SCENARIO, several with "|" between them, in the folders 0, 1, ... of FOLDER,
for the simulation of power cuts; with "random" it kills the job FIRST times at random moments, with the random seed STEP.
"""

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))  # started as a script

import torch

from kit import names
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, SafeCheckpointError, Timeouts, WriterConfig
from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.core.home.retention import delete_listed
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.request import Destination, Facts, OnCommit, SaveRequest, Snapshot
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.core.writer import existing
from safe_ckpt.testing import FaultyStorage

# Every copy is shared by two threads, as those of a large state are.
snapshot.PIECE_BYTES, snapshot._HELP_FROM = 4096, 1
torch.set_num_threads(1)  # see tests/faults/conftest.py
# A busy machine is no fault: nothing here is to be taken for stalled.
TIMES = Timeouts(lengthy_s=20, barrier_s=10, writer_stall_s=10, fsync_stall_s=10, peer_stall_s=2, shutdown_s=3)
CONFIG = CheckpointConfig(
    timeouts=TIMES,
    retention=Retention(keep_last=1),
    writer=WriterConfig(chunk_bytes=4096, flush_every_bytes=4096),
    record_events=False,
)


def state(number):
    """What belongs to a save: no byte is equal in two of them, and it fills several files and several writes."""
    return {
        "model": {"w": torch.full((3000,), float(number)), "b": torch.full((5,), -float(number))},
        "optimizer": {"state": [torch.full((1500,), number, dtype=torch.int64)], "note": (number, "x")},
        "epoch": number,
    }


def blank():
    return {"model": {"w": torch.zeros(3000), "b": torch.zeros(5)}, "optimizer": None, "epoch": 0}


def number_of(found):
    """Which save this is, or an error if it is a mix of two."""
    numbers = {float(v) for v in found["model"]["w"].unique()} | {-float(v) for v in found["model"]["b"].unique()}
    numbers |= {float(v) for v in found["optimizer"]["state"][0].unique()}
    numbers |= {float(found["optimizer"]["note"][0]), float(found["epoch"])}
    if len(numbers) != 1:
        raise AssertionError(f"a mix: {numbers}")
    return int(numbers.pop())


class Scenario:
    """What the sweep of power cuts asks, see ``namings.Row``."""

    after, least, keeps_lock, old = (2,), 5, False, True

    @property
    def before(self):
        return (1, 2) if self.old else (0, 2)


class Directories(Scenario):
    """Checkpointer: a directory for each step, or one that is replaced."""

    def __init__(self, *, old, new_step=2, exchange=True):
        self.old, self.new_step, self.exchange = old, new_step, exchange

    def prepare(self, folder):
        if self.old:
            with Checkpointer(folder, CONFIG) as ckpt:
                ckpt.save(1, state(1)).result()

    def act(self, folder, reported):
        if not self.exchange:
            durable.exchange = lambda *_: False
        with Checkpointer(folder, CONFIG) as ckpt:
            ckpt.save(self.new_step, state(2)).result()
            reported()

    def again(self, folder):
        with Checkpointer(folder, CONFIG) as ckpt:
            ckpt.save(self.new_step, state(2)).result()

    def find(self, folder):
        found = blank()
        with Checkpointer(folder, CONFIG) as ckpt:
            info = ckpt.resume(found)
        return number_of(found) if info else 0


class Live:
    """A module and its optimizer, whose numbers all tell which save they belong to, and which go on after it."""

    def __init__(self, number, size=3000):
        self.model = torch.nn.Module()
        self.model.w = torch.nn.Parameter(torch.full((size,), float(number)))
        self.model.b = torch.nn.Parameter(torch.full((5,), -float(number)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.detach(), float(number))
        self.state = {"model": self.model, "optimizer": self.optimizer, "epoch": number}

    def state_dict(self):
        return {"epoch": self.state["epoch"]}

    def load_state_dict(self, state):
        self.state["epoch"] = state["epoch"]

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def number(self):
        moments = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        found = {float(v) for t in (self.model.w, -self.model.b, *moments) for v in t.detach().unique()}
        if found != {float(self.state["epoch"])}:
            raise AssertionError(f"a mix: {found} and {self.state['epoch']}")
        return self.state["epoch"]


class Numbered(Scenario):
    """A scenario told by how it makes its numbered saves: the first is there already, the second is at stake."""

    def prepare(self, folder):
        if self.old:
            self.save(folder, 1)

    def act(self, folder, reported):
        self.save(folder, 2, reported)

    def again(self, folder):
        self.save(folder, 2)


class Fast(Numbered):
    """The ways that do not copy everything first: overlapped with training, and straight from the tensors."""

    def __init__(self, size, **settings):
        self.size, self.config = size, dataclasses.replace(CONFIG, **settings)

    def save(self, folder, number, reported=lambda: None):
        live = Live(number, self.size)
        with Checkpointer(folder, self.config) as ckpt:
            handle = ckpt.save(number, live.state)
            live.step()
            handle.result()
            reported()

    def find(self, folder):
        live = Live(0, self.size)
        with Checkpointer(folder, self.config) as ckpt:
            info = ckpt.resume(live.state)
        return live.number() if info else 0


class Sharing(Numbered):
    """A chain of checkpoints with one frozen parameter: the sixth one shares it, and the first one goes."""

    FROZEN = 300_000
    old = True

    def __init__(self, *, links=True):
        self.links, self.config = links, dataclasses.replace(CONFIG, retention=Retention(keep_last=5))

    def live(self, number):
        live = Live(number)
        live.model.base = torch.nn.Parameter(torch.full((self.FROZEN,), 7.0 if number else 0.0), requires_grad=False)
        return live

    def prepare(self, folder):
        live = self.live(1)
        with Checkpointer(folder, dataclasses.replace(self.config, writer=WriterConfig())) as ckpt:
            for step in range(1, 6):
                ckpt.save(step, live.state).result()

    def save(self, folder, number, reported=lambda: None):
        live, before = self.live(number), self.live(0)
        if not self.links:
            existing.link_open_file = lambda *_: "never"
        with Checkpointer(folder, self.config) as ckpt:
            ckpt.resume(before.state)
            ckpt.save(6, live.state).result()
            reported()

    def find(self, folder):
        live = self.live(0)
        with Checkpointer(folder, self.config) as ckpt:
            info = ckpt.resume(live.state)
        # None of those that are left may have lost what it shares with another one.
        left = [path for path in sorted(folder.iterdir()) if path.name.startswith("step-")]
        for path in left:
            verify_files(path, read_manifest(path))
        if len(left) not in (5, 6) or live.model.base.unique().tolist() != [7.0]:
            raise AssertionError(f"{[path.name for path in left]} are left, {live.model.base.unique()} was shared")
        return live.number() if info else 0


def request_of(destination, name, number, to_delete, **names):
    """A save of one archive, behind which others are deleted, and a further name or a pointer is given."""
    image = torch_archive.torch_plan(name, state(number), strict=False, key="checkpoint")
    return SaveRequest(
        destination=destination,
        payload=Snapshot(files=[file_plan.single(image, name)]),
        facts=Facts(step=number),
        on_commit=OnCommit(retention=delete_listed(to_delete) if to_delete else None, **names),
    )


class Files(Numbered):
    """What the Lightning adapter does: one file with a second name, replacing others by either, and removing the old one."""

    def __init__(self, *, old, same_name=False):
        self.old, self.same_name = old, same_name

    def name(self, number):
        return "same.ckpt" if self.same_name else f"step={number}.ckpt"

    def save(self, folder, number, reported=lambda: None):
        engine = Engine(CONFIG)
        try:
            root = engine.hold(folder)
            root.start_after(catalog.newest_sequence(catalog.list_files(folder, ".ckpt")))
            to_delete = [path for path in folder.glob("step=*.ckpt") if path.name != self.name(number)]
            destination = Destination(home=root, path=folder / self.name(number), kind="file")
            links = [Link(path=folder / "last.ckpt")]
            engine.save(request_of(destination, self.name(number), number, to_delete, links=links)).result()
            reported()
        finally:
            engine.close()

    def find(self, folder):
        engine = Engine(CONFIG)
        try:
            engine.hold(folder)
            candidates = catalog.list_files(folder, ".ckpt")
            if [c.path.name for c in candidates if c.problem]:
                raise AssertionError(f"damaged files: {[(c.path.name, c.problem) for c in candidates if c.problem]}")
            for candidate in catalog.by_commit(candidates):
                verify_files(candidate.path, read_manifest(candidate.path))
                return number_of(torch.load(candidate.path, weights_only=True))
            return 0
        finally:
            engine.close()


class Accelerated(Numbered):
    """Through ``accelerator.save_state`` and ``load_state``, with a limit of one."""

    def warm(self):
        import accelerate_runs  # noqa: F401 - once here, and not in every trial

    @contextlib.contextmanager
    def registered(self, folder, number):
        from accelerate_runs import forget, make
        from safe_ckpt.accelerate import register

        forget()
        live, accelerator = Live(number), make(folder, limit=1)
        accelerator.prepare(live.model, live.optimizer)
        accelerator.register_for_checkpointing(live)
        with register(accelerator, dataclasses.replace(CONFIG, retention=Retention())) as handle:
            yield live, accelerator, handle

    def save(self, folder, number, reported=lambda: None):
        with self.registered(folder, number) as (_, accelerator, handle):
            accelerator.save_state()
            handle.wait()
            reported()

    def find(self, folder):
        with self.registered(folder, 0) as (live, accelerator, _):
            accelerator.load_state()
        return live.number()


SCENARIOS = {
    "directory, first save": Directories(old=False, new_step=1),
    "directory, next save and retention": Directories(old=True),
    "directory, replaced by an exchange": Directories(old=True, new_step=1),
    "directory, replaced by two renames": Directories(old=True, new_step=1, exchange=False),
    "directory, overlapped with training": Fast(3000, snapshot="overlapped"),
    "directory, straight from the tensors": Fast(300_000, max_host_bytes=1 << 20),
    "directory, shares what did not change": Sharing(),
    "directory, shares without hard links": Sharing(links=False),
    "accelerator.save_state, next save and limit": Accelerated(),
    "file, first save": Files(old=False),
    "file, next save, link and removal": Files(old=True),
    "file, replaced": Files(old=True, same_name=True),
}
MARKER = ".safe_ckpt/reported"
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EROFS")}


def fork(action, *, timeout_s=60.0):
    """Run ``action`` in a child in a session of its own. Returns its status as waitpid gives it, or "hung"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def prepare(scenario, folder):
    """Begin from what the scenario begins from."""
    shutil.rmtree(folder, ignore_errors=True)
    if status := fork(lambda: scenario.prepare(folder)):
        raise RuntimeError(f"the state to begin with could not be made: {status}")


def trial(storage, folder, scenario, fault, at):
    prepare(scenario, folder)
    notes = folder.parent / "notes"
    notes.unlink(missing_ok=True)
    seen = {}

    def arm():
        if fault in ERRORS:
            storage.fail(at, folder, ERRORS[fault], coordinator=os.getpid())
        elif fault in {f"{name} from here on" for name in ERRORS}:
            storage.fail(at, folder, ERRORS[fault.split()[0]], coordinator=os.getpid(), always=True)
        elif fault == "count":
            storage.watch(folder, coordinator=os.getpid())
        else:
            getattr(storage, fault)(at, folder, coordinator=os.getpid())

    def act():
        arm()
        said = {"reported": False}
        try:
            scenario.act(folder, lambda: said.update(reported=True) or notes.write_text(json.dumps(said)))
        except SafeCheckpointError as error:
            said["error"] = type(error).__name__
        finally:
            notes.write_text(json.dumps(said))
        if "error" in said:
            storage.off()
            scenario.again(folder)  # the cause is gone: the next save works, in the same process
            said["again"] = True
            notes.write_text(json.dumps(said))

    begun = time.monotonic()
    status = fork(act)
    seen.update(status=status, seconds=round(time.monotonic() - begun, 2), count=storage.count)
    storage.off()
    seen.update(json.loads(notes.read_text()) if notes.exists() else {})

    def find():
        found = scenario.find(folder)
        left = [str(p) for part in ("pending", "trash") for p in (folder / ".safe_ckpt" / part).glob("*")]
        notes.write_text(json.dumps({"found": found, "left": left, "reported": seen.get("reported", False)}))

    notes.unlink(missing_ok=True)
    seen["restart"] = fork(find)
    seen.update(json.loads(notes.read_text()) if notes.exists() else {})
    return seen


def busy(folder):
    """Whether a save is at work in ``folder``."""
    pending = folder / ".safe_ckpt/pending"
    return pending.is_dir() and any(pending.iterdir())


def start(scenario, folder, notes):
    """A child of its own session that makes the scenario's save and then writes down that it was reported."""
    notes.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        scenario.act(folder, lambda: notes.write_text("reported"))
        os._exit(0)
    return child


def moment(child, folder, condition):
    """When ``condition(folder)`` held first, on the monotonic clock, or when the child had ended."""
    while not condition(folder) and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        pass
    return time.monotonic()


def random_kills(folder, scenario, count, seed):
    """SIGKILL of the job at random moments, ``count`` times, the state going on from one trial to the next: in turn at any
    time from the job's start, and at any time from the moment at which its save has begun to write.
    """
    chance = random.Random(seed)
    notes = folder.parent / "notes"
    whole_s = writing_s = float("inf")
    for _ in range(3):  # the shortest: other programs may hold one up
        prepare(scenario, folder)
        began = time.monotonic()
        child = start(scenario, folder, notes)
        writing = moment(child, folder, busy)
        done = moment(child, folder, lambda _: notes.exists())
        os.waitpid(child, 0)
        whole_s, writing_s = min(whole_s, done - began), min(writing_s, done - writing)
    for number in range(1, count + 1):
        if number % 4 in (1, 2):  # from the old one again, for a kill of either kind
            prepare(scenario, folder)
        child = start(scenario, folder, notes)
        if number % 2:
            moment(child, folder, busy)
            time.sleep(chance.random() * writing_s)
        else:
            time.sleep(chance.random() * 1.2 * whole_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported, within = notes.exists(), busy(folder)

        def find(reported=reported, within=within, number=number):
            found = scenario.find(folder)
            left = [str(p) for part in ("pending", "trash") for p in (folder / ".safe_ckpt" / part).glob("*")]
            line = {"at": number, "found": found, "left": left, "reported": reported, "within": within, "restart": 0}
            print(json.dumps(line), flush=True)

        if fork(find) != 0:
            print(json.dumps({"at": number, "restart": 1, "reported": reported}), flush=True)


def record(storage, folder, scenario):
    """Leave the tree as it was in "before" and the trace of the save in "log"; a marker says when it was reported. "reached"
    has the functions of the package that gave a name.
    """
    prepare(scenario, folder)
    folder.mkdir(exist_ok=True)
    shutil.copytree(folder, folder.parent / "before", symlinks=True)

    def mark():
        (folder / MARKER).parent.mkdir(exist_ok=True)
        (folder / MARKER).mkdir()

    def act():
        with names.watched(folder) as reached:
            storage.watch(folder, log=folder.parent / "log")  # whichever process: the writer has a session of its own
            scenario.act(folder, mark)
            storage.off()
        (folder.parent / "reached").write_text("\n".join(sorted(reached)))

    if fork(act) != 0:
        raise RuntimeError("the save to be recorded failed")


def _further():
    """The rows of the sweep of power cuts, which need what is here."""
    sys.modules["sweep"] = sys.modules["__main__"]
    import namings

    return namings.ROWS


def main():
    kit, folder, name, fault, first, step = sys.argv[1:7]
    Live(0).step()  # the first step imports for two seconds: once here, and not in every trial
    storage = FaultyStorage(Path(kit))
    if fault == "record":
        rows = {**SCENARIOS, **_further()}
        for number, one in enumerate(name.split("|")):
            below = Path(folder, str(number))
            below.mkdir(parents=True)
            getattr(rows[one], "warm", lambda: None)()
            try:
                record(storage, below / "exp", rows[one])
            except RuntimeError as error:
                raise RuntimeError(one) from error
        return
    scenario = SCENARIOS[name]
    getattr(scenario, "warm", lambda: None)()
    if fault == "random":
        # By a process: what is written within this one is over before a kill can come.
        globals()["CONFIG"] = dataclasses.replace(CONFIG, writer=dataclasses.replace(CONFIG.writer, inline_bytes=0))
        random_kills(Path(folder), scenario, int(first), int(step))
        return
    total = trial(storage, Path(folder), scenario, "count", 0)
    print(json.dumps({"total": total["count"], **total}), flush=True)
    for at in range(int(first), total["count"] + 1, int(step)):
        print(json.dumps({"at": at, **trial(storage, Path(folder), scenario, fault, at)}), flush=True)


if __name__ == "__main__":
    main()
