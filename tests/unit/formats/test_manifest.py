import dataclasses

import pytest

from kit.manifests import checkpoint, rewrite
from safe_ckpt.core.formats.manifest import FileEntry, read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    """Reading gives the same facts, and the payload checks out."""
    made = checkpoint(tmp_path, {"a.bin": b"abc", "sub/b.bin": b""})
    assert read_manifest(tmp_path) == made
    assert verify_files(tmp_path, made) == 3


def test_every_byte_of_the_manifest_is_guarded(tmp_path):
    """Any flipped byte of manifest.json is found, wherever it is, also in the format version."""
    checkpoint(tmp_path, {"a.bin": b"abc"})
    file = tmp_path / "manifest.json"
    good = file.read_bytes()
    made = read_manifest(tmp_path)
    for offset in range(len(good)):
        file.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        try:
            found = read_manifest(tmp_path)
        except (CorruptCheckpointError, UnsupportedFormatError):
            continue
        assert found == made, f"offset {offset}: only a change of white space may pass"


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "a.bin").unlink(),
        lambda f: (f / "a.bin").write_bytes(b""),
        lambda f: (f / "a.bin").write_bytes(b"ab"),
        lambda f: (f / "a.bin").write_bytes(b"abd"),
        lambda f: (f / "a.bin").write_bytes(b"abcd"),
        lambda f: ((f / "a.bin").unlink(), (f / "a.bin").mkdir()),
        lambda f: ((f / "a.bin").unlink(), (f / "a.bin").symlink_to("/etc/passwd")),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    """Missing, emptied, cut, changed, longer, replaced by a folder or a link: the file is named."""
    made = checkpoint(tmp_path, {"a.bin": b"abc", "b.bin": b"x"})
    damage(tmp_path)
    with pytest.raises(CorruptCheckpointError) as caught:
        verify_files(tmp_path, made)
    assert caught.value.file == "a.bin"


def test_extra_files_do_no_harm(tmp_path):
    """A file that the manifest does not know, such as .nfs0001, is not treated as damage."""
    made = checkpoint(tmp_path, {"a.bin": b"abc"})
    (tmp_path / ".nfs0001").write_bytes(b"?")
    verify_files(tmp_path, made)


@pytest.mark.parametrize("path", ["../outside", "a/../../b", "/etc/passwd", "", "a\0b"])
def test_a_path_that_leads_out_is_refused(tmp_path, path):
    """A manifest cannot make a reader look outside its checkpoint."""
    checkpoint(tmp_path, {"a.bin": b"abc"})
    rewrite(tmp_path, lambda data: data["files"][0].update(path=path))
    with pytest.raises(CorruptCheckpointError, match="leads out"):
        read_manifest(tmp_path)


def test_a_newer_format_is_refused_with_the_remedy(tmp_path):
    """What a later release wrote is not guessed at."""
    checkpoint(tmp_path, {"a.bin": b"abc"})
    rewrite(tmp_path, lambda data: data.update(format_version=2))
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("key", ["name", "sequence", "step", "metrics", "files", "items", "world_size"])
def test_a_missing_or_mistyped_field_is_damage(tmp_path, key):
    """Every field that is used is checked for."""
    checkpoint(tmp_path, {"a.bin": b"abc"})
    rewrite(tmp_path, lambda data: data.pop(key))
    with pytest.raises(CorruptCheckpointError):
        read_manifest(tmp_path)
    rewrite(tmp_path, lambda data: data.update({key: True}))
    with pytest.raises(CorruptCheckpointError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}', "\0\0\0"])
def test_empty_and_foreign_files_are_not_taken_for_a_manifest(tmp_path, text):
    """Empty, cut off, foreign: an error, never a guess."""
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        read_manifest(tmp_path)


def test_manifests_compare_by_value_and_are_immutable():
    """Manifests compare by value and cannot be changed after the fact."""
    entry = FileEntry(path="a", size_bytes=1, xxh3_128="0" * 32, rank=0)
    assert dataclasses.replace(entry) == entry
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.path = "b"


_ITEM = {"per_rank": False, "form": "value", "files": {"0": "a.json"}}


@pytest.mark.parametrize(
    "changed",
    [
        {"items": {"a": nonsense}}
        for nonsense in (
            *(5, None, "a.json", [], {}),
            *({key: value for key, value in _ITEM.items() if key != missing} for missing in _ITEM),
            *(
                {**_ITEM, "files": files}
                for files in (5, [], {}, {"1": "a.json"}, {"0": 5}, {"0": ["a.json"]}, {"0": None})
            ),
            *({**_ITEM, "form": form} for form in (5, None, ["value"])),
            *({**_ITEM, "per_rank": per_rank} for per_rank in ("yes", 1, None)),
        )
    ]
    + [{"notes": {"adapter": 5}}, {"notes": {"adapter": ["accelerate"]}}],
    ids=str,
)
def test_nonsense_with_a_right_digest_is_damage(tmp_path, changed):
    """Under ``items`` and ``notes``, too: it is said to be damaged, so a resume goes on to the checkpoint before it."""
    checkpoint(tmp_path, {"a.json": b"1"})
    rewrite(tmp_path, lambda data: data.update(changed))
    with pytest.raises(CorruptCheckpointError, match="damaged manifest"):
        read_manifest(tmp_path)
