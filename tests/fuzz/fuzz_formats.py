"""Fuzzing of everything that reads a file which somebody else may have made.

``python tests/fuzz/fuzz_formats.py CORPUS FOUND [-max_total_time=3600 ...]`` runs atheris (libFuzzer, guided by coverage; not
among the development dependencies: ``pip install atheris``), starting from ``CORPUS`` and from ``tests/fuzz/corpus``. What it
finds is written to ``FOUND``, one file per place where an error came from, and it goes on.

The first byte of an input says which reader gets the rest. What may come out: ``SafeCheckpointError`` and ``OSError``. What may
not happen: another exception, code of the input that runs, an answer that takes longer than ``MOST_S``, memory beyond
``MOST_BYTES``. ``tests/unit/tools/inspection/test_fuzz_corpus.py`` replays the corpus of the repository.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

import xxhash

MOST_S = 5.0
MOST_BYTES = 2 << 30
MOST_GROWTH_BYTES = 512 << 20
CORPUS = Path(__file__).with_name("corpus")


MODULES = (
    "errors", "core.formats.manifest", "tools.inspection.check", "tools.inspection.content", "tools.inspection.dcp_reader",
    "tools.inspection.files", "tools.inspection.pickle_reader", "tools.inspection.safetensors_reader",
    "tools.inspection.values", "tools.inspection.tensors", "tools.inspection.torch_reader", "ledger.event_log",
)  # fmt: skip
m = {}  # the modules, imported under instrumentation when that is wanted


def zip_of(records):
    """An archive as torch's, of these records: the structure is right whatever the records hold."""
    body, directory = b"", b""
    for name, data in records.items():
        raw, crc = name.encode(), zlib.crc32(data)
        fields = (20, 0, 0, 0, 0, crc, len(data), len(data), len(raw))
        directory += struct.pack("<4sH5H3I5H2I", b"PK\1\2", 20, *fields, 0, 0, 0, 0, 0, len(body)) + raw
        body += struct.pack("<4s5H3I2H", b"PK\3\4", *fields, 0) + raw + data
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(records), len(records), len(directory), len(body), 0)
    return body + directory + end


def told(found):
    """What ``inspect`` would say of it."""
    for value in found.values:
        m["values"].same(value.value, value.value)
    values = [[value.name, value.text, value.value if value.is_plain else None] for value in found.values]
    json.dumps([values, [[e.name, e.dtype, e.shape, e.size_bytes, e.note] for e in found.tensors]], default=str)


def _leaves(root):
    for _, leaf in m["tensors"].leaves(root, "x"):
        m["tensors"].describe(leaf)


def pickle(data, _):
    _leaves(m["pickle_reader"].read_pickle(data, "x"))


def pickles(data, _):
    for root in m["pickle_reader"].read_pickles(data, "x", count=4)[0]:
        _leaves(root)


def archive(data, folder):
    file = folder / "x.ckpt"
    file.write_bytes(data)
    with m["files"].Window(file) as window:
        found = m["torch_reader"].read_structure(window)
        told(m["torch_reader"].content_of(found))
        m["torch_reader"].tensor_names_in(found, found.spans())


def pickle_in_archive(data, folder):
    archive(zip_of({"a/data.pkl": data, "a/byteorder": b"little", "a/data/0": bytes(64)}), folder)


def safetensors(data, folder):
    file = folder / "x.safetensors"
    file.write_bytes(data)
    told(m["safetensors_reader"].read_safetensors(file))


def safetensors_header(data, folder):
    safetensors(len(data).to_bytes(8, "little") + data + bytes(24), folder)


def old_file(data, folder):
    file = folder / "x.pt"
    file.write_bytes(data)
    _check(file)


def _check(path):
    verdicts = m["check"].verify_tasks([m["check"].plan_tasks(path)])
    json.dumps([vars(judgement) for verdict in verdicts for judgement in verdict.files])
    told(m["content"].read_content(path))
    for _ in m["content"].tensors_in(m["content"].read_structure(path)):
        pass


def dcp_metadata(data, folder):
    (folder / ".metadata").write_bytes(data)
    part = m["part"]
    (folder / "__0_0.distcp").write_bytes(part)
    directory = m["dcp_reader"].read_directory(folder)
    told(m["dcp_reader"].content_of_directory(directory))


def dcp_directory(data, folder):
    split = min(int.from_bytes(data[:2], "little"), len(data) - 2)
    (folder / ".metadata").write_bytes(data[2 : 2 + split])
    (folder / "__0_0.distcp").write_bytes(data[2 + split :])
    _check(folder)


def manifest(data, folder):
    (folder / "manifest.json").write_bytes(data)
    found = m["manifest"].read_manifest(folder)
    m["manifest"].CheckpointInfo.of(found, folder, 0).to_json()


def manifest_resigned(data, folder):
    """With a digest that is right: what an attacker would write, and what damage does not."""
    with contextlib.suppress(ValueError, RecursionError):
        facts = json.loads(data)
        if isinstance(facts, dict):
            facts.pop("digest", None)
            text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
            data = json.dumps({**facts, "digest": xxhash.xxh3_128(text).hexdigest()}).encode()
    (folder / "model.safetensors").write_bytes(m["safetensors"])
    manifest(data, folder)
    _check(folder)


def own_file(data, folder):
    file = folder / "x.ckpt"
    file.write_bytes(data)
    with contextlib.suppress(m["errors"].SafeCheckpointError):
        m["manifest"].read_manifest(file)
    _check(file)


def any_directory(data, folder):
    """A row of names, each with its length and bytes."""
    at = 0
    for name in ("model.safetensors.index.json", "model.safetensors", "optimizer.bin", "trainer_state.json"):
        size = int.from_bytes(data[at : at + 2], "little")
        (folder / name).write_bytes(data[at + 2 : at + 2 + size])
        at += 2 + size
    _check(folder)


def recorded_events(data, folder):
    file = folder / "events.jsonl"
    file.write_bytes(data)
    for event in m["event_log"].read_events((file,)).events:
        for key in event.facts:
            event.number(key), event.count(key), event.text(key), event.texts(key)


TARGETS = (
    pickle, pickles, archive, pickle_in_archive, safetensors, safetensors_header, old_file, dcp_metadata, dcp_directory,
    manifest, manifest_resigned, own_file, any_directory, recorded_events,
)  # fmt: skip
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)


class BrokenPromise(BaseException):
    """Not an error that a reader could catch by mistake."""


def _forbid(event, _):
    if event in FORBIDDEN:
        raise BrokenPromise(f"the input ran code: {event}")


def _too_long(*_):
    raise BrokenPromise(f"no answer within {MOST_S} s")


def load(part=b""):
    """Import what is fuzzed."""
    m.update({name.rpartition(".")[2]: importlib.import_module(f"safe_ckpt.{name}") for name in MODULES})
    m["part"] = part or zip_of({"a/data.pkl": b"\x80\x02N.", "a/byteorder": b"little"})
    m["safetensors"] = (2).to_bytes(8, "little") + b"{}"


def run_one(data):
    """One input. Raises what must not come out."""
    if not data or data[0] >= len(TARGETS):
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before_it = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        TARGETS[data[0]](data[1:], folder)
    except (m["errors"].SafeCheckpointError, OSError) as error:
        if len(str(error)) > 4000:
            raise BrokenPromise("a message of more than 4000 characters") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_it)
        shutil.rmtree(folder, ignore_errors=True)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 > MOST_GROWTH_BYTES:
        raise BrokenPromise("too much memory")


class _Recorder:
    def __init__(self, found):
        self._found = found
        found.mkdir(parents=True, exist_ok=True)
        self._count, self._since, self._began = 0, time.monotonic(), time.monotonic()

    def __call__(self, data):
        self._count += 1
        try:
            run_one(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "safe_ckpt" in f.filename]
            last = frames[-1] if frames else None
            where = f"{Path(last.filename).name}:{last.lineno}" if last else "?"
            mark = f"{TARGETS[data[0]].__name__}-{type(error).__name__}-{where}".replace("/", "_")
            file = self._found / mark
            if not file.exists() or file.stat().st_size > len(data):
                file.write_bytes(data)
                (self._found / f"{mark}.txt").write_text(
                    "".join(traceback.format_exception(error))[-4000:], "utf-8", "replace"
                )
        if time.monotonic() - self._since > 60:
            self._since = time.monotonic()
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(f"{self._count} inputs, {self._since - self._began:.0f} s, {rss} MiB at most", flush=True)


def main():
    import atheris

    corpus, found, *flags = sys.argv[1:]
    with atheris.instrument_imports(include=["safe_ckpt", "pickle"]):
        part = Path(corpus, "part.distcp")
        load(part.read_bytes() if part.exists() else b"")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    sys.addaudithook(_forbid)
    atheris.Setup([sys.argv[0], corpus, str(CORPUS), *flags], _Recorder(Path(found)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
