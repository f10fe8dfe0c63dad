import os

import pytest

from safe_ckpt import (
    CheckpointConfig,
    Health,
    Mirror,
    Network,
    Retention,
    StorageConfig,
    Telemetry,
    Timeouts,
    Unchanged,
    WriterConfig,
)
from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.fields import keys, parse_duration


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SAFE_CKPT_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Timeouts(barrier_s=-1), "barrier_s"),
        (lambda: Timeouts(lengthy_s=0), "lengthy_s"),
        (lambda: Timeouts(lengthy_s=float("inf")), "lengthy_s"),
        (lambda: Timeouts(lengthy_s="60"), "lengthy_s"),
        (lambda: Timeouts(shutdown_s=True), "shutdown_s"),
        (lambda: Retention(keep_last=0), "keep_last"),
        (lambda: Retention(keep_last=1.5), "keep_last"),
        (lambda: Retention(keep_best=1), "metric"),
        (lambda: Retention(mode="best"), "mode"),
        (lambda: WriterConfig(chunk_bytes=1000), "chunk_bytes"),
        (lambda: WriterConfig(direct_io="on"), "direct_io"),
        (lambda: CheckpointConfig(max_in_flight=0), "max_in_flight"),
        (lambda: CheckpointConfig(on_busy="drop"), "on_busy"),
        (lambda: CheckpointConfig(on_failure="ignore"), "on_failure"),
        (lambda: CheckpointConfig(max_host_bytes=1000), "max_host_bytes"),
        (lambda: CheckpointConfig(save_on_signals=("SIGKILL",)), "save_on_signals"),
        (lambda: CheckpointConfig(save_on_signals=("SIGNOTHING",)), "save_on_signals"),
        (lambda: WriterConfig(niceness=20), "niceness"),
        (lambda: WriterConfig(chunk_bytes=1 << 20, flush_every_bytes=4096), "flush_every_bytes"),
        (lambda: Telemetry(prometheus_textfile="/x/metrics.txt"), "prometheus_textfile"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_at_construction(build, key):
    """A setting out of range raises when it is made, and names itself."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("barier_s: 3", "barier_s", "unknown key"),
        ("timeouts: {barier_s: 3}", "timeouts.barier_s", 'did you mean "barrier_s"'),
        ("timeouts: {barrier_s: soon}", "timeouts.barrier_s", "expected seconds"),
        ("timeouts: {barrier_s: -3}", "timeouts.barrier_s", "above 0"),
        ("retention: {keep_last: 0}", "retention.keep_last", "at least 1"),
        ("retention: {keep_last: many}", "retention.keep_last", "expected a whole number"),
        ("retention: 3", "retention", "expected keys"),
        ("on_busy: drop", "on_busy", "expected one of"),
        ("- 1", "", "expected keys"),
        ("a: [", "", "cannot be read as YAML"),
    ],
)
def test_yaml_errors_name_the_file_and_the_path_of_the_key(tmp_path, text, key, words):
    """A wrong YAML file is refused with the key's path and what is allowed."""
    file = tmp_path / "ckpt.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_yaml(file)
    assert (caught.value.source, caught.value.key) == (str(file), key)
    assert words in str(caught.value)


def test_yaml_is_read_at_top_level_and_under_its_own_key(tmp_path):
    """The same settings come out of both places, with defaults for the rest."""
    body = "timeouts:\n  lengthy_s: '01:00:00'\n  barrier_s: 90\nretention:\n  keep_last: 3\n"
    top, nested = tmp_path / "top.yaml", tmp_path / "nested.yaml"
    top.write_text(body)
    nested.write_text("safe_ckpt:\n" + "".join(f"  {line}\n" for line in body.splitlines()) + "other: 1\n")
    expected = CheckpointConfig(timeouts=Timeouts(lengthy_s=3600, barrier_s=90), retention=Retention(keep_last=3))
    assert CheckpointConfig.from_yaml(top) == CheckpointConfig.from_yaml(nested) == expected


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90, 90), (1.5, 1.5), ("90", 90), ("1:30", 90), ("01:00:00", 3600), ("2:00:00.5", 7200.5), (3600, 3600)],
)
def test_durations_are_read_as_seconds_or_hours_minutes_seconds(value, seconds):
    """Durations are seconds or HH:MM:SS, also as YAML 1.1 hands them over."""
    assert parse_duration(value, "x") == seconds


def test_environment_names_the_file(tmp_path, monkeypatch):
    """SAFE_CKPT_CONFIG is read; without it the defaults hold."""
    file = tmp_path / "c.yaml"
    file.write_text("max_in_flight: 2")
    monkeypatch.setenv("SAFE_CKPT_CONFIG", str(file))
    assert CheckpointConfig.from_environment().max_in_flight == 2
    monkeypatch.delenv("SAFE_CKPT_CONFIG")
    assert CheckpointConfig.from_environment() == CheckpointConfig()


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: CheckpointConfig(max_in_flight="2"), "max_in_flight"),
        (lambda: CheckpointConfig(max_in_flight=1.5), "max_in_flight"),
        (lambda: CheckpointConfig(timeouts={"barrier_s": 5}), "timeouts"),
        (lambda: CheckpointConfig(lease_s=float("inf")), "lease_s"),
        (lambda: CheckpointConfig(signal_grace_s=10**321), "signal_grace_s"),
        (lambda: Timeouts(shutdown_s=10**9999), "shutdown_s"),
        (lambda: Timeouts(fsync_stall_s=31536001), "fsync_stall_s"),
        (lambda: CheckpointConfig(retention=None), "retention"),
        (lambda: CheckpointConfig(save_on_signals="SIGTERM"), "save_on_signals"),
        (lambda: CheckpointConfig(on_busy="sometimes"), "on_busy"),
        (lambda: WriterConfig(chunk_bytes="8M"), "chunk_bytes"),
        (lambda: Timeouts(barrier_s="5"), "barrier_s"),
        (lambda: Timeouts(barrier_s=True), "barrier_s"),
        (lambda: Retention(mode="least"), "mode"),
    ],
)
def test_wrong_types_are_refused_when_built(build, key):
    """Also in Python: a ConfigError with the key, not whatever a comparison raises."""
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (CheckpointConfig(), "the defaults"),
        (CheckpointConfig(lease_s=60, save_on_signals=[]), "the defaults"),
        (
            CheckpointConfig(timeouts=Timeouts(barrier_s=25), retention=Retention(keep_last=3)),
            "retention.keep_last=3, timeouts.barrier_s=25.0",
        ),
        (
            CheckpointConfig(save_on_signals=["SIGTERM"], retention=Retention(metric="a, b=1")),
            "retention.metric='a, b=1', save_on_signals=('SIGTERM',)",
        ),
    ],
)
def test_settings_other_than_the_defaults_are_one_sorted_text(config, text):
    """Sorted by key, and the same for equal settings however they were written."""
    assert config.deviations() == text


def test_unequal_settings_never_look_equal():
    """Two long texts that differ at their very end differ where they are cut, too; and nobody must read pages."""
    one, other = (CheckpointConfig(telemetry=Telemetry(prometheus_textfile=f"{'x' * 700}{end}.prom")) for end in "ab")
    assert one.deviations() != other.deviations()
    assert one.deviations()[:600] == other.deviations()[:600]
    assert len(one.deviations()) < 650


def test_every_setting_is_among_the_deviations():
    """What one rank has and another has not is seen, whichever key it is."""
    changed = {
        "timeouts": Timeouts(lengthy_s=1, barrier_s=1, writer_stall_s=1, fsync_stall_s=1, peer_stall_s=1, shutdown_s=1),
        "retention": Retention(keep_last=1, keep_best=1, metric="m", mode="max", keep_every_steps=1),
        "writer": WriterConfig(
            direct_io="off", chunk_bytes=4096, flush_every_bytes=4096, niceness=0, max_respawns=0, inline_bytes=0
        ),
        "network": Network(interface="lo", port=1),
        "telemetry": Telemetry(
            record_bytes=4096, record_files=0, logger_scalars=False, prometheus_textfile="a.prom", opentelemetry=True
        ),
        "storage": StorageConfig(
            options=("region=x",),
            part_bytes=5 << 20,
            parts_in_flight=1,
            request_timeout_s=1,
            cache_dir="/c",
            unfenced=True,
        ),
        "mirror": Mirror(
            url="s3://b/c", keep_last=1, keep_every_steps=1, required=True, follow=True, near="per-host", max_behind=1
        ),
        "health": Health(action="stop", norm_jump=10.0, ignore=("*.mask",)),
        "unchanged": Unchanged(share=False, full_every=1),
        "snapshot": "eager",
        "max_host_bytes": 1 << 20,
        "max_in_flight": 2,
        "on_busy": "skip",
        "on_failure": "warn",
        "max_consecutive_failures": 1,
        "save_on_signals": ("SIGTERM",),
        "signal_grace_s": 1,
        "lease_s": 1,
        "record_events": False,
    }
    texts = {CheckpointConfig(**{name: value}).deviations() for name, value in changed.items()}
    assert sum(text.count("=") for text in texts) == len(keys(CheckpointConfig))


@pytest.mark.parametrize(
    "rule",
    [
        {"keep_last": 3},
        {"keep_every_steps": 5},
        {"required": True},
        {"follow": True},
        {"near": "per-host"},
        {"max_behind": 1},
    ],
)
def test_a_mirror_needs_an_address(rule):
    """What would do nothing without ``mirror.url`` is refused, and says so."""
    with pytest.raises(ConfigError, match="set that, too") as caught:
        CheckpointConfig.from_mapping({"mirror": rule})
    assert caught.value.key == f"mirror.{next(iter(rule))}"
    assert CheckpointConfig.from_mapping({"mirror": {**rule, "url": "s3://bucket/run"}}).mirror.url


@pytest.mark.parametrize("folder", ["", "relative", "~/cache", "s3://bucket/cache"])
def test_the_cache_is_a_folder_of_this_machine(folder):
    """An absolute path: all else would lead elsewhere on each rank, or nowhere."""
    with pytest.raises(ConfigError, match="expected an absolute path"):
        StorageConfig(cache_dir=folder)
