"""What our own pages and examples tell a user to write resumes exactly: the audit says so."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import safe_ckpt.testing

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework, pytest.mark.thorough]
ROOT = Path(__file__).parents[2]
# Page -> its argument, behind how many optimizer steps it is killed, how many are compared. That of dcp seeds nothing.
PAGES = {
    "torch": ("4", 30, 45),
    "accelerate": ("6", 40, 100),
    "lightning": ("4", 35, 50),
    "transformers": ("60", 25, 40),
}
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Example -> how it is started, its arguments, behind how many optimizer steps it is killed, how many are compared.
EXAMPLES = {
    "accelerate_digits": ([], [], 40, 100),
    "dcp_one_import": ([], [], 30, 45),
    "fabric_loop": ([], [], 25, 40),
    "fsdp2_reshard": (TWO, [], 35, 50),
    "lightning_digits": ([], [], 35, 60),
    "lora": ([], [], 13, 20),
    "lora accelerate": ([], ["accelerate"], 13, 20),
    "lora lightning": ([], ["lightning"], 13, 20),
    "lora transformers": ([], ["transformers"], 13, 20),
    "plain_torch": ([], [], 30, 45),
    "publish_any_saver": ([], [], 25, 40),
    "transformers_sharded fsdp": (TWO, ["fsdp"], 25, 40),
    "transformers_sharded tp": (TWO, ["tp"], 25, 40),
    "transformers_tiny": ([], [], 25, 40),
}
NOT_AUDITED = {
    "deepspeed_zero3_nvme": "needs DeepSpeed, whose environment is another one",
    "demo": "kills its own processes",
    "evaluate_run": "trains nothing",
    "ray_train": "needs Ray, whose environment is another one",
    "torchtitan_debug": "needs torchtitan, whose environment is another one",
}


def script_of(page):
    """The one that a reader is told to save."""
    text = (ROOT / "docs" / "start" / f"{page}.md").read_text(encoding="utf-8")
    return re.search(r'```python title="train.py"\n(.*?)```', text, re.DOTALL)[1]


@pytest.mark.parametrize("page", PAGES)
def test_the_script_of_a_page_resumes_exactly(page, tmp_path, monkeypatch):
    """All that both whole runs have in common is as in the run that was not stopped; generators that no page seeds are not."""
    argument, stop, until = PAGES[page]
    (tmp_path / "train.py").write_text(script_of(page), encoding="utf-8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = shlex.join([sys.executable, str(tmp_path / "train.py"), argument])
    found = safe_ckpt.testing.audit(["sh", "-c", f"cd {{out}} && exec {words}"], stop=stop, until=until, timeout_s=600)
    found.check()
    assert found.comparisons[0].steps >= 10


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_resumes_exactly(example, tmp_path, monkeypatch):
    """An example that is killed and started again goes on as one that nobody stopped, in all that both whole runs share."""
    before, arguments, stop, until = EXAMPLES[example]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("STEPS", "60")
    file = ROOT / "examples" / f"{example.partition(' ')[0]}.py"
    command = [sys.executable, *before, str(file), "{out}/run", *arguments]
    found = safe_ckpt.testing.audit(command, stop=stop, until=until, timeout_s=600)
    found.check()
    assert found.comparisons[0].steps >= 8


def test_each_example_is_audited_or_has_its_reason():
    """A new example is no exception that nobody knows of."""
    files = {file.stem for file in (ROOT / "examples").glob("*.py")}
    assert files == {example.partition(" ")[0] for example in EXAMPLES} | NOT_AUDITED.keys()
