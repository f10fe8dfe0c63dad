import inspect
import json
import os
import pickle
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Timeouts, WriterConfig
from safe_ckpt.errors import ConfigError
from safe_ckpt.settings import describe, texts
from safe_ckpt.settings.fields import keys, value_at
from safe_ckpt.settings.sources import load_effective
from safe_ckpt.tools.cli.app import app

DOCS = Path(__file__).parents[3] / "docs/reference"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SAFE_CKPT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ckpt.yaml"


def refused(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_yaml(file)
    return str(caught.value).removeprefix(f"{file}")


# ------------------------------------------------------------------ YAML


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("retention:\n\n  keep_lst: 3", ':3: retention.keep_lst: unknown key; did you mean "keep_last"?'),
        ("# a\nkeep_last: 3", ':2: keep_last: unknown key; "keep_last" belongs under "retention"'),
        ("retention.keep_last: 3", ':1: retention.keep_last: unknown key; "keep_last" belongs under "retention"'),
        (
            "health: {recheck: true}",
            ":1: health.recheck: was removed: memory is not compared between saves any more. Take the key out",
        ),
        (
            "loops:\n  tries: 3",
            ":1: loops: was removed: every start takes the newest healthy checkpoint. Take the section out",
        ),
        ("retention: {lease_s: 3}", ':1: retention.lease_s: unknown key; "lease_s" belongs at the top level'),
        ("a: 1\nsafe_ckpt:\n  lease_s: 0", ":3: lease_s: expected 1 to 3600, got 0.0"),
        ("timeouts: {\n  barrier_s: soon}", ":2: timeouts.barrier_s: expected seconds or \"HH:MM:SS\", got 'soon'"),
        (
            "retention:\n  keep_last: 1\n  keep_last: 2",
            ":3: retention.keep_last: given twice, first in line 2; remove one",
        ),
        ("safe_ckpt: {}\nother: 1\nsafe_ckpt: {}", ":3: safe_ckpt: given twice, first in line 1; remove one"),
        ("lease_s: 5\nretention:\n  keep_best: 1", ":2: retention.metric: keep_best needs the name of a metric"),
        ("save_on_signals:\n- SIGTERM\n- 3", ":1: save_on_signals: expected a list of names, got ('SIGTERM', 3)"),
        ("lease_s: 2024-02-31", ":1: lease_s: day is out of range for month"),
        ("on_busy: wait\n  lease_s: 3", ":2: cannot be read as YAML: mapping values are not allowed here"),
        ("[a, b]: 1", ":1: expected the name of a key"),
        (
            "retention: &a\n  keep_last: *a",
            ":2: retention.keep_last.keep_last.keep_last: nested deeper than any setting",
        ),
        ("\n- 1", ":2: expected keys with values, got a list"),
        (
            f"timeouts:\n  barrier_s: {'9' * 321}",
            f':2: timeouts.barrier_s: expected seconds or "HH:MM:SS", got {"9" * 200}...',
        ),
        (
            "timeouts: {barrier_s: 1.0e+12}",
            ":1: timeouts.barrier_s: expected above 0, at most 31536000, got 1000000000000.0",
        ),
    ],
)
def test_an_error_names_file_line_key_and_what_is_allowed(file, text, said):
    """Where it is, what was got, what is allowed, and the nearest key that there is."""
    assert refused(file, text) == said


@pytest.mark.parametrize("text", ["[" * 5000, "a: &a {<<: *a}", "a: !!python/object/apply:os.getpid []", "a: \x07"])
def test_hostile_yaml_is_refused_and_runs_nothing(file, text):
    """Deep nesting, loops and Python tags end in an error that names the file."""
    assert refused(file, text).startswith(":")


def test_aliases_of_aliases_do_not_grow(file):
    """A file that would expand to millions of values is refused at once."""
    levels = [f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 10)}]" for n in range(12)]
    assert "nested deeper" in refused(file, "\n".join(["l0: &l0 [x]", *levels]))


def test_a_settings_file_that_cannot_be_read_is_named(tmp_path):
    """A file that is not there, a directory, and what is no text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none", "No such file"), (".", "Is a directory"), ("bytes", "cannot be read as YAML")):
        with pytest.raises(ConfigError, match=words) as caught:
            CheckpointConfig.from_yaml(tmp_path / name)
        assert caught.value.source == str(tmp_path / name)


def test_values_arrive_as_they_were_meant(file):
    """An unquoted off and 1:30, merged keys that the section's own are over, and other programs' tags and duplicates beside."""
    file.write_text("""
base: &base {keep_last: 2, keep_every_steps: 7}
other: !include x
other: {a: 1, a: 2}
safe_ckpt:
  retention:
    <<: *base
    keep_last: 3
  timeouts: {barrier_s: 1:30, lengthy_s: "2:00:00"}
  writer: {direct_io: off}
  save_on_signals: [SIGTERM]
""")
    assert CheckpointConfig.from_yaml(file) == CheckpointConfig(
        retention=Retention(keep_last=3, keep_every_steps=7),
        timeouts=Timeouts(barrier_s=90, lengthy_s=7200),
        writer=WriterConfig(direct_io="off"),
        save_on_signals=("SIGTERM",),
    )
    for empty in ("", "safe_ckpt:\n", "# nothing\n", "retention:\n  # keep_last: 3\n", "safe_ckpt:\n  writer:\n"):
        file.write_text(empty)
        assert CheckpointConfig.from_yaml(file) == CheckpointConfig()


def test_an_error_keeps_its_line_across_processes():
    """Source and line survive pickling."""
    error = ConfigError(message="m", key="k", source="f.yaml", line=7)
    assert str(pickle.loads(pickle.dumps(error))) == "f.yaml:7: k: m"


# ------------------------------------------------------------------ the environment


def effective(variables, file=None):
    environ = {f"SAFE_CKPT__{name}": value for name, value in variables.items()}
    return load_effective(CheckpointConfig, environ | ({"SAFE_CKPT_CONFIG": str(file)} if file else {}))


def test_variables_are_over_the_file(file):
    """One key from each: the variable wins, what only the file says stays, and each knows where it came from."""
    file.write_text("retention:\n  keep_last: 2\n  keep_every_steps: 5\n")
    loaded = effective({"RETENTION__KEEP_LAST": "3", "TIMEOUTS__BARRIER_S": "1:30"}, file)
    assert loaded.settings == CheckpointConfig(
        retention=Retention(keep_last=3, keep_every_steps=5), timeouts=Timeouts(barrier_s=90)
    )
    assert str(loaded.origins["retention.keep_last"]) == "SAFE_CKPT__RETENTION__KEEP_LAST"
    assert str(loaded.origins["retention.keep_every_steps"]) == f"{file}:3"
    assert "lease_s" not in loaded.origins
    file.write_text("retention:\n")
    assert effective({"RETENTION__KEEP_LAST": "3"}, file).settings == CheckpointConfig(retention=Retention(keep_last=3))


def test_every_key_has_a_variable_that_takes_its_default():
    """What the reference prints as a default can be written into the variable of that key."""
    variables = {key.path.replace(".", "__").upper(): json.dumps(key.default) for key in keys(CheckpointConfig)}
    loaded = effective(variables)
    assert loaded.settings == CheckpointConfig()
    assert len(loaded.origins) == len(variables) > 30


def test_text_needs_no_quotes_in_a_variable():
    """A metric called 1 or off is text; null is none; a list is written with brackets."""
    variables = {"RETENTION__METRIC": "off", "SAVE_ON_SIGNALS": "[SIGTERM, SIGUSR1]", "MAX_HOST_BYTES": "null"}
    settings = effective(variables).settings
    assert (settings.retention.metric, settings.save_on_signals) == ("off", ("SIGTERM", "SIGUSR1"))
    assert effective({"RETENTION__METRIC": "null"}).settings.retention.metric is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "RETENTION__KEEP_LST",
            "3",
            "RETENTION__KEEP_LST: unknown variable; did you mean SAFE_CKPT__RETENTION__KEEP_LAST?",
        ),
        (
            "HEALTH__RECHECK",
            "true",
            "HEALTH__RECHECK: was removed: memory is not compared between saves any more. Take the key out",
        ),
        (
            "LOOPS__TRIES",
            "3",
            "LOOPS__TRIES: was removed: every start takes the newest healthy checkpoint. Take the section out",
        ),
        ("lease_s", "3", "lease_s: unknown variable; did you mean SAFE_CKPT__LEASE_S?"),
        (
            "RETENTION",
            "{}",
            "RETENTION: unknown variable; there is one for each key, such as SAFE_CKPT__RETENTION__KEEP_LAST",
        ),
        ("LEASE_S", "0", "LEASE_S: lease_s: expected 1 to 3600, got 0.0"),
        ("LEASE_S", "[", "LEASE_S: lease_s: cannot be read as YAML: '['"),
        (
            "SAVE_ON_SIGNALS",
            "SIGTERM",
            "SAVE_ON_SIGNALS: save_on_signals: expected a list of names such as [SIGTERM], got 'SIGTERM'",
        ),
        ("RECORD_EVENTS", "0", "RECORD_EVENTS: record_events: expected true or false, got 0"),
        (
            "MAX_HOST_BYTES",
            "1e9",
            "MAX_HOST_BYTES: max_host_bytes: expected a whole number such as 1000000000, got '1e9'",
        ),
        ("MAX_HOST_BYTES", "9G", "MAX_HOST_BYTES: max_host_bytes: expected a whole number, got '9G'"),
        ("LEASE_S", "1e12", "LEASE_S: lease_s: expected 1 to 3600, got 1000000000000.0"),
        ("RETENTION__KEEP_BEST", "1", "RETENTION__KEEP_BEST: retention.metric: keep_best needs the name of a metric"),
    ],
)
def test_a_wrong_variable_is_named(name, value, said):
    """An unknown one with the nearest, a wrong value with what is allowed; also where the default clashes with it."""
    with pytest.raises(ConfigError) as caught:
        effective({name: value})
    assert str(caught.value) == f"SAFE_CKPT__{said}"


def test_the_layer_that_brings_the_error_is_blamed(file):
    """A file that is wrong by itself is named although a variable sets a key of the same section."""
    file.write_text("lease_s: 5\nretention:\n  keep_best: 1\n")
    with pytest.raises(ConfigError) as caught:
        effective({"RETENTION__KEEP_LAST": "3"}, file)
    assert (caught.value.source, caught.value.line, caught.value.key) == (str(file), 2, "retention.metric")
    assert effective({"RETENTION__METRIC": "loss"}, file).settings.retention.keep_best == 1
    file.write_text("retention: 3")
    with pytest.raises(ConfigError, match=r"yaml:1: retention: expected keys"):
        effective({"RETENTION__KEEP_LAST": "3"}, file)


def test_the_environment_changes_nothing_that_was_given(tmp_path, monkeypatch, file):
    """A Checkpointer without settings takes the environment's; given settings, and from_yaml, are as they are."""
    file.write_text("lease_s: 5")
    monkeypatch.setenv("SAFE_CKPT_CONFIG", str(file))
    monkeypatch.setenv("SAFE_CKPT__MAX_IN_FLIGHT", "2")
    with Checkpointer(tmp_path / "a") as one, Checkpointer(tmp_path / "b", CheckpointConfig(lease_s=9)) as other:
        assert one.config == CheckpointConfig(lease_s=5, max_in_flight=2)
        assert other.config == CheckpointConfig(lease_s=9)
    assert CheckpointConfig.from_yaml(file) == CheckpointConfig(lease_s=5)


# ------------------------------------------------------------------ reference and schema


def test_reference_and_schema_are_up_to_date():
    """docs/reference says what the code says; else: make docs-reference."""
    assert (DOCS / "configuration.md").read_text() == describe.markdown(CheckpointConfig)
    assert json.loads((DOCS / "safe_ckpt.schema.json").read_text()) == describe.json_schema(CheckpointConfig)


def test_every_key_is_described():
    """Each has a type, a default and a meaning, and a unit where its name ends in one; each section has a summary."""
    rows = describe.setting_rows(CheckpointConfig)
    assert [row.key for row in rows if not (row.type and row.default and row.meaning)] == []
    assert {row.unit for row in rows if row.key.endswith("_s")} == {"seconds"}
    assert {row.unit for row in rows if row.key.endswith("_bytes")} == {"bytes"}
    for section in {key.section for key in keys(CheckpointConfig)}:
        assert list(texts.meanings(section)) == list(section.__dataclass_fields__)
        assert all(texts.meanings(section).values())


def test_a_text_stands_once_below_its_field():
    """The reference, the schema and the options of a command say what config.py says below the field, and nothing else does."""
    kept = texts.meanings(Retention)["keep_last"]
    assert kept == "Keep this many of the newest checkpoints."
    assert texts.meanings(CheckpointConfig)["retention"] == texts.summary(Retention)
    found = describe.json_schema(CheckpointConfig)["$defs"]["Retention"]["properties"]["keep_last"]["description"]
    shown = " ".join(CliRunner().invoke(app, ["gc", "--help"], env={"COLUMNS": "200"}).stdout.split())
    assert found == kept
    assert kept in shown
    assert texts.meanings(Retention)["keep_best"].replace("`", "") in shown
    assert "Attributes:" not in inspect.getsource(CheckpointConfig)


def test_a_program_without_its_sources_has_no_texts(monkeypatch):
    """Where a program was packed without sources, the texts are empty, and nothing fails."""

    def gone(_):
        raise OSError("could not get source code")

    texts._below_fields.cache_clear()
    monkeypatch.setattr(inspect, "getsource", gone)
    assert set(texts.meanings(Retention).values()) == {""}
    monkeypatch.undo()
    texts._below_fields.cache_clear()


def test_the_reference_spells_out_bounds_choices_and_null():
    """Bounds, choices and null are spelled out."""
    rows = {row.key: row for row in describe.setting_rows(CheckpointConfig)}
    last, busy, nice = rows["retention.keep_last"], rows["on_busy"], rows["writer.niceness"]
    assert (last.type, last.default, last.allowed) == ("int or null", "null", "at least 1")
    assert (busy.type, busy.default, busy.allowed) == ("text", '"wait"', "`wait`, `skip`")
    assert (nice.allowed, rows["lease_s"].unit) == ("0 to 19", "seconds")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("", True),
        ("safe_ckpt:", True),
        ("retention:\ntimeouts: {barrier_s: 31536000}", True),
        ("timeouts: {barrier_s: 31536001}", False),
        ("retention: {keep_last: 3, metric: loss}\nsave_on_signals: [SIGTERM]", True),
        ("safe_ckpt: {timeouts: {barrier_s: '01:00:00'}}\nother: 1", True),
        ("timeouts: {barrier_s: '90', lengthy_s: 5, shutdown_s: '1:30'}", True),
        ("telemetry: {prometheus_textfile: /x/a.prom, logger_scalars: false}", True),
        ("retention: {keep_lst: 3}", False),
        ("safe_ckpt: {retention: {keep_lst: 3}}", False),
        ("retention: {keep_last: 0}", False),
        ("retention: {keep_last: '3'}", False),
        ("retention: 3", False),
        ("- 1", False),
        ("timeouts: {barrier_s: 0}", False),
        ("timeouts: {barrier_s: soon}", False),
        ("timeouts: {barrier_s: '1:75'}", False),
        ("writer: {chunk_bytes: 5000}", False),
        ("writer: {niceness: 20}", False),
        ("on_busy: drop", False),
        ("record_events: 1", False),
        ("save_on_signals: [SIGKILL]", False),
        ("save_on_signals: SIGTERM", False),
        ("telemetry: {prometheus_textfile: /x/a.txt}", False),
    ],
)
def test_the_schema_allows_what_the_reader_allows(file, text, good):
    """What an editor marks as wrong is refused, and what it accepts is read."""
    validator = jsonschema.Draft202012Validator(describe.json_schema(CheckpointConfig))
    assert validator.is_valid(yaml.safe_load(text)) is good
    file.write_text(text)
    if good:
        CheckpointConfig.from_yaml(file)
    else:
        with pytest.raises(ConfigError):
            CheckpointConfig.from_yaml(file)


def test_the_schema_is_one_and_holds_all_defaults():
    """It is valid itself, and each key has the description and the default that the dataclass has."""
    made = describe.json_schema(CheckpointConfig)
    jsonschema.Draft202012Validator.check_schema(made)
    for key in keys(CheckpointConfig):
        found = made["$defs"][key.section.__name__]["properties"][key.name]
        assert found["description"]
        assert found["default"] == (list(key.default) if isinstance(key.default, tuple) else key.default)


# ------------------------------------------------------------------ the command


def run(*args):
    return CliRunner().invoke(app, ["config", *map(str, args)])


def test_config_check_says_what_differs_or_what_is_wrong(file, monkeypatch):
    """Status 0 and the keys that are set to something else; status 1, file and line; status 2 where there is no file."""
    file.write_text("lease_s: 60\nretention:\n  keep_last: 3\n")
    good = run("check", file)
    assert (good.exit_code, good.stderr) == (0, "")
    assert good.stdout.splitlines()[0] == f"{file}: ok"
    assert good.stdout.splitlines()[2].split() == ["retention.keep_last", "3", "null", f"{file}:3"]
    assert len(good.stdout.splitlines()) == 3
    monkeypatch.setenv("SAFE_CKPT__LEASE_S", "9")
    assert f"config show {file}" in run("check", file).stderr
    assert json.loads(run("check", file, "--json").stdout)["ok"] is True
    file.write_text("retention:\n  keep_lst: 3\n")
    bad = run("check", file)
    assert bad.exit_code == 1
    assert bad.stdout == f'{file}:2: retention.keep_lst: unknown key; did you mean "keep_last"?\n'
    facts = json.loads(run("check", file, "--json").stdout)
    assert (facts["ok"], facts["error"]["line"], facts["error"]["key"]) == (False, 2, "retention.keep_lst")
    assert run("check", file.parent / "none.yaml").exit_code == 2


def test_config_check_reports_all_that_is_wrong(file):
    """Each unknown key, and a bad value in each section; nothing that only follows from another mistake."""
    file.write_text(
        "retention:\n  keep_best: 1\n  metrc: loss\n  keep_lst: 3\nlease: 4\ntimeouts:\n  barrier_s: soon\non_busy: never\n"
    )
    bad = run("check", file)
    keys = ["retention.metrc", "retention.keep_lst", "lease", "timeouts.barrier_s", "on_busy"]
    assert bad.exit_code == 1
    assert [line.split(": ")[1] for line in bad.stdout.splitlines()] == keys
    facts = json.loads(run("check", file, "--json").stdout)
    assert [one["key"] for one in facts["errors"]] == keys
    assert facts["error"] == facts["errors"][0]


@pytest.mark.parametrize("text", ["[1]", "retention: 3\n", "a: [", "x.y: 1\n", "mirror:\n  url=secret: 1\n"])
def test_config_check_ends_whatever_the_file_holds(file, text):
    """What is no mapping, no YAML, or a key that cannot be found again."""
    file.write_text(text)
    bad = run("check", file)
    assert bad.exit_code == 1
    assert len(bad.stdout.splitlines()) == 1


def test_config_show_prints_each_value_and_its_source(file, monkeypatch):
    """Default, file and line, or variable; and what is printed is a file that gives the same settings again."""
    file.write_text("retention:\n  keep_last: 3\nwriter: {direct_io: off}\nsave_on_signals: [SIGTERM]\n")
    monkeypatch.setenv("SAFE_CKPT__LEASE_S", "9")
    given = run("show", file)
    monkeypatch.setenv("SAFE_CKPT_CONFIG", str(file))
    named = run("show")
    assert given.exit_code == named.exit_code == 0
    assert given.stdout == named.stdout
    for line in (f"  keep_last: 3  # {file}:2", "lease_s: 9.0  # SAFE_CKPT__LEASE_S", "  niceness: 10  # default"):
        assert line in given.stdout.splitlines()
    rows = {row["key"]: row["from"] for row in json.loads(run("show", "--json").stdout)}
    assert rows["lease_s"] == "SAFE_CKPT__LEASE_S"
    expected = CheckpointConfig.from_environment()
    again = file.with_name("again.yaml")
    again.write_text(given.stdout)
    assert CheckpointConfig.from_yaml(again) == expected
    assert value_at(expected, "writer.direct_io") == "off"
    monkeypatch.setenv("SAFE_CKPT__LEASE", "9")
    wrong = run("show")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "did you mean SAFE_CKPT__LEASE_S?" in wrong.stderr


def test_the_command_prints_reference_and_schema_as_in_docs():
    """As they are in docs/reference."""
    assert run("reference").stdout == describe.markdown(CheckpointConfig)
    assert json.loads(run("schema").stdout) == describe.json_schema(CheckpointConfig)
