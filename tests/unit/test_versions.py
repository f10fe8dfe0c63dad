import importlib.metadata
import logging
import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import safe_ckpt
from safe_ckpt import versions
from safe_ckpt.errors import UnsupportedVersionError
from safe_ckpt.versions import SUPPORTED, Supported, judge_release
from versions import versions_page

ROOT = Path(__file__).resolve().parents[2]
SOME = Supported(lowest="2.9", newest="2.15.0", because="x is not in it")


@pytest.fixture
def installed(monkeypatch):
    """Versions that stand in for what is installed."""
    stand_ins = {"torch": SUPPORTED["torch"].newest, "accelerate": "1.9"}
    monkeypatch.setattr(versions, "_installed", stand_ins.get)
    monkeypatch.setattr(versions, "_reported", set())
    return stand_ins


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ("2.8.1", "too old"),
        ("1.13", "too old"),
        ("2.9.0rc1", "allowed"),
        ("2.9.0a0+build.5", "allowed"),
        ("2.9", "allowed"),
        ("2.13.0+cpu", "allowed"),
        ("v2.15", "allowed"),
        ("2.15.0.post1", "allowed"),
        ("2.15.1", "newer release"),
        ("2.100.0.dev20270101", "newer release"),
        ("3.0", "newer series"),
    ],
)
def test_a_release_is_judged_by_its_numbers(found, verdict):
    """Local builds, pre-releases and zeros at the end change nothing; only the first number makes a series."""
    assert judge_release(found, SOME) == verdict


def test_before_1_0_the_second_number_makes_a_series():
    """0.20 may break what 0.19 had."""
    early = Supported(lowest="0.17.5", newest="0.19.8", because="")
    assert [judge_release(found, early) for found in ("0.17.4", "0.19.9", "0.20.0", "1.0")] == [
        "too old",
        "newer release",
        "newer series",
        "newer series",
    ]


def test_a_framework_too_old_is_an_import_error_with_the_remedy(installed):
    """Its fields name the package, both releases, and the command."""
    installed["accelerate"] = "1.2.0"
    with pytest.raises(ImportError) as caught:
        versions.refuse_old_releases("accelerate")
    error = caught.value
    assert isinstance(error, UnsupportedVersionError)
    assert (error.package, error.found, error.lowest) == ("accelerate", "1.2.0", SUPPORTED["accelerate"].lowest)
    assert 'pip install --upgrade "accelerate>=1.8"' in str(error)
    installed.update(torch="2.5.1", accelerate="1.9")
    with pytest.raises(UnsupportedVersionError, match=r"torch 2\.5\.1 is too old"):
        versions.refuse_old_releases("accelerate")


def test_a_framework_that_works_in_part_is_one_warning(installed, caplog):
    """It is let through, and what does not work is said once."""
    installed.update(torch="2.8.0")
    versions.refuse_old_releases()
    versions.refuse_old_releases()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "torch 2.8.0 is older than 2.9: with gloo a raised timeout has no effect" in said


def test_a_framework_that_is_not_installed_is_named_with_what_installs_it(installed):
    """The command that installs it today is in the message."""
    with pytest.raises(
        UnsupportedVersionError, match=r"deepspeed is not installed: .*pip install --upgrade .deepspeed>="
    ):
        versions.refuse_old_releases("deepspeed")


def test_a_newer_series_warns_once_and_a_newer_release_never(installed, caplog):
    """A patch must not nag; what may have broken is said, once per process."""
    caplog.set_level(logging.INFO, "safe_ckpt")
    installed.update(torch="2.99.0", accelerate="2.0.0")
    for _ in range(2):
        versions.refuse_old_releases("accelerate")
    assert [(record.levelname, record.message.split()[0]) for record in caplog.records] == [
        ("INFO", "torch"),
        ("WARNING", "accelerate"),
    ]


def test_a_framework_without_a_version_is_let_through(installed, caplog):
    """Code on the path that nobody installed says nothing of itself."""
    caplog.set_level(logging.INFO, "safe_ckpt")
    installed["accelerate"] = ""
    versions.refuse_old_releases("accelerate")
    assert "not known" in caplog.text


def test_one_of_lightnings_two_packages_is_enough_and_both_must_fit(installed):
    """Our classes derive from those of both where both are installed."""
    with pytest.raises(UnsupportedVersionError, match="lightning is not installed"):
        versions.check_either("lightning", "pytorch-lightning")
    installed["pytorch-lightning"] = "2.6"
    versions.check_either("lightning", "pytorch-lightning")
    installed["lightning"] = "2.4"
    with pytest.raises(UnsupportedVersionError, match=r"lightning 2\.4"):
        versions.check_either("lightning", "pytorch-lightning")


def test_installed_frameworks_are_found_by_the_names_of_pip():
    """Releases are read from what pip wrote down, under the names that it uses."""
    versions.refuse_old_releases("accelerate", "transformers")
    versions.check_either("lightning", "pytorch-lightning")


def test_the_oldest_releases_of_the_table_are_those_of_pyproject():
    """pyproject.toml allows from the same release on."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={SUPPORTED["python"].lowest}"' in project
    for package, supported in SUPPORTED.items():
        if package != "python":
            found = set(re.findall(rf'"{package}(?:\[\w+\])?>=([\d.]+)"', project))
            assert found == {supported.lowest}, package


def test_both_ends_of_the_table_were_run():
    """``make test-versions`` ran the oldest and the newest release of each: what it wrote down says when, and with what."""
    record = versions_page.read()
    for package, supported in SUPPORTED.items():
        if package in ("torchtitan", "ray"):  # one release, which make test-torchtitan runs
            assert supported.lowest == supported.newest
            continue
        for end, claimed in (("oldest", supported.lowest), ("newest", supported.newest)):
            ran = versions_page.base(record[end]["packages"][package])
            if package == "python":
                ran = ran.rpartition(".")[0]
            assert Version(ran) == Version(claimed), f"{package}: {end}"
    for end in versions_page.ENDS:
        suites = record[end]["suites"]
        assert len(suites) == len(("unit", "several ranks", "quick starts", "contracts", "deepspeed"))
        assert [(name, suite["failed"]) for name, suite in suites.items() if suite["failed"]] == []


def test_the_page_says_what_was_run():
    """The tables of docs/limits.md are those that are made of what was written down."""
    page = versions_page.PAGE.read_text(encoding="utf-8")
    assert versions_page.with_tables(page, versions_page.read()) == page


def test_the_citation_is_of_this_version():
    """CITATION.cff names the version that the package has."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == safe_ckpt.__version__
    assert cited["license"] == importlib.metadata.metadata("safe-ckpt")["License-Expression"]
