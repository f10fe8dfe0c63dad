"""The audit names what a resume left out, in loops of six kinds, and says nothing of one that left out nothing."""

import functools
import sys
import tempfile
from pathlib import Path

import pytest

from kit.audits import Audited, named
from kit.thorough import THOROUGH
from support import program_path

pytestmark = pytest.mark.timeout(600)
STATE = {
    "optimizer": ("state", "exp_avg"),
    "exp_avg": ("state", "exp_avg"),
    "exp_avg_sq": ("state", "exp_avg_sq"),
    "step": ("state", "step"),
    "scheduler": ("groups", "lr"),
    "average": ("copies", "average"),
    "python": ("generators", "python"),
    "numpy": ("generators", "numpy"),
    "torch": ("generators", "torch"),
    "buffer": ("buffers", "running_mean"),
    "best": ("notes", "best"),
    "all": ("state", "exp_avg"),
}
OF_NET = {**STATE, "frozen": ("frozen", "middle.weight"), "seen": ("notes", "seen")}
BY_HAND = {
    **STATE,
    "workers": ("data", "seeds of its workers"),
    "accumulation": ("data", "the accumulation began anew"),
    "epoch": ("data", "batches are trained twice"),
    "position": ("data", "batches are trained twice"),
    "skipped": ("data", "batches are left out"),
    "twice": ("data", "batches are trained twice"),
}
ALONE = {"scaler": ("scaler", "scale"), "frozen": ("frozen", "3.weight")}
PLACE = {**{name: BY_HAND[name] for name in ("skipped", "twice")}, "position": ("data", "the loader began again")}
OF_TRAINER = {name: one for name, one in OF_NET.items() if name != "best"} | {"position": PLACE["position"]}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Loop -> how it is started, and what its resume can leave out.
LOOPS = {
    "plain": (["by_hand"], {**BY_HAND, **ALONE}),
    "ddp": ([*TORCHRUN, "by_hand", "--kind", "ddp"], {**BY_HAND, "torch of rank 1": ("generators", "torch")}),
    "fsdp2": ([*TORCHRUN, "by_hand", "--kind", "fsdp2"], {**BY_HAND, "torch of rank 1": ("generators", "torch")}),
    "lightning": (["with_lightning"], {**OF_NET, "seen": ("logged", "seen")}),
    "accelerate": (["with_accelerate"], OF_NET),
    "accelerate, skipping": (["with_accelerate", "--skip"], PLACE),
    "transformers": (["with_transformers"], OF_TRAINER),
}
SOME = [*(("plain", name) for name in ("optimizer", "average", "twice", "best")), ("lightning", "scheduler")]
ALL = [(loop, name) for loop, (_, names) in LOOPS.items() for name in names]


@functools.cache
def audited(loop):
    """Its whole runs and the start that is killed, once for all tests of a process."""
    words = [str(program_path(word)) if word.startswith(("by_", "with_")) else word for word in LOOPS[loop][0]]
    folder = tempfile.mkdtemp(prefix=f"audit-{loop.partition(',')[0]}-")
    return Audited([sys.executable, *words, "--out", "{out}"], Path(folder))


@pytest.mark.parametrize(("loop", "omitted"), ALL if THOROUGH else SOME)
def test_what_a_resume_left_out_is_named(loop, omitted, monkeypatch):
    """By its category and its name, as the first thing that differs, though all that follows differs as well."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runs = audited(loop)
    monkeypatch.setenv("OMIT", omitted)
    found = runs.compared(omitted.replace(" ", "-"))
    category, name = LOOPS[loop][1][omitted]
    if category == "notes":
        assert not found.findings
        assert any(name in note for note in found.notes)
        return
    finding = named(found)[category]
    assert name in f"{finding.names} {finding.means}"
    if "rank 1" in omitted:
        assert (finding.rank, {one.category for one in found.findings}) == (1, {"generators"})


@pytest.mark.parametrize("loop", LOOPS if THOROUGH else ["plain", "lightning"])
def test_a_resume_that_left_out_nothing_has_no_finding(loop, monkeypatch):
    """No false alarm, over all steps that are compared."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = audited(loop).compared("clean")
    assert (found.findings, found.notes) == ((), ())
    assert found.steps > 10
