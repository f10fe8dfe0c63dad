"""Settings that may hold a password: however they are written wrongly, no error shows a value."""

import traceback

import pytest

from safe_ckpt import CheckpointConfig
from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.sources import load_effective

SECRET = "hunter2hunter2"


def shown(call):
    """The error with everything that a traceback prints of it."""
    with pytest.raises(ConfigError) as caught:
        call()
    return "".join(traceback.format_exception(caught.value)).replace(__file__, "")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"secret_access_key={SECRET}", "expected a list of names"),
        (f'["secret_access_key={SECRET}', "cannot be read as YAML"),
        (f'["secret_access_key={SECRET}]', "cannot be read as YAML"),
        (f"{{secret_access_key: {SECRET}}}", "expected a list of names"),
        (f"[{SECRET}]", "expected name=value"),
    ],
)
def test_a_wrong_value_of_a_variable_is_in_no_error(value, said):
    """The error names the variable and what is expected, also in a traceback."""
    name = "SAFE_CKPT__STORAGE__OPTIONS"
    text = shown(lambda: load_effective(CheckpointConfig, {name: value}))
    assert SECRET not in text
    assert f"{name}: storage.options: {said}" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'storage: ["secret_access_key={SECRET}"]', "storage: expected keys with values, got a list"),
        (f"storage: secret_access_key={SECRET}", "storage: expected keys with values, got text"),
        (f"storage: {{secret_access_key={SECRET}}}", "storage.secret_access_key: unknown key"),
        (f"- secret_access_key={SECRET}", "expected keys with values, got a list"),
        (f'storage: {{options: "secret_access_key={SECRET}"}}', "storage.options: expected a list of names"),
        (f'storage: {{options: ["secret_access_key={SECRET}]}}', "cannot be read as YAML"),
    ],
)
def test_a_wrong_value_in_a_settings_file_is_in_no_error(tmp_path, text, said):
    """The error names the line and the key, also in a traceback."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    found = shown(lambda: CheckpointConfig.from_yaml(file))
    assert SECRET not in found
    assert f"{file}:1: {said}" in found


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"mirror: {{url: s3://user:{SECRET}@host/x}}", "mirror.url"),
        (f"mirror: {{url: s3://user:pass/{SECRET}@host/x}}", "mirror.url"),
        (f"mirror: s3://user:{SECRET}@host/x", "mirror"),
        (f"mirror: [s3://user:{SECRET}@host/x]", "mirror"),
    ],
)
def test_a_password_in_an_address_is_in_no_error(tmp_path, text, key):
    """The setting is refused by its own name, and the error shows no password."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    found = shown(lambda: CheckpointConfig.from_yaml(file))
    assert SECRET not in found
    assert f"{file}:1: {key}: expected" in found
