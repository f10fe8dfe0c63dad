"""``safe-ckpt audit`` and ``safe_ckpt.testing.audit`` with real scripts: what they say, and how they end."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import safe_ckpt.testing
from safe_ckpt.errors import AuditError

pytestmark = pytest.mark.timeout(180)
# A loop that saves by hand; what a test leaves out of the resume stands in the place of LOAD.
SCRIPT = """
import os, random, sys, numpy, torch
SEED
model, path = torch.nn.Linear(4, 2), os.path.join(sys.argv[1], "c.pt")
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x, step = torch.randn(64, 8, 4), 0
if os.path.exists(path):
    saved = torch.load(path)
    LOAD
while step < 30:
    model(x[step]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.replace(path + ".new", path)
"""
LOGS = 'open(sys.argv[1] + "/log", "a").close()'
LOAD = 'model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"]); step = saved["step"]'


def script(folder, load=LOAD, seed="torch.manual_seed(0); random.seed(0); numpy.random.seed(0)", text=SCRIPT):
    file = folder / "train.py"
    file.write_text(text.replace("LOAD", load).replace("SEED", seed))
    return [sys.executable, str(file), "{out}"]


def command(*options, **more):
    words = [sys.executable, "-m", "safe_ckpt.tools.cli", "audit", "--stop", "6", "--until", "12", *options]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **more}, timeout=150, check=False)


def test_an_exact_script_ends_with_0_and_says_equal(tmp_path):
    """Killed three times, also while it saves; nothing is left in the folder of temporary files, nothing runs on."""
    (tmp_path / "tmp").mkdir()
    done = command("--stops", "3", "--within-save", "--", *script(tmp_path), TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.startswith("equal: ")
    assert not [name for name in os.listdir(tmp_path / "tmp") if "safe-ckpt" in name]


def test_a_script_that_forgets_ends_with_1_and_says_what(tmp_path):
    """As text, as JUnit XML, and what the runs wrote stays where it is asked for."""
    load = 'model.load_state_dict(saved["model"]); step = saved["step"]'
    kept = tmp_path / "kept"
    done = command("--junit", str(tmp_path / "a.xml"), "--folder", str(kept), "--", *script(tmp_path, load))
    assert done.returncode == 1, done.stderr
    assert "step 5, the first after the resume, rank 0: optimizer: exp_avg, exp_avg_sq, step" in done.stdout
    assert (kept / "stopped-6" / "c.pt").exists()
    assert len(ElementTree.parse(tmp_path / "a.xml").findall(".//failure")) == 1
    again = command("--folder", str(kept), "--", *script(tmp_path, load))
    assert (again.returncode, "is not empty" in again.stderr) == (2, True)


def test_a_script_that_seeds_nothing_cannot_be_compared_but_its_moments_can(tmp_path):
    """Exit status 2, and still the optimizer is named."""
    load = 'model.load_state_dict(saved["model"]); step = saved["step"]'
    done = command("--json", "--", *script(tmp_path, load, seed=""))
    said = json.loads(done.stdout)
    assert (done.returncode, "seed them" in said["cannot"]) == (2, True)
    assert said["findings"][0]["names"] == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.thorough
def test_a_script_that_does_not_resume_differs_though_its_steps_are_those_of_the_beginning(tmp_path):
    """All that it does after the second start equals the beginning: no success."""
    done = command("--", *script(tmp_path, load="pass"))
    assert (done.returncode, "began at the beginning" in done.stdout) == (1, True)
    assert "nothing was resumed after a kill behind 6 steps, so it was killed behind 11 as well" in done.stdout


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("raise SystemExit('no data here')", {}, "the script ended with 1; the last lines of .*no data here"),
        ("print('done')", {}, "made no step with an optimizer"),
        pytest.param(
            SCRIPT.replace("step < 30", "step < 5"),
            {},
            "makes 5 optimizer steps: stop it behind fewer",
            marks=pytest.mark.thorough,
        ),
        (
            SCRIPT.replace("% 4", "% 99"),
            {},
            "nothing was saved below {out} within 11 steps: save earlier, or raise --until",
        ),
        ("import time; time.sleep(999)", {"timeout_s": 2.0}, "not over after 2 s"),
    ],
)
def test_what_cannot_be_audited_is_told(tmp_path, text, options, said):
    """The script's own error, too few steps, no checkpoint, no end."""
    with pytest.raises(AuditError, match=f"(?s){said}"):
        safe_ckpt.testing.audit(script(tmp_path, text=text), stop=6, until=12, **options)


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ([sys.executable, "a.py"], {}, "write {out} where"),
        ([sys.executable, "-I", "a.py", "{out}"], {}, "leave them out"),
        (["no-such-program", "{out}"], {}, "no-such-program could not be started"),
        ([sys.executable, "a.py", "{out}"], {"stop": 9, "until": 9}, "stop=9 must lie below until=9"),
    ],
)
def test_what_is_wrong_before_anything_runs_is_told(words, options, said):
    """An option of the script that looks like one of Python's is none."""
    with pytest.raises(AuditError, match=said):
        safe_ckpt.testing.audit(words, **options)


@pytest.mark.parametrize(
    ("logged", "stop", "until"),
    [
        pytest.param("", 4, 7, marks=pytest.mark.thorough),
        pytest.param("", 2, 12, marks=pytest.mark.thorough),
        pytest.param(LOGS, 2, 12, marks=pytest.mark.thorough),
        pytest.param(LOGS, 4, 7, marks=pytest.mark.thorough),
    ],
)
def test_a_kill_before_the_first_save_comes_later(tmp_path, stop, until, logged):
    """Up to the last step but one, also where a file that is no checkpoint lies there already; and it is said."""
    text = SCRIPT.replace("SEED", f"SEED\n{logged}")
    found = safe_ckpt.testing.audit(script(tmp_path, text=text), stop=stop, until=until)
    assert found.equal, str(found)
    assert found.killed == {(2, 12): (2, 4, 8), (4, 7): (4, 6)}[stop, until]
    assert str(found).startswith(
        f"nothing was resumed after a kill behind {', '.join(map(str, found.killed[:-1]))} steps"
    )


@pytest.mark.thorough
def test_the_script_sees_nothing_of_it(tmp_path):
    """Its output is the same, a sitecustomize that exists is run too, and arguments for the resume are added."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('site', flush=True)")
    text = "import sys\nprint(sys.argv[2:], flush=True)\n" + SCRIPT
    words = script(tmp_path, text=text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    options = ["--stop", "6", "--until", "12", "--folder", str(tmp_path / "kept"), "--resume-args=--go on"]
    done = subprocess.run(
        [sys.executable, "-m", "safe_ckpt.tools.cli", "audit", *options, "--", *words],
        capture_output=True, text=True, env=environment, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "kept/whole-1.log").read_text() == "site\n[]\n"
    assert (tmp_path / "kept/stopped-6-1.log").read_text() == "site\n['--go', 'on']\n"
