"""Checkpoints that somebody made to do harm. Each function makes one, in a directory in which a job would keep its own.

What it returns is the checkpoint. None of them is large where it lies; all of them are where a careless reader would put them.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import xxhash

from fuzz.fuzz_formats import zip_of

CANARY = "SAFE_CKPT_CANARY"
"""The environment variable with the path of a file that appears when a payload is run."""
COMMAND = f"touch ${CANARY}"
_ENTRY = struct.Struct("<4sH5H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")


def file_in(folder: Path, data: bytes) -> Path:
    file = folder / "epoch=0-step=1.ckpt"
    file.write_bytes(data)
    return file


def pickled(folder: Path, data: bytes) -> Path:
    return file_in(folder, zip_of({"a/data.pkl": data, "a/byteorder": b"little"}))


def directory_in(folder: Path, files: dict[str, bytes]) -> Path:
    place = folder / "checkpoint-1"
    place.mkdir()
    for name, data in files.items():
        (place / name).write_bytes(data)
    return place


def named(name: str) -> bytes:
    raw = name.encode()
    return zip_of({"a/data.pkl": b"\x80\x02N."}).replace(b"a/data.pkl", raw) if len(raw) == 10 else zip_of({name: b"x"})


# ------------------------------------------------------------------ archives


def compressed_bomb(folder: Path) -> Path:
    import zipfile

    file = folder / "epoch=0-step=1.ckpt"
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a/data.pkl", "w") as out,
    ):
        for _ in range(64):
            out.write(bytes(1 << 20))
    data = bytearray(file.read_bytes())
    size = 1 << 31  # what it says it will become
    at = data.rindex(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", size)
    return file_in(folder, bytes(data))


def overlapping_records(folder: Path) -> Path:
    body = _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0, 0, 1 << 20, 1 << 20, 10, 0) + b"a/data.pkl" + bytes(1 << 20)
    rows = b""
    for index in range(10_000):
        name = f"a/data/{index:03}"[:10].encode()
        rows += _ENTRY.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 1 << 20, 1 << 20, len(name), 0, 0, 0, 0, 0, 0) + name
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 10_000, 10_000, len(rows), len(body), 0)
    return file_in(folder, body + rows + end)


def giant_sizes(folder: Path) -> Path:
    wide = struct.pack("<HHQQ", 1, 16, 1 << 62, 1 << 62)
    limit = 0xFFFFFFFF
    body = _LOCAL.pack(b"PK\3\4", 45, 0, 0, 0, 0, 0, limit, limit, 10, len(wide)) + b"a/data.pkl" + wide
    row = (
        _ENTRY.pack(b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, limit, limit, 10, len(wide), 0, 0, 0, 0, 0) + b"a/data.pkl" + wide
    )
    return file_in(folder, body + row + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(row), len(body), 0))


def million_records(folder: Path, *, comment: bytes = b"") -> Path:
    count = 1_000_000
    rows = (_ENTRY.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a") * count
    head = b"PK\3\4"
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(rows), len(head))
    wide += struct.pack("<4sIQI", b"PK\6\7", 0, len(head) + len(rows), 1)
    limits = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *limits, len(comment))
    return file_in(folder, head + rows + wide + end + comment)


def million_records_signed_as_ours(folder: Path) -> Path:
    return million_records(folder, comment=b"safe_ckpt/1 xxh3-128 " + b"0" * 32)


def name_that_leads_up(folder: Path) -> Path:
    return file_in(folder, zip_of({"a/data.pkl": b"\x80\x02N.", "../../etc/cron.d/x": b"x"}))


def absolute_name(folder: Path) -> Path:
    return file_in(folder, zip_of({"a/data.pkl": b"\x80\x02N.", "/etc/cron.d/x": b"x"}))


def byteorder_of_gigabytes(folder: Path) -> Path:
    size = 3 << 30
    file = folder / "epoch=0-step=1.ckpt"
    head = _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0, 1, size, size, 11, 0) + b"a/byteorder"
    small = zip_of({"a/data.pkl": b"\x80\x02N."})
    local = small[: small.index(b"PK\1\2")]
    rows = _ENTRY.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, 1, size, size, 11, 0, 0, 0, 0, 0, len(local)) + b"a/byteorder"
    rows += small[small.index(b"PK\1\2") : small.index(b"PK\5\6")]
    start = len(local) + len(head) + size
    with file.open("wb") as stream:
        stream.write(local + head)
        stream.seek(start)  # a hole: it takes no room on the disk
        stream.write(rows + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(rows), start, 0))
    return file


# ------------------------------------------------------------------ pickles


class _Payload:
    def __init__(self, call: tuple[object, ...]) -> None:
        self._call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self._call


_TEXT = b"X" + struct.pack("<I", len(COMMAND)) + COMMAND.encode()
PAYLOADS = {
    "reduce": pickle.dumps({"state_dict": _Payload((os.system, (COMMAND,)))}, 2),
    "stack_global": pickle.dumps(_Payload((os.system, (COMMAND,))), 4),
    "eval": b"\x80\x02c__builtin__\neval\n" + _TEXT + b"\x85R.",
    "newobj": b"\x80\x02csubprocess\nPopen\n" + _TEXT + b"\x85\x81.",
    "newobj_ex": b"\x80\x04csubprocess\nPopen\n" + _TEXT + b"\x85}\x92.",
    "inst": b"(S'" + COMMAND.encode() + b"'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\n" + _TEXT + b"o.",
    "build": b"\x80\x02csubprocess\nPopen\n)\x81}X\x04\x00\x00\x00args" + _TEXT + b"sb.",
    "storage_of_a_call": b"\x80\x02(X\x07\x00\x00\x00storagecos\nsystem\n" + _TEXT + b"\x85RX\x01\x00\x00\x000NK\x01tQ.",
}  # fmt: skip
QUIET_PAYLOADS = {  # what no pickle machine could run, or only one that was prepared: read, and shown as what it is
    "extension": b"\x80\x02\x82\x01)R.",
    "persistent_id": b"Pos.system\n.",
    "not_called": b"\x80\x02cos\nsystem\n.",
}


def _get(index: int) -> bytes:
    return b"h" + bytes([index])


def _put(index: int) -> bytes:
    return b"q" + bytes([index])


def _laughs() -> bytes:
    rows = (b"]" + _put(n) + b"(" + _get(n - 1) * 10 + b"e" for n in range(1, 60))
    return b"\x80\x02]" + _put(0) + b"".join(rows) + b"."


def _colliding_keys() -> bytes:
    keys = ((n * ((1 << 61) - 1)).to_bytes(10, "little") for n in range(1, 20_000))
    return b"\x80\x02}(" + b"".join(b"\x8a\x0a" + key + b"N" for key in keys) + b"u."


def _long_keys() -> bytes:
    number = b"\x8b" + struct.pack("<I", 8 << 20) + b"\x7f" * (8 << 20)
    return b"\x80\x02}" + number + _put(0) + b"0" + (_get(0) + b"Ns") * 50_000 + b"."


def _long_tuples_as_keys() -> bytes:
    text = b"X" + struct.pack("<I", 4 << 20) + b"x" * (4 << 20)
    return b"\x80\x02" + text + _put(0) + b"0}" + (b"(" + _get(0) * 4 + b"tNs") * 30_000 + b"."


def _wide() -> bytes:
    return b"\x80\x02](" + b"K\x01" * 100_000 + b"e" + _put(0) + b"0](" + _get(0) * 100_000 + b"e."


def _long_names() -> bytes:
    key = b"X\x90\x01\0\0" + b"k" * 400
    nested = b"".join(b"}" + key + _get(n) + b"s" + _put(n + 1) for n in range(60))
    return b"\x80\x02N" + _put(0) + nested + b"](" + _get(60) * 200_000 + b"e."


def _made_again_and_again(what: bytes, args: bytes) -> bytes:
    """A call that copies its arguments: small in the pickle, large when made."""
    return (
        b"\x80\x02"
        + args
        + b"\x85"
        + _put(1)
        + b"0c"
        + what
        + _put(2)
        + b"0("
        + (_get(2) + _get(1) + b"R") * 50_000
        + b"l."
    )


def _class_named_by_a_list() -> bytes:
    rows = b"".join(b"](" + _get(n) * 3 + b"e\x94" for n in range(30))
    return b"\x80\x04](" + b"K\x01" * 100 + b"e\x94" + rows + _get(30) * 2 + b"\x93."


def _subclass_of_subclass() -> bytes:
    call = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    tuples = b"(" + _get(0) + b"N"
    return b"\x80\x02" + call + _put(0) + b"0" + _get(0) + tuples * 5_000 + b")" + b"Nt" * 5_000 + b"R."


_PICKLES = {
    "laughs": _laughs(),
    "wide": _wide(),
    "long_names": _long_names(),
    "ordered": _made_again_and_again(b"collections\nOrderedDict\n", b"](" + b"K\x01K\x01\x86" * 50_000 + b"e"),
    "class_named_by_a_list": _class_named_by_a_list(),
    "sets": b"\x80\x04" + b"\x8f" * 4_100_000 + b".",
    "deep_list": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "holds_itself": b"\x80\x02]q\x00h\x00a.",
    "dict_holds_itself": b"\x80\x02}q\x00(K\x01h\x00u.",
    "long_in_decimal": b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.",
    "unknown_memo": b"\x80\x02j\xff\xff\xff\x7f.",
    "no_end": b"\x80\x02N",
    "giant_text": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f" + b"N.",
}
_QUIET_PICKLES = {
    "colliding_keys": _colliding_keys(),
    "long_keys": _long_keys(),
    "long_tuples_as_keys": _long_tuples_as_keys(),
    "deep_key": b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",
    "sizes": _made_again_and_again(b"torch\nSize\n", b"(" + b"K\x01" * 100_000 + b"t"),
    "subclass_of_subclass": _subclass_of_subclass(),
    "memo_index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f" + b"N.",
    "giant_tensor": b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n("
    + b"".join(b"\x8a\x08" + (1 << 61).to_bytes(8, "little") for _ in range(20))
    + b"tN\x89tR.",
    "kept_at_colliding_numbers": b"\x80\x02N"
    + b"".join(b"p%d\n" % (n * ((1 << 61) - 1)) for n in range(1, 20_000))
    + b".",
    "long_arguments": b"\x80\x02("
    + b"K\x01" * 100_000
    + b"t"
    + _put(0)
    + b"0ca\nb\n"
    + _put(1)
    + b"0]("
    + (_get(1) + _get(0) + b"R") * 10_000
    + b"e.",
    "getattr_of_a_list": b"\x80\x02]"
    + _put(0)
    + b"".join(b"](" + _get(n) * 10 + b"e" + _put(n + 1) for n in range(30))
    + b"c__builtin__\ngetattr\nca\nb\n"
    + _get(30)
    + b"\x86R.",
    "bytes_that_are_not_there": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"N.",
}


# ------------------------------------------------------------------ safetensors and JSON


def safetensors(folder: Path, head: bytes) -> Path:
    return directory_in(folder, {"model.safetensors": head})


def header_of_exbytes(folder: Path) -> Path:
    return safetensors(folder, (1 << 63).to_bytes(8, "little") + b"{}")


def header_of_megabytes(folder: Path) -> Path:
    row = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    head = ("{" + "".join(row % n for n in range(1_100_000))[:-1] + "}").encode()
    return safetensors(folder, len(head).to_bytes(8, "little") + head)


def header_of_many_tensors(folder: Path) -> Path:
    row = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    head = ("{" + "".join(row % n for n in range(200_000))[:-1] + "}").encode() + b"!"
    return safetensors(folder, len(head).to_bytes(8, "little") + head)


def deep_header(folder: Path) -> Path:
    head = b'{"a":' * 100_000
    return safetensors(folder, len(head).to_bytes(8, "little") + head)


def twins_in_header(folder: Path) -> Path:
    head = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    return safetensors(folder, len(head).to_bytes(8, "little") + head + bytes(4))


def deep_json(folder: Path) -> Path:
    return directory_in(folder, {"trainer_state.json": b"[" * 1_000_000, "model.safetensors": b"\2" + bytes(7) + b"{}"})


def index_that_leads_up(folder: Path) -> Path:
    index = json.dumps({"weight_map": {"a": "../../../../etc/passwd"}}).encode()
    return directory_in(folder, {"model.safetensors.index.json": index, "model.safetensors": b"\2" + bytes(7) + b"{}"})


def index_of_terabytes(folder: Path) -> Path:
    place = directory_in(folder, {"model.safetensors": b"\2" + bytes(7) + b"{}", "model.safetensors.index.json": b"{"})
    os.truncate(place / "model.safetensors.index.json", 1 << 40)
    return place


# ------------------------------------------------------------------ DCP


class _Named:
    """A pickle of classes that need not be there."""

    def __init__(self, name: str, state: object) -> None:
        self.name, self.state = name, state


def _dump(value: object) -> bytes:
    if isinstance(value, _Named):
        module, _, name = value.name.rpartition(".")
        return f"c{module}\n{name}\n".encode() + b")\x81" + _dump(value.state) + b"b"
    if isinstance(value, dict):
        return b"}(" + b"".join(_dump(key) + _dump(part) for key, part in value.items()) + b"u"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_dump, value)) + b"t"
    if isinstance(value, bytes):
        return value  # as it is
    return pickle.dumps(value, 2)[2:-1]


def dcp_metadata(names: list[str], file: str, *, chunks: object, offsets: list[int], size: int = 10) -> bytes:
    kinds = "torch.distributed.checkpoint.metadata"
    tensor = _Named(f"{kinds}.TensorStorageMetadata", {"properties": None, "size": (0,), "chunks": chunks})
    where = {}
    for name, offset in zip(names, offsets, strict=True):
        place = {"relative_path": file, "offset": offset, "length": size}
        index = _Named(f"{kinds}.MetadataIndex", {"fqn": name, "offset": (0,), "index": 0})
        where[index] = _Named("torch.distributed.checkpoint.filesystem._StorageInfo", place)
    first, *rest = names
    about = _dump(first) + _dump(tensor) + b"r\x01\0\0\0" + b"".join(_dump(name) + b"j\x01\0\0\0" for name in rest)
    facts = {"state_dict_metadata": b"}(" + about + b"u", "storage_data": where}
    return b"\x80\x02" + _dump(_Named(f"{kinds}.Metadata", facts)) + b"."


_CHUNK = _Named("torch.distributed.checkpoint.metadata.ChunkStorageMetadata", {"offsets": (0,), "sizes": (0,)})


def metadata_that_leads_up(folder: Path) -> Path:
    data = dcp_metadata(["w"], "../../../../etc/passwd", chunks=(_CHUNK,), offsets=[0])
    return directory_in(folder, {".metadata": data, "__0_0.distcp": bytes(100)})


def metadata_that_shares_chunks(folder: Path) -> Path:
    chunks = b"](" + _dump(_CHUNK) + b"q\x00" + b"h\x00" * 20_000 + b"e"
    names = [f"w{n}" for n in range(20_000)]
    data = dcp_metadata(names, "__0_0.distcp", chunks=chunks, offsets=[0] * len(names))
    return directory_in(folder, {".metadata": data, "__0_0.distcp": bytes(100)})


def items_that_overlap(folder: Path) -> Path:
    part = zip_of({f"a/data/{n}": b"" for n in range(5000)} | {"a/data.pkl": b"\x80\x02N."})
    names = [f"w{n}" for n in range(5000)]
    data = dcp_metadata(names, "__0_0.distcp", chunks=(_CHUNK,), offsets=[0] * len(names), size=len(part))
    return directory_in(folder, {".metadata": data, "__0_0.distcp": part})


def metadata_with_payload(folder: Path) -> Path:
    return directory_in(folder, {".metadata": PAYLOADS["reduce"], "__0_0.distcp": bytes(100)})


# ------------------------------------------------------------------ manifests and directories


def manifest_of(**changes: object) -> bytes:
    facts = {
        "format": "safe_ckpt", "format_version": 1, "name": "step-00000001", "sequence": 1, "step": 1, "op_id": "x",
        "world_size": 1, "metrics": {}, "created_at": "", "versions": {}, "items": {}, "notes": {}, "written_by": {},
        "files": [], **changes,
    }  # fmt: skip
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**facts, "digest": xxhash.xxh3_128(text).hexdigest()}).encode()


def _row(path: str) -> dict[str, object]:
    return {"path": path, "size_bytes": 1, "xxh3_128": "0" * 32, "rank": 0}


def manifest_that_leads_up(folder: Path) -> Path:
    return directory_in(folder, {"manifest.json": manifest_of(files=[_row("../../../../etc/passwd")])})


def manifest_of_a_million_files(folder: Path) -> Path:
    return directory_in(folder, {"manifest.json": manifest_of(files=[_row(str(n)) for n in range(250_000)])})


def manifest_of_odd_values(folder: Path) -> Path:
    odd = {"metrics": {"\x1b[2Jloss": "x\n", "big": 10**400}, "versions": {"safe-ckpt": [{}]}, "created_at": "2020-13"}
    return directory_in(folder, {"manifest.json": manifest_of(**odd, written_by={"host": None, "pid": []}), "x": b""})


def deep_manifest(folder: Path) -> Path:
    return directory_in(folder, {"manifest.json": b'{"a":' * 1_000_000})


def manifest_is_a_pipe(folder: Path) -> Path:
    place = directory_in(folder, {"model.safetensors": b"\2" + bytes(7) + b"{}"})
    os.mkfifo(place / "manifest.json")
    return place


def manifest_is_a_device(folder: Path) -> Path:
    place = directory_in(folder, {"model.safetensors": b"\2" + bytes(7) + b"{}"})
    (place / "manifest.json").symlink_to("/dev/zero")
    return place


def pipe(folder: Path) -> Path:
    place = directory_in(folder, {"model.safetensors": b"\2" + bytes(7) + b"{}"})
    os.mkfifo(place / "optimizer.bin")
    return place


def metadata_is_a_pipe(folder: Path) -> Path:
    place = directory_in(folder, {"__0_0.distcp": b"x"})
    os.mkfifo(place / ".metadata")
    return place


def file_link_out(folder: Path) -> Path:
    place = directory_in(folder, {"model.safetensors": b"\2" + bytes(7) + b"{}"})
    (place / "optimizer.bin").symlink_to("/etc/hostname")
    return place


def folder_link_out(folder: Path) -> Path:
    place = directory_in(folder, {"model.safetensors": b"\2" + bytes(7) + b"{}"})
    (place / "more").symlink_to("/etc")
    return place


def links_in_circles(folder: Path) -> Path:
    place = directory_in(folder, {"notes.txt": b"x"})
    for name in "abc":
        (place / name).symlink_to(".")
    (place / "d").symlink_to("d")
    return place


def deep_folders(folder: Path) -> Path:
    place = directory_in(folder, {})
    at = os.open(place, os.O_RDONLY)
    for _ in range(1900):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    return place


def _of_pickle(data: bytes):
    return lambda folder: pickled(folder, data)


CASES = {
    make.__name__: make
    for make in (
        compressed_bomb, overlapping_records, giant_sizes, million_records, million_records_signed_as_ours,
        name_that_leads_up, absolute_name, header_of_exbytes, header_of_megabytes, header_of_many_tensors, deep_header,
        twins_in_header, deep_json, index_that_leads_up, index_of_terabytes, metadata_that_leads_up,
        metadata_that_shares_chunks, items_that_overlap, metadata_with_payload, manifest_that_leads_up,
        manifest_of_a_million_files, deep_manifest, manifest_is_a_pipe, manifest_is_a_device, pipe, metadata_is_a_pipe,
        file_link_out, folder_link_out, links_in_circles, deep_folders,
    )
} | {f"pickle_{name}": _of_pickle(data) for name, data in (PAYLOADS | _PICKLES).items()}  # fmt: skip
"""Every one of these is refused."""
HEAVY = frozenset({
    "million_records", "header_of_megabytes", "header_of_many_tensors", "manifest_of_a_million_files", "deep_folders",
    "metadata_that_shares_chunks", "byteorder_of_gigabytes", "pickle_laughs", "pickle_wide", "pickle_ordered", "pickle_sets",
    "pickle_sizes", "pickle_colliding_keys", "pickle_long_names",
})  # fmt: skip
"""Those that take a second or more to make or to refuse: each second in CI counts."""
QUIET = {"manifest_of_odd_values": manifest_of_odd_values, "byteorder_of_gigabytes": byteorder_of_gigabytes} | {
    f"pickle_{name}": _of_pickle(data) for name, data in (QUIET_PAYLOADS | _QUIET_PICKLES).items()
}
"""These may pass: there is nothing wrong with their bytes. They do no harm."""
