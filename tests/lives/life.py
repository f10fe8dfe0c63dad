"""One life: real files, the public interface, and after each step a look at all that is there, beside the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import safe_ckpt
from kit.inside import waits_for_mirror
from kit.limits import PATIENT
from kit.memory_store import ERRORS, VERBS, MemoryStore, no_answer
from lives.model import Model, Rules, Saved
from safe_ckpt import CheckpointConfig, Checkpointer, Health, Mirror, PerRank, Retention
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.errors import CheckpointNotFoundError, NoValidCheckpointError, SafeCheckpointError

STEPS = (1, 2, 3, 9, 10, 11, 12)
_HIDDEN = ".safe_ckpt"
_VALUE = "value.json"
_JUMP = 500


class Wrong(AssertionError):
    """Something is not as the model says."""


def content(value: int, *, sick: bool = False) -> dict[str, Any]:
    """What the state holds that was saved as ``value``: its list grows and shrinks, its numbers may jump."""
    w = torch.full((4,), float(value * size_of(value)))
    w[0] = math.nan if sick else w[0]
    table = {"always": value, f"only {value % 3}": [value] * (value % 2 + 1)}
    return {
        "net": {"w": w, "tied": w, "row": w[1:3]},
        "log": list(range(value * 7 % 5)),
        "table": table,
        "own": PerRank((f"own {value}", value)),
        "value": value,
    }


def size_of(value: int) -> int:
    """By how much its numbers are larger than they usually are."""
    return 10_000 if value % 5 == 4 else 1


def become(state: dict[str, Any], value: int, *, sick: bool = False) -> None:
    """Change all of it in place, as training does."""
    new = content(value, sick=sick)
    state["net"]["w"].copy_(new["net"]["w"])
    state["log"][:] = new["log"]
    state["table"].clear()
    state["table"].update(new["table"])
    state["own"], state["value"] = new["own"], value


def same(state: dict[str, Any], value: int, *, sick: bool) -> bool:
    """Whether it is what was saved, in values and in what shares memory."""
    new, net = content(value, sick=sick), state["net"]
    equal = all(torch.equal(net[name].nan_to_num(-1), new["net"][name].nan_to_num(-1)) for name in net)
    shared = net["tied"].data_ptr() == net["w"].data_ptr() and net["row"].data_ptr() == net["w"].data_ptr() + 4
    own = isinstance(state["own"], PerRank) and state["own"].value == new["own"].value
    return equal and shared and own and all(state[name] == new[name] for name in ("log", "table", "value"))


class Life:
    """A directory from its first save on.

    Args:
        folder: an empty one.
        store: where the mirror is.
    """

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.folder, self.store = folder / "run", store
        self.model, self.published = Model(), Model(rules=Rules(keep_last=2))
        self.ckpt: Checkpointer | None = None
        self.state = content(0)
        self.values = itertools.count(1)
        self.sick: set[int] = set()
        self.marked: set[int] = set()
        self.unhealthy: set[int] = set()
        self.healthy = 0  # the value of the last healthy one that this job knows
        self.inner: dict[str, FileHome] = {}
        self.failing = False  # one request of the next save or resume will

    # Steps. Each draws what it needs from a generator of its own, so that a history may lose others.

    def open(self, draw: random.Random, *, mirror: float = 0.7) -> Checkpointer:
        """Start a job, unless there is one."""
        if self.ckpt is None:
            rules = _rules(draw, mirror=mirror)
            self.ckpt = Checkpointer(self.folder, self._config(rules))
            self.model.rules, self.model.behind, self.model.may_go = rules, False, set()
            self.model.there_may_go, self.model.there_may_come, self.model.last = set(), {}, None
            self.model.followed = set()
            self.state, self.healthy = content(0), 0  # a process of its own
        return self.ckpt

    def close(self, draw: random.Random) -> None:
        """End the job."""
        del draw
        if self.ckpt is not None:
            self.ckpt.close()
            self.ckpt = None
            if self.model.rules.mirror and self.model.up:
                self._after_the_end(self._actual_there())

    def save(self, draw: random.Random) -> None:
        """Save, healthy or not, with a metric or without."""
        ckpt, step = self.open(draw), draw.choice(STEPS)
        sick, loss = draw.random() < 0.2, draw.choice([None, 0.5, draw.randrange(9), draw.randrange(9), math.nan])
        if f"step-{step:08d}" in self.model.held:
            return
        value = next(self.values)
        become(self.state, value, sick=sick)
        metrics, up = {} if loss is None else {"loss": float(loss)}, self.model.up
        with self._glitching(draw):
            info = ckpt.save(step, self.state, metrics=metrics).result()
        self.model.up = up and not self._strikes
        unhealthy = sick or self._jumps(value)
        new = self.model.save(step, value, metrics.get("loss"), sick=unhealthy)
        self.unhealthy |= {value} if unhealthy else set()
        self.healthy = self.healthy if unhealthy else value
        self.model.up, self.failing = up, False
        self.sick |= {value} if sick else set()
        self.marked |= {value} if new.marked else set()
        _require((info.path.name, info.marked) == (new.folder, new.marked), f"saved {info}, not {new}")

    def resume(self, draw: random.Random) -> None:
        """Take the newest, in the same process or as the first thing in a new one."""
        self._resume(draw, None)

    def resume_named(self, draw: random.Random) -> None:
        """Take the one of a step."""
        self._resume(draw, self._step(draw))

    def load(self, draw: random.Random) -> None:
        """Only read, beside the job or without one: the mirror is not asked, and nothing moves."""
        step, state, model = draw.choice([None, self._step(draw)]), content(0), copy.deepcopy(self.model)
        model.rules, model.quarantine = Rules(), []
        said, taken = model.resume(step)
        said = "no valid" if said == "fresh" else said
        self._compare((said, taken), state, lambda: safe_ckpt.load(self.folder, state, step=step))

    def damage(self, draw: random.Random) -> None:
        """Flip a bit of a file, or a digit in the manifest."""
        folder = self._any(draw)
        if folder is None or self.model.here[folder].damage == "manifest":
            return
        kind = draw.choice(["bytes", "bytes", "manifest"])
        files = self.folder / folder
        file = files / "manifest.json" if kind == "manifest" else next(iter(sorted(files.glob("net.*"))))
        data = bytearray(file.read_bytes())
        at = data.index(b'"op_id": "') + 10 if kind == "manifest" else draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(1, 4)
        file.write_bytes(data)
        self.model.here[folder] = _with(self.model.here[folder], damage=kind)

    def remove(self, draw: random.Random) -> None:
        """Delete one by hand."""
        folder = self._any(draw)
        if folder is not None:
            shutil.rmtree(self.folder / folder)
            del self.model.here[folder]
            self.model.may_go.discard(folder)

    def rename(self, draw: random.Random) -> None:
        """Keep one under a name of one's own."""
        folder = self._any(draw)
        if folder is not None:
            name = f"mine-{next(self.values)}"
            (self.folder / folder).rename(self.folder / name)
            self.model.here[name] = _with(self.model.here.pop(folder), folder=name)
            self.model.may_go.discard(folder)

    def lose(self, draw: random.Random) -> None:
        """The disk is lost, once the job is over."""
        del draw
        if self.ckpt is None and not self.inner:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.model.here, self.model.quarantine = {}, []

    def elsewhere(self, draw: random.Random) -> None:
        """The next job runs on another machine, and perhaps the store fails once while it fetches."""
        self.close(draw)
        self.check()
        self.lose(draw)
        self.open(draw, mirror=0.9)
        self.failing = draw.random() < 0.7
        self.resume(draw)

    def hold(self, draw: random.Random) -> None:
        """Another job saves into a checkpoint."""
        folder = self._any(draw, damaged=False)
        if folder is not None and folder.startswith("step-") and folder not in self.inner:
            self.inner[folder] = FileHome(self.folder / folder / "inner", lease_s=60)
            self.inner[folder].open()
            self.model.held.add(folder)

    def release(self, draw: random.Random) -> None:
        """That job is over."""
        for folder in sorted(self.inner)[: draw.randrange(1, 3)]:
            self.inner.pop(folder).close()
            self.model.held.discard(folder)

    def export(self, draw: random.Random) -> None:
        """Weights alone, also beside the checkpoints: parts of one memory, and tied ones."""
        whole = torch.arange(12.0) + draw.randrange(9)
        weights = {"q": whole[:4], "k": whole[4:8], "v": whole[8:], "tied": whole[:4]}
        place = draw.choice([self.folder / "final", self.folder.parent / "weights"])
        self.open(draw).export(weights, place).result()
        found = load_file(place / "model.safetensors")
        tied = {"q", "tied"} & found.keys()
        _require(tied and {"k", "v"} <= found.keys(), f"exported {found.keys()}")
        _require(all(torch.equal(found[name], weights[name]) for name in found), "exported others")

    def publish(self, draw: random.Random) -> None:
        """A folder of the user's own making, in another directory, which has its own retention."""
        step, value, rules = draw.choice(STEPS), next(self.values), Retention(keep_last=2)
        config, pub = CheckpointConfig(timeouts=PATIENT, retention=rules), self.folder.parent / "pub"
        with safe_ckpt.publishing(pub, step, config=config) as folder:
            (folder / _VALUE).write_text(json.dumps(value))
        new = self.published.save(step, value, None, sick=False)
        found = {path.name: json.loads((path / _VALUE).read_text()) for path in pub.glob("step-*")}
        _require(found == {one.folder: one.value for one in self.published.here.values()}, f"published: {found}")
        _require(safe_ckpt.newest(pub).path.name == new.folder, "the newest published is another one")

    def glitch(self, draw: random.Random) -> None:
        """One request of the next save or resume fails."""
        del draw
        self.failing = True

    def down(self, draw: random.Random) -> None:
        """The mirror does not answer, or does again."""
        del draw
        self.model.up = not self.model.up
        self.store.before = None if self.model.up else no_answer

    def _jumps(self, value: int) -> bool:
        """Whether its norm has grown too much since the last healthy one that this job has saved or resumed from."""
        before = self.healthy * size_of(self.healthy)
        return self.model.rules.jumps and self.healthy > 0 and value * size_of(value) > _JUMP * before

    @property
    def _strikes(self) -> bool:
        return self.failing and self.model.up and self.model.rules.mirror

    # What is compared.

    def check(self) -> None:
        """All that is there, here and in the mirror."""
        model, there = self.model, self._actual_there()
        for folder, value in there.items():
            _require(value not in self.marked, f"{folder} with bad numbers is in the mirror")
            known = {
                one.value for one in (model.there.get(folder), model.there_may_come.get(folder)) if one is not None
            }
            _require(value in known, f"{folder} in the mirror is {value}, and may be {known}")
        if model.rules.follow:
            model.there_may_go |= {one.folder for one in model.there.values() if one.value in model.followed}
        missing = model.there.keys() - there.keys() - model.there_may_go
        _require(not missing, f"{missing} is gone from the mirror")
        both = [*model.there_may_come.values(), *model.there.values()]
        known = {(one.folder, one.value): one for one in both}
        model.there = {folder: known[folder, value] for folder, value in there.items()}
        model.there_may_go &= there.keys()
        if self.ckpt is None or not waits_for_mirror(self.ckpt):
            model.behind, model.there_may_come = False, {}
        self._check_here()

    def _check_here(self) -> None:
        model, here = self.model, self._actual()
        expected = {one.folder: one.value for one in model.here.values()}
        wrong = {folder: value for folder, value in here.items() if expected.get(folder) != value}
        _require(not wrong, f"{wrong} is here and should not; {expected} should")
        gone = expected.keys() - here.keys()
        _require(gone <= model.may_go - model.held, f"{gone} is gone from here")
        newest = max([0, *(one.order for one in model.there.values())])
        early = [one for one in map(model.here.get, gone) if one.order > newest and not one.marked]
        _require(not (early and model.rules.required), f"{early} went before the mirror had a newer one")
        model.followed |= {model.here[folder].value for folder in gone}
        model.here = {folder: model.here[folder] for folder in here}
        model.may_go &= here.keys()
        aside = Counter(_value(path) for path in (self.folder / _HIDDEN / "quarantine").glob("*"))
        _require(
            aside == Counter(one.value for one in model.quarantine), f"in quarantine: {aside}, not {model.quarantine}"
        )

    def _resume(self, draw: random.Random, step: int | None) -> None:
        taken = self._resume_as(draw, step)
        if taken is not None:
            self.healthy = 0 if taken.value in self.unhealthy else taken.value

    def _resume_as(self, draw: random.Random, step: int | None) -> Saved | None:
        ckpt, model = self.open(draw), self.model
        usual, alone = copy.deepcopy(model), copy.deepcopy(model)
        alone.rules = Rules()
        says, here = usual.resume(step), alone.resume(step)
        glitch = self._strikes
        if not model.rules.mirror or (model.up and not glitch):
            self._compare(says, self.state, lambda: ckpt.resume(self.state, step=step))
            self.model = usual
            if model.rules.mirror:
                self._is_there(says[1])
            return says[1]
        before = self.state["value"]
        known = {one.value for one in model.here.values()}
        reached = says[1] is not None and (glitch or says[1].value in known)
        with self._glitching(draw):
            try:
                info = ckpt.resume(self.state, step=step)
            except (SafeCheckpointError, OSError) as error:
                failure: Exception | None = error
            else:
                failure = None
        value, self.failing = self.state["value"], False
        if failure is None and info is not None and reached and value == says[1].value:
            self.model = usual
        elif failure is None and info is not None and here[1] is not None and value == here[1].value:
            self.model = alone
            self.model.rules = model.rules
        elif failure is not None:
            _require(here[0] != "taken", f"a mirror that fails ends the resume of {here[1]}: {failure!r}")
            _require(value == before, "a resume that failed has changed the state")
        else:
            _require(glitch and info is None and says[0] == "fresh", f"resumed {info}, not {says} or {here}")
        self.model.behind = True
        taken = None if failure is not None else says[1] if self.model is usual else here[1]
        if taken is not None:
            _require(same(self.state, value, sick=value in self.sick), f"the state of {taken} differs")
            if not taken.marked:
                self.model.there_may_come[taken.folder] = taken
                self.model._let_go({**self.model.there, taken.folder: taken})
        return taken

    def _compare(self, says: tuple[str, Saved | None], state: dict[str, Any], action: Any) -> None:
        said, taken = says
        before, identities = state["value"], {name: id(state[name]) for name in ("net", "log", "table")}
        tensor = state["net"]["w"]
        try:
            info = action()
            got = "taken" if info is not None else "fresh"
        except NoValidCheckpointError:
            got, info = "no valid", None
        except CheckpointNotFoundError:
            got, info = "not found", None
        _require(got == said, f"{got} {info}, not {said} {taken}")
        value = before if taken is None else taken.value
        _require(state["value"] == value, f"took {state['value']} ({info}), not {taken}")
        if taken is not None:
            _require(info.path.name == taken.folder, f"took {info.path}, not {taken}")
            _require(same(state, value, sick=value in self.sick), f"the state of {taken} differs: {state}")
        kept_ids = {name: id(state[name]) for name in identities}
        _require(kept_ids == identities and state["net"]["w"] is tensor, "restored into other objects")

    def _after_the_end(self, there: dict[str, int]) -> None:
        """With a mirror that answered nothing is left to be done."""
        model = self.model
        self._is_there(model.last)
        due = {folder for folder in model.may_go - model.held if not model.here[folder].marked}
        _require(not due & self._actual().keys() or model.behind, f"{due} is still here after the end")
        if model.rules.follow:
            model.there_may_go |= model.may_go
            newest = max((one.order for one in model.there.values()), default=0)
            followed = {
                one.folder for one in model.there.values() if one.value in model.followed and one.order < newest
            }
            _require(not followed & there.keys() or model.behind, f"{followed} is in the mirror, and was deleted here")

    def _is_there(self, one: Saved | None) -> None:
        """What was saved or resumed last, once the mirror has answered."""
        if one is None or one.marked or self.model.here.get(one.folder) != one:
            return  # nor what was damaged or taken away by hand meanwhile
        above = max([0, *(other.order for other in self.model.there.values())])
        there = self._actual_there()
        _require(one.value in there.values() or one.order < above, f"{one} is not in the mirror: {there}")

    def _actual(self) -> dict[str, int]:
        found = self.folder.glob("*") if self.folder.exists() else ()
        return {path.name: _value(path) for path in found if path.name not in (_HIDDEN, "final")}

    def _actual_there(self) -> dict[str, int]:
        found: dict[str, tuple[int, int]] = {}
        for folder, manifest in self.store.manifests().items():
            name, value = folder.rpartition(".")[0], json.loads(self.store.read(f"run/{folder}/{_VALUE}"))
            found[name] = max(found.get(name, (0, 0)), (manifest["sequence"], value))
        return {name: value for name, (_, value) in found.items()}

    def _step(self, draw: random.Random) -> int:
        """Mostly one that is here, or was."""
        there = sorted({one.step for one in [*self.model.here.values(), *self.model.quarantine]})
        return draw.choice(there) if there and draw.random() < 0.8 else draw.choice(STEPS)

    def _any(self, draw: random.Random, *, damaged: bool = True) -> str | None:
        found = [one.folder for one in self.model.here.values() if damaged or not one.damage]
        free = sorted(set(found) - self.model.held)
        return draw.choice(free) if free else None

    @contextlib.contextmanager
    def _glitching(self, draw: random.Random) -> Any:
        """One request of the mirror fails within, some time, if one is to fail; or all do, if it is away."""
        where, verbs = draw.choice(["before", "before", "after"]), draw.choice([("get_range",), VERBS])
        at, error = draw.randrange(5 if len(verbs) == 1 else 16), draw.choice(ERRORS)
        if not self._strikes:
            yield
            return
        left = itertools.count()

        def once(verb: str, _: str) -> None:
            if verb in verbs and next(left) == at:
                raise error("it failed once")

        setattr(self.store, where, once)
        try:
            yield
        finally:
            setattr(self.store, where, None)

    def _config(self, rules: Rules) -> CheckpointConfig:
        url, mirror = self.store.url(), {}
        if rules.mirror:
            mirror = {"keep_last": rules.there_last, "keep_every_steps": rules.there_every}
            mirror |= {"required": rules.required, "follow": rules.follow, "url": url}
        keep = {"keep_last": rules.keep_last, "keep_best": rules.keep_best, "keep_every_steps": rules.every}
        return CheckpointConfig(
            timeouts=PATIENT,
            retention=Retention(**keep, metric="loss", mode=rules.mode),
            mirror=Mirror(**mirror),
            health=Health(action="mark" if rules.judges else "warn", norm_jump=_JUMP if rules.jumps else None),
        )


def _rules(draw: random.Random, *, mirror: float) -> Rules:
    mirrored = draw.random() < mirror
    return Rules(
        keep_last=draw.choice([None, 1, 2, 3]),
        keep_best=draw.choice([None, None, 1, 2]),
        mode=draw.choice(["min", "max"]),
        every=draw.choice([None, None, 2, 5]),
        judges=draw.random() < 0.8,
        jumps=draw.random() < 0.3,
        mirror=mirrored,
        there_last=draw.choice([None, 1, 2]) if mirrored else None,
        there_every=draw.choice([None, None, 2]) if mirrored else None,
        required=mirrored and draw.random() < 0.4,
        follow=mirrored and draw.random() < 0.3,
    )


def _with(one: Saved, **more: Any) -> Saved:
    return dataclasses.replace(one, **more)


def _value(path: Path) -> int:
    return int(json.loads((path / _VALUE).read_text()))


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)
