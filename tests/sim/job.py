"""A training job: ranks on hosts, a launcher that starts them, ends them and starts them again; and what each rank does."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from sim.shims import machine
from sim.shims.network import ProcessGroup, Server, TCPStore
from sim.world import Killed, Proc, here

_SKIPPED = "SaveSkippedError"
_tokens = itertools.count(1)


class Attempt:
    """One start of a job."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.hosts: list[int] = []
        self.procs: dict[int, Proc] = {}
        self.codes: dict[int, int] = {}
        self.launcher: Any = None
        self.server: Any = None

    def __str__(self) -> str:
        return f"{self.job.name}.{self.number}"

    @property
    def over(self) -> bool:
        """Whether no rank of it lives."""
        return not any(proc.alive for proc in self.procs.values())


class Job:
    """A job that is started again until it is done.

    Args:
        history: to which it belongs.
        name: of the job.
        hosts: the host of each rank.
        facts: ``steps``, ``config`` (plain data), ``wait`` (chance to wait for a save), ``pace_s``, ``door``.
    """

    def __init__(self, history: Any, name: str, hosts: list[int], facts: dict[str, Any]) -> None:
        self.history, self.world, self.name, self.hosts, self.facts = history, history.world, name, hosts, facts
        self.attempts: list[Attempt] = []
        self.done = False
        self.given_up = False
        self.step = 0

    def start(self) -> None:
        """Start all ranks."""
        if self.done or self.given_up:
            return
        if len(self.attempts) >= self.facts.get("attempts", 8):
            self.given_up = True
            return
        attempt = Attempt(self, len(self.attempts))
        self.attempts.append(attempt)
        self.world.log("starts", str(attempt))
        if (layouts := self.facts.get("layouts")) is not None:
            self.hosts = layouts[attempt.number % len(layouts)]
        attempt.hosts = self.hosts
        hosts = self.world.hosts
        if any(not hosts[number].up for number in self.hosts):
            self.world.at(self.world.now + 3.0, self._again, attempt)
            return
        attempt.launcher = Proc(self.world, hosts[self.hosts[0]], f"{attempt}.launcher")
        attempt.server = Server(attempt.launcher, self.world.net.port()) if len(self.hosts) > 1 else None
        for rank, number in enumerate(self.hosts):
            proc = Proc(self.world, hosts[number], f"{attempt}.{rank}")
            proc.slot = self.history.take_slot(proc)
            proc.facts |= {"rank": rank, "size": len(self.hosts), "attempt": attempt, "job": self}
            proc.facts["namespace"] = self.facts.get("namespace", 4026531836)
            proc.at_end.append(lambda rank=rank, attempt=attempt: self._exited(attempt, rank))
            attempt.procs[rank] = proc
            self.world.at(self.world.now + self.world.rng.uniform(0, 0.4), self._begin, proc)

    def _begin(self, proc: Proc) -> None:
        if proc.alive:
            proc.start(rank_main)

    def _exited(self, attempt: Attempt, rank: int) -> None:
        world = self.world
        code = attempt.codes.get(rank, -9)
        if code and not attempt.over and world.rng.random() < 0.7:
            world.at(world.now + world.rng.uniform(0.5, 8.0), self._end, attempt)  # as torchrun does
        if attempt.over:
            if all(attempt.codes.get(one) == 0 for one in attempt.procs):
                self.done = True
                world.log("done", str(attempt))
            else:
                world.at(world.now + world.rng.uniform(0.5, 5.0), self._again, attempt)

    def _end(self, attempt: Attempt) -> None:
        for proc in attempt.procs.values():
            proc.kill("by the launcher")

    def _again(self, attempt: Attempt) -> None:
        if attempt is self.attempts[-1]:
            if attempt.launcher is not None:
                attempt.launcher.kill("over")
            self.start()


def phase(name: str) -> None:
    """What this process is doing from now on."""
    here().proc.facts["phase"] = name


def rank_main() -> None:
    """What a rank does: open, resume, train and save, close."""
    task = here()
    proc = task.proc
    facts, slot, attempt = proc.facts, proc.slot, proc.facts["attempt"]
    if facts["size"] > 1:
        facts["meeting"] = TCPStore(server=attempt.server)
        facts["world group"] = ProcessGroup()
    code = 1
    try:
        _train(proc, slot, attempt)
        code = 0
    except Killed:
        raise
    except Exception as error:
        known = slot.load("safe_ckpt.errors").SafeCheckpointError
        proc.world.log("raises", proc.name, type(error).__name__, error)
        attempt.job.history.raised(proc, error, known=isinstance(error, known))
    finally:
        if proc.alive:
            phase("ending")
            machine.at_exit()
            attempt.codes[facts["rank"]] = code
            proc.world.log("exits", proc.name, code)
            proc.world.at(proc.world.now, proc.kill, "exit")


def _state(token: int, facts: dict[str, Any], per_rank: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": {"w": torch.full((8,), token, dtype=torch.int64), "fixed": torch.arange(4)},
        "optimizer": {"m": torch.full((4,), token, dtype=torch.int64), "n": token},
    }
    if facts["size"] > 1 and facts["job"].facts["per_rank"]:
        state["own"] = per_rank({"r": torch.tensor([token, facts["rank"]])})
    return state


def _tokens_of(state: dict[str, Any], facts: dict[str, Any]) -> list[int]:
    found = [int(one) for one in state["model"]["w"]] + [int(one) for one in state["optimizer"]["m"]]
    found.append(int(state["optimizer"]["n"]))
    if "own" in state:
        own = state["own"]
        own = getattr(own, "value", own)
        found.append(int(own["r"][0]))
        if int(own["r"][1]) != facts["rank"]:
            found.append(-1)
    return found


def _train(proc: Proc, slot: Any, attempt: Attempt) -> None:
    job, facts, world = attempt.job, proc.facts, proc.world
    history = job.history
    oracle, plan = history.oracle, job.facts
    checkpointer = slot.load("safe_ckpt.checkpointer").Checkpointer
    per_rank = slot.load("safe_ckpt.core.state.items").PerRank
    config = slot.load("safe_ckpt.config").CheckpointConfig.from_mapping(plan["config"])
    phase("open")
    with history.timed("open", plan["limits_s"]):
        hooks = [lambda event: history.mirror.announced(proc, event)] if history.mirror is not None else []
        ckpt = checkpointer(plan["directory"], config, hooks=hooks)
    phase("resume")
    floor, state = oracle.newest_announced(), _state(0, facts, per_rank)
    with history.timed("resume", plan["limits_s"]):
        info = ckpt.resume(state)
    oracle.resumed(attempt, facts["rank"], floor, info, _tokens_of(state, facts))
    world.log("resumed", proc.name, info.name if info is not None else None)
    first = info.step + 1 if info is not None else 0
    begun: list[tuple[Any, Any]] = []

    def look() -> None:
        for save, handle in list(begun):
            if handle.done():
                begun.remove((save, handle))
                oracle.ended(save, facts["rank"], _outcome(handle._save), handle._save.op_id)

    def again(step: int) -> bool:
        """Whether this step is saved twice; the same on every rank."""
        return bool(plan["again"]) and (step * 7 + attempt.number + history.seed) % 10 < 10 * plan["again"]

    try:
        last = first + 1 if plan.get("once") else plan["steps"]
        steps = [one for step in range(first, last) for one in ([step, step] if again(step) else [step])]
        for number, step in enumerate(steps):
            phase("train")
            task = here()
            task.sleep(plan["pace_s"] * world.rng.uniform(0.5, 1.5))
            look()
            stop = plan["signals"] and ckpt.stop_requested
            token = attempt.number * 100_000 + number + 1 + job.facts["base"]
            save = oracle.saving(attempt, step, token, facts["size"])
            phase("save")
            with history.timed("save", plan["limits_s"]):
                handle = ckpt.save(step, _state(token, facts, per_rank))
            begun.append((save, handle))
            job.step = max(job.step, step)
            if history.choices.random() < plan["wait"] and not stop:
                phase("wait")
                with history.timed("wait", plan["limits_s"]):
                    handle.wait_until_over()
            look()
            if stop:
                world.log("stops", proc.name, step)
                break
        phase("close")
        with history.timed("close", plan["limits_s"]):
            ckpt.close()
        look()
        if history.mirror is not None and facts["rank"] == 0:
            history.mirror.closed(proc)
    except Exception:
        look()
        phase("close after an error")
        with history.timed("close", plan["limits_s"]):
            ckpt._engine.close(quiet=True, within_s=config.timeouts.shutdown_s)
        raise
    finally:
        if proc.alive:
            look()


def _outcome(save: Any) -> str:
    if save.outcome is not None:
        return "ok"
    kind = type(save.error).__name__
    return {"CommitOutcomeUnknown": "unknown", _SKIPPED: "skipped"}.get(kind, kind)
