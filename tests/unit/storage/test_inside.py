"""Every name that is read goes one way to a path, and what leads out of its folder is refused there."""

import io
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import safe_ckpt
from kit.manifests import checkpoint, rewrite
from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.pickles import Records
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.home.objects.head import Head
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.resuming import items
from safe_ckpt.core.sharding import dcp_read
from safe_ckpt.core.state.planner import SHARDED
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.presence import checked_name, inside, really_inside
from safe_ckpt.errors import HostileCheckpointError
from safe_ckpt.extensions.mirror import fetching
from safe_ckpt.offload import restore
from safe_ckpt.tools.inspection import files

BUCKET = SimpleNamespace(url="s3://bucket")
OUT = [
    *(
        "..",
        "../x",
        "a/../../x",
        "a/..",
        "/x",
        "//x",
        "",
        ".",
        "./",
        "a//x",
        "a/",
        "a\0b",
        "C:/x",
        "c:\\x",
        "\\x",
        "..\\x",
    ),
    *("a\\..\\..\\x", None, 1, ["a"]),
]
IN = ["x", "a/b.pt", "..x", "x..", "...", "a/.b", "epoch:1", "e:1", "ä", "a b", "-x", "./x"]


@pytest.mark.parametrize("name", OUT)
def test_names_that_lead_out_of_a_folder_are_refused(tmp_path, name):
    """Absolute, upward, empty, with a NUL, of a drive, no text: the error names the folder, and is a ``ValueError``."""
    for join in (inside, really_inside):
        with pytest.raises(HostileCheckpointError, match="leads out") as caught:
            join(tmp_path, name)
        assert caught.value.path == str(tmp_path)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(HostileCheckpointError):
        inside(ObjectPath(BUCKET, "run"), name)
    with pytest.raises(HostileCheckpointError):
        files.path_inside(tmp_path, name)


@pytest.mark.parametrize("name", IN)
def test_names_within_a_folder_become_paths(tmp_path, name):
    """Also names with dots, colons and letters of any language."""
    assert inside(tmp_path, name) == really_inside(tmp_path, name) == tmp_path / name
    assert inside(ObjectPath(BUCKET, "run"), name).key == f"run/{name}"
    assert checked_name(name) == name


def test_a_path_through_a_link_that_leads_out_is_refused(tmp_path):
    """What is opened, linked or removed lies within, whatever the folders on the way are; a link within is one of them."""
    home = tmp_path / "home"
    (home / "real").mkdir(parents=True)
    (home / "link").symlink_to("real")
    (home / "out").symlink_to(tmp_path)
    assert really_inside(home, "link/x") == home / "link/x"
    for name in ("out/x", "link/../out/x", "out/home/../x"):
        with pytest.raises(HostileCheckpointError):
            really_inside(home, name)
    (tmp_path / "as").symlink_to(home)
    assert really_inside(tmp_path / "as", "real/x") == tmp_path / "as/real/x"


@pytest.mark.parametrize("name", ["../x", "/x", "a//x"])
def test_every_reader_refuses_names_that_lead_out(tmp_path, name):
    """Files and items of a manifest, the name of a mirrored checkpoint, the folders of a head, a part that is given back."""
    made = checkpoint(tmp_path / "one", {"a.bin": b"abc"})
    rewrite(tmp_path / "one", lambda data: data["files"][0].update(path=name))
    with pytest.raises(HostileCheckpointError, match=re.escape(str(tmp_path / "one"))):
        read_manifest(tmp_path / "one")
    for form in ("pt", SHARDED):
        item = {"per_rank": False, "form": form, "files": {"0": name}}
        hostile = Manifest(name="m", sequence=1, step=1, world_size=1, items={"s": item}, files=made.files)
        with pytest.raises(HostileCheckpointError):
            items.files_for(hostile, {"s": {}}, rank=0, path=tmp_path)
    for facts in ({"name": name}, {"name": ".safe_ckpt/lock"}, {"name": "_safe_ckpt/lock"}):
        mirrored = Manifest(name="m", sequence=1, step=1, world_size=1, notes={fetching.MIRRORED: facts})
        with pytest.raises(HostileCheckpointError):
            fetching.origin(mirrored, ObjectPath(BUCKET, "run"))
    for key in ("pending", "trash", "quarantined", "committed"):
        assert Head.from_bytes(Head(**{key: ("step.0123",)}).to_bytes()) is not None
        assert Head.from_bytes(Head(**{key: (name,)}).to_bytes()) is None
    entry = FileEntry(path="p/x", size_bytes=3, xxh3_128="0" * 32, rank=0)
    object.__setattr__(entry, "path", f"p/{name}")
    part = restore.Part(checkpoint=tmp_path, entries=[entry], prefix="p/", target=tmp_path / "target")
    with pytest.raises(HostileCheckpointError):
        restore._refuse_in_the_way(part)


def test_a_pointer_that_leads_out_names_nothing(tmp_path):
    """``latest`` keeps what it names from being deleted, and that lies beside it."""
    pointer = tmp_path / "latest"
    for text, named in (
        ("step", {tmp_path / "step"}),
        ("../step", set()),
        ("/step", set()),
        ("a\0b", set()),
        ("", set()),
    ):
        pointer.write_text(text)
        assert Catalog(pointers=[pointer]).named() == named


def test_a_file_behind_a_link_that_leads_out_is_not_read(tmp_path):
    """Its bytes may even be right."""
    made = checkpoint(tmp_path / "one", {"sub/a.bin": b"abc"})
    verify_files(tmp_path / "one", made)
    os.rename(tmp_path / "one/sub", tmp_path / "elsewhere")
    (tmp_path / "one/sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostileCheckpointError, match="through a link"):
        verify_files(tmp_path / "one", made)


def test_a_path_in_the_metadata_is_read_whichever_python_wrote_it():
    """Python 3.13 gives the class of paths another name than those before and after it."""
    for module in ("pathlib", "pathlib._local"):
        data = f"c{module}\nPosixPath\n(Vruns/x\ntR.".encode()
        assert Records(io.BytesIO(data)).load() == Path("runs/x")


def test_metadata_of_dcp_that_names_files_elsewhere_is_refused(tmp_path):
    """A reader joins what ``.metadata`` says to its folder."""
    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is one process
        dcp.save({"t": torch.ones(3)}, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp_read.read_metadata(tmp_path / "one")
    name = (tmp_path / "one/.metadata").read_bytes()
    assert b"__0_0.distcp" in name
    (tmp_path / "one/.metadata").write_bytes(name.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(HostileCheckpointError, match="secret"):
        dcp_read.read_metadata(tmp_path / "one")


def test_nobody_looks_for_what_leads_out_in_a_way_of_its_own():
    """One function knows what leads out. A line that looks for ``..`` elsewhere says what it looks at that is not read."""
    sources = Path(safe_ckpt.__file__).parent
    found = [
        f"{file.relative_to(sources)}:{number}"
        for file in sources.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"""["']\.\.["']""", line) and file.name != "presence.py" and "# not read: " not in line
    ]
    assert found == []
