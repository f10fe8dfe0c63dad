"""The findings in the answers of the ranks. Pure: each function takes a mapping of rank to answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from safe_ckpt.text import duration, listed
from safe_ckpt.tools.doctor.check import Finding, fail, ok, warn, warn_if

_LAG_S = 5.0
Answers = Mapping[int, Mapping[str, Any]]


def named(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 1, 2 and 3 more``."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def sides(values: Mapping[int, object]) -> str:
    """The ranks of each value: ``ranks 0, 2: a; rank 1: b``."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    return "; ".join(f"{named(who)}: {value}" for value, who in by_value.items())


def versions(reported: Answers) -> list[Finding]:
    """Whether all ranks run the same versions."""
    names = dict.fromkeys(name for answer in reported.values() for name in answer["versions"])
    findings = []
    for name in names:
        values = {rank: answer["versions"].get(name, "none") for rank, answer in reported.items()}
        if len(set(values.values())) > 1:
            advice = "install the same on every node: one version may not understand the files and messages of another"
            make = fail if name in ("safe-ckpt", "torch") else warn
            findings.append(make("same versions", f"{name}: {sides(values)}", advice))
    return findings or [ok("same versions", f"{len(names)} packages are the same on all ranks")]


def settings(reported: Answers) -> Finding:
    """Whether all ranks read the same settings from the file that SAFE_CKPT_CONFIG names."""
    broken = {rank: answer["settings_problem"] for rank, answer in reported.items() if answer["settings_problem"]}
    if broken:
        return fail("same settings", sides(broken), "correct the file that SAFE_CKPT_CONFIG names, on those nodes")
    values = {rank: answer["settings"] for rank, answer in reported.items()}
    if len(set(values.values())) > 1:
        advice = "let SAFE_CKPT_CONFIG name the same file on every node: ranks with different settings refuse to start"
        return fail("same settings", sides(values), advice)
    return ok("same settings", "the same on all ranks")


def directories(reported: Answers, seen: Answers) -> list[Finding]:
    """Whether all ranks see one directory, under one name, and may write to it."""
    paths = {rank: answer["path"] for rank, answer in reported.items()}
    blind = [rank for rank, answer in seen.items() if not answer["seen"]]
    if blind:
        text = f"{named(blind)} {'do' if len(blind) > 1 else 'does'} not see what rank 0 created"
        text += f" ({sides({rank: paths[rank] for rank in (0, *blind)})})"
        advice = "give every rank the same directory, on a file system that all hosts mount"
        return [fail("same directory", text, advice)]
    if len(set(paths.values())) > 1:
        advice = "it is one directory under several names: give every rank the same one"
        return [fail("same directory", sides(paths), advice)]
    problems = {rank: answer["problem"] for rank, answer in seen.items() if answer.get("problem")}
    if problems:
        advice = "run as the same user on every node, and let every node mount the directory for writing"
        return [fail("same directory", sides(problems), advice)]
    lag_s = max((answer["after_s"] for rank, answer in seen.items() if rank), default=0.0)
    text = f"every rank sees and writes it; what rank 0 creates is seen within {duration(lag_s)}"
    advice = "the file system caches what folders hold: every save waits that long"
    return [warn_if(lag_s > _LAG_S, "same directory", text, advice, lag_s=lag_s)]


def groups(ended: Answers) -> Finding:
    """Whether a process group could be made."""
    problems = {rank: answer["group"] for rank, answer in ended.items() if answer["group"]}
    if problems:
        advice = "name the network interface that the nodes share: export GLOO_SOCKET_IFNAME=eth0 (see ip addr)"
        return fail("process group", sides(problems), advice)
    return ok("process group", "gloo connects all ranks")


def machines(reported: Answers, seen: Answers) -> list[Finding]:
    """The warnings and failures of other hosts, as one rank of each reports them. Rank 0 reports its own host itself."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(reported):
        hosts.setdefault(reported[rank]["machine"], []).append(rank)
    findings: list[Finding] = []
    for ranks in hosts.values():
        speaker = ranks[0]
        where = f"{reported[speaker]['host']} ({named(ranks)})"
        amiss = [finding for finding in seen[speaker].get("findings", ()) if finding["state"] in ("warn", "fail")]
        findings += [Finding(**{**finding, "where": where}) for finding in amiss]
    text = f"{len(hosts)} {'hosts' if len(hosts) > 1 else 'host'}"
    return [ok("hosts", text, hosts=len(hosts)), *findings]
