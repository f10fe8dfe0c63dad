"""Values of ``storage.options`` and of the environment: they leave the process by no pickle and no error."""

import copy
import dataclasses
import pickle
from urllib.parse import quote

import pytest

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.storage.objects.clients import cleaned, secrets_of
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

SECRET = "hunter2hunter2"
OPTIONS = StorageOptions(options=(f"secret_access_key={SECRET}", "access_key_id=someone"), part_bytes=5 << 20)


def test_a_pickle_holds_the_address_alone():
    """What a save returns can be pickled, shows no secret then, and names the same place where it is loaded."""
    place = open_place("s3://bucket/run", OPTIONS)
    info = CheckpointInfo(
        path=place, name="run", step=1, sequence=1, metrics={}, created_at="", world_size=1, size_bytes=0
    )
    data = pickle.dumps((info, place.bucket, OPTIONS))
    assert SECRET.encode() not in data
    again, bucket, options = pickle.loads(data)
    assert again == info
    assert again.path.bucket.options.options == options.options == ()
    assert (bucket.url, options.part_bytes) == ("s3://bucket", 5 << 20)


def test_a_copy_within_the_process_keeps_the_options():
    """Only a pickle loses them: a copy reaches the store as before."""
    place = open_place("s3://bucket/run", OPTIONS)
    for one in (copy.copy(place), copy.deepcopy(place), copy.deepcopy([place])[0]):
        assert one.bucket.options.given["secret_access_key"] == SECRET
    assert place.bucket.within(3).options == dataclasses.replace(OPTIONS, give_up_after_s=3)
    assert copy.deepcopy(OPTIONS) == OPTIONS


def test_an_answer_in_xml_becomes_its_code_and_message():
    """S3 repeats a token, and what was signed, in what it says about them; none of that is in an error."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message>'
        f"<Token-0>{SECRET}</Token-0><StringToSign>{SECRET}</StringToSign></Error>"
    )
    for text in (body, body.removesuffix("</Error>")):  # the latter is cut off
        found = cleaned(f"Server returned status code: 400 Bad Request: {text}", ())
        assert found == "Server returned status code: 400 Bad Request: ExpiredToken: The token has expired."


@pytest.mark.parametrize("secret", ["hun?ter/2=", "://hun?ter@2"])
def test_a_secret_with_any_letters_is_hidden(secret):
    """Also where a part of it looks like the query of an address, and as it is written in an address."""
    text = f"GET http://h/x?token={quote(secret, safe='')}&y failed: {secret} is wrong, {quote(secret, safe='')}"
    assert cleaned(text, [secret]) == "GET http://h/x?... failed: ... is wrong, ..."


def test_tokens_are_hidden_and_endpoints_are_shown(monkeypatch):
    """Tokens of the environment are hidden like those of the settings; an endpoint or a region is not."""
    for name in ("AWS_SESSION_TOKEN", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_SECRET"):
        monkeypatch.setenv(name, f"{SECRET} {name}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://right.example")
    options = ("endpoint=http://wrong.example", "region=eu-1", "skip_signature=true", "aws_session_token=mine")
    secrets = secrets_of(StorageOptions(options=options))
    assert {"mine", f"{SECRET} AWS_SESSION_TOKEN", f"{SECRET} AZURE_CLIENT_SECRET"} <= set(secrets)
    assert not {"http://wrong.example", "http://right.example", "eu-1", "true"} & set(secrets)
