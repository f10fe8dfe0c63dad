"""What public reports say of a resume, each in the smallest loop that does it: the audit names it.

The reports are issues and pull requests of GitHub, found by what users wrote of training that went on differently.
"""

import functools
import sys
import tempfile
from pathlib import Path

import pytest

from kit.audits import Audited
from support import program_path

pytestmark = [pytest.mark.timeout(600), pytest.mark.framework, pytest.mark.thorough]
# Report -> what is named of it: the category, a name or words of its meaning, and how many steps after the resume.
REPORTS = {
    "IntelLabs/distiller#145": [("state", "exp_avg", 0), ("groups", "lr", 0)],
    "D-X-Y/NAS-Bench-201#19": [("groups", "lr", 8)],
    "KempnerInstitute/KempnerForge#115": [("state", "exp_avg", 0)],
    "ultralytics/yolov3#902": [("groups", "lr", 0)],
    "Megvii-BaseDetection/YOLOX#1318": [("weights", "no step of the run", 0)],
    "ai2cm/ace#349": [("copies", "AveragedModel", 0)],
    "pytorch/vision#4923": [("scaler", "scale", 0)],
    "TigreGotico/phoonnx#464": [("data", "the loader began again", 0), ("generators", "torch", 0)],
    "huggingface/accelerate#2823": [("data", "batches are left out", 0)],
    "KaiyangZhou/deep-person-reid#64": [("data", "the loader began again", 0)],
}


OF_THE_WHOLE_RUN = ("TigreGotico/phoonnx#464", "huggingface/accelerate#2823")  # another order, or other saves


@functools.cache
def audited(whole):
    """What runs without a stop, and the start that is killed: of all reports whose resume alone is another."""
    folder = Path(tempfile.mkdtemp(prefix="audit-reported-"))
    return Audited([sys.executable, str(program_path("reported")), "{out}"], folder)


def compared(report, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("REPORT", report if report in OF_THE_WHOLE_RUN else "")
    runs = audited(report if report in OF_THE_WHOLE_RUN else "")
    monkeypatch.setenv("REPORT", report)
    return runs.compared(report.replace("/", "-") or "none")


@pytest.mark.parametrize("report", REPORTS)
def test_what_users_reported_is_named(report, monkeypatch):
    """By its category and at its step, and nothing else beside it."""
    found = compared(report, monkeypatch).findings
    assert [one.category for one in found] == [category for category, *_ in REPORTS[report]], found
    for finding, (_, words, after) in zip(found, REPORTS[report], strict=True):
        assert words in f"{finding.names} {finding.detail} {finding.means}"
        assert finding.step - finding.resumed_at == after


def test_the_same_loop_without_any_of_it_is_equal(monkeypatch):
    """What is named above is what the report says, and not the loop."""
    found = compared("", monkeypatch)
    assert (found.findings, found.steps) == ((), 22)
