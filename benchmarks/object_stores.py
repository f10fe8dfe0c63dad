"""What a save to an object store costs, and what other ways to do it cost: in one run, against one local S3 server.

Each measurement is a fresh process (``object_store_run.py`` says which there are), with a bucket of its own that is deleted
afterwards. The ways take turns in every round. Ratios are taken within a round; what is printed are medians over the rounds.
The server is written in Python and runs on the same cores: seconds are those of this machine, and of no service.

    python benchmarks/object_stores.py --quick
    python benchmarks/object_stores.py --server moto --rounds 5 --json runs/object_stores.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import machine
import runner
from object_store_run import anonymous_bytes, descendants
from object_store_ways import ON_DISK, OURS, RAW, RESUMES, WAYS

MIB = 1 << 20
REQUESTS_MIB = 64
MOST_FOR_FORMAT = 1.1  # what a store holds after a save, over the bytes of the state
KINDS = ("requests", "durable", "training", "memory")
PACKAGES = ("torch", "obstore", "boto3", "s3fs", "aiobotocore", "s3torchconnector", "lightning", "ministack", "moto")
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of float32 tensors")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=("ministack", "moto"), default="ministack")
    parser.add_argument("--only", action="append", choices=WAYS, metavar="NAME", help="a way to save; all if not given")
    parser.add_argument("--kind", action="append", choices=KINDS, help="a measurement; all if not given")
    parser.add_argument("--quick", action="store_true", help="16 MiB, one round: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that was measured")
    parser.add_argument("--folder", type=Path, default=Path("runs/object_stores"), help="on the local disk")
    parser.add_argument("--timeout-s", type=float, default=300, help="for one process")
    options = parser.parse_args()
    if options.quick:
        options.mib, options.rounds = 16, 1
    return options


class Bench:
    """All measurements of one run.

    Args:
        options: of the command line.
        server: of ``kit.object_servers``.
        folder: for what is saved on the disk.

    Attributes:
        rows: what was measured; a way that failed has a row with its ``error``, and is not measured again.
        server_bytes: the most memory of the server that was seen after a measurement.
    """

    def __init__(self, options: argparse.Namespace, server: Any, folder: Path) -> None:
        self.options, self._server, self._folder = options, server, folder
        self.rows: list[Row] = []
        self.server_bytes = 0
        self._ways = [way for way in WAYS if way in (options.only or WAYS)]

    def run(self) -> None:
        kinds = [kind for kind in KINDS if kind in (self.options.kind or KINDS)]
        if "requests" in kinds:
            kinds.remove("requests")
            self._count_requests()
        for number in range(self.options.rounds):
            for kind in kinds:
                for way in self._ways:
                    if not self._failed(way):
                        say(f"round {number + 1} of {self.options.rounds}: {kind}, {way}")
                        self._measure(way, kind, number)

    def _failed(self, way: str) -> bool:
        return any("error" in row for row in self.rows if row["way"] == way)

    def _count_requests(self) -> None:
        """Through a proxy, which would cost throughput; a small state, whose size is noted."""
        from kit.fault_proxy import FaultProxy

        with FaultProxy(self._server.endpoint) as proxy:
            for way in self._ways:
                if way == ON_DISK:
                    continue
                say(f"requests, {way}")
                arrived: list[tuple[float, Any]] = []
                proxy.on_request = lambda record, arrived=arrived: arrived.append((time.monotonic(), record))
                with self._bucket(proxy.endpoint) as bucket:
                    row = self._child(way, "requests", bucket, min(REQUESTS_MIB, self.options.mib))
                proxy.reset()
                if "error" not in row:
                    during = [record for at, record in arrived if row["begun"] <= at <= row["done"]]
                    row["requests"] = len(during)
                    row["methods"] = dict(Counter(record.method for record in during))
                    row["sent_bytes"] = sum(record.size for record in during)
                self.rows.append({**row, "round": 0})

    def _measure(self, way: str, kind: str, number: int) -> None:
        with self._bucket() as bucket:
            row = self._child(way, kind, bucket, self.options.mib)
            if way != ON_DISK and "error" not in row:
                row["stored_bytes"] = sum(bucket.keys().values())
                if not 1 <= row["stored_bytes"] / row["state_bytes"] <= MOST_FOR_FORMAT:
                    row["error"] = f"{row['stored_bytes']} bytes are in the store"
            self.rows.append({**row, "round": number})
            if kind == "durable" and way in RESUMES and "error" not in row:
                self.rows.append({**self._child(way, "resume", bucket, self.options.mib), "round": number})
            pids = (self._server.pid, *descendants(self._server.pid))
            self.server_bytes = max(self.server_bytes, sum(map(anonymous_bytes, pids)))

    def _child(self, way: str, kind: str, bucket: Any, mebibytes: int) -> Row:
        what = ("--way", way, "--kind", kind, "--mib", mebibytes, "--url", bucket.url())
        where = ("--folder", self._folder, "--server-pid", self._server.pid)
        row = runner.run("object_store_run.py", *what, *where, timeout_s=self.options.timeout_s)
        if "error" in row:
            say(row["error"])
        return {**row, "way": way, "kind": kind}

    @contextlib.contextmanager
    def _bucket(self, endpoint: str | None = None) -> Iterator[Any]:
        """A fresh one, named by the environment; what it holds is the server's memory, so it is emptied afterwards."""
        bucket = self._server.new_bucket()
        os.environ.update(bucket.environment(endpoint))
        os.environ["AWS_DEFAULT_REGION"] = os.environ["AWS_REGION"]  # botocore's name for it
        try:
            yield bucket
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            empty(bucket)


def empty(bucket: Any) -> None:
    """Delete its objects, and abort uploads of a process that was killed."""
    client = bucket._s3()
    for upload in client.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=bucket.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    for key in list(bucket.keys()):
        client.delete_object(Bucket=bucket.bucket, Key=key)
    client.delete_bucket(Bucket=bucket.bucket)


class Figures:
    """The medians and ratios of the rows."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def of(self, way: str, kind: str, name: str) -> dict[int, float]:
        """By round."""
        return {
            row["round"]: row[name] for row in self.rows if (row["way"], row["kind"]) == (way, kind) and name in row
        }

    def median(self, way: str, kind: str, name: str) -> float | None:
        found = self.of(way, kind, name)
        return statistics.median(found.values()) if found else None

    def ratio(self, way: str, to: str, kind: str, name: str) -> float | None:
        """The median of what the ratio was in each round."""
        these, those = self.of(way, kind, name), self.of(to, kind, name)
        found = [these[number] / those[number] for number in these if those.get(number, 0.0) > 0 and these[number] > 0]
        return statistics.median(found) if found else None

    def requests(self, way: str) -> str:
        for row in self.rows:
            if row["way"] == way and "requests" in row:
                methods = ", ".join(f"{count} {method}" for method, count in sorted(row["methods"].items()))
                return f"{row['requests']} ({methods})"
        return ""


def markdown(results: dict[str, Any]) -> str:
    figures, settings, facts = Figures(results["rows"]), results["settings"], results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    heading = (
        f"{settings['mib']} MiB, {settings['rounds']} rounds against {settings['server']}; {facts['date']}, "
        f"{facts['cores']} cores ({facts['processor']}), {facts['file_system']}; load when it began "
        f"{facts['load']:.1f}, when it ended {facts['load_after']:.1f}; Python {facts['python']}, {versions}."
    )
    parts = ["# Saving to an object store", heading, saving(figures), loads(figures), errors(figures)]
    return "\n\n".join(part for part in parts if part) + "\n"


def saving(figures: Figures) -> str:
    size = next((row["state_bytes"] for row in figures.rows if "requests" in row), 0)
    titles = [
        "",
        "durable s",
        "/ obstore",
        "/ ours",
        "call s",
        "training lost s",
        "/ ours",
        "CPU s",
        "/ obstore",
        "/ ours",
    ]
    titles += [
        "server CPU s",
        "memory, process MiB",
        "children MiB",
        "snapshot MiB",
        f"requests at {size / MIB:.0f} MiB",
    ]
    rows = []
    for way in WAYS:
        if figures.median(way, "durable", "durable_s") is None:
            continue
        cells = [way]
        for kind, name, references in (
            ("durable", "durable_s", (RAW, OURS)),
            ("durable", "call_s", ()),
            ("training", "lost_s", (OURS,)),
            ("durable", "cpu_s", (RAW, OURS)),
        ):
            cells.append(_number(figures.median(way, kind, name), 3))
            cells += [_number(figures.ratio(way, to, kind, name), 2) for to in references]
        cells.append(_number(figures.median(way, "durable", "server_cpu_s"), 2))
        for name in ("process_bytes", "children_bytes", "shared_bytes"):
            cells.append(_number(figures.median(way, "memory", name), 0, 1 / MIB))
        rows.append([*cells, figures.requests(way)])
    return _table(titles, rows)


def loads(figures: Figures) -> str:
    rows = []
    for way in RESUMES:
        if (resume_s := figures.median(way, "resume", "resume_s")) is not None:
            cells = [way, _number(resume_s, 3), _number(figures.ratio(way, RAW, "resume", "resume_s"), 2)]
            cells += [_number(figures.median(way, "resume", "cpu_s"), 2)]
            cells += [_number(figures.ratio(way, RAW, "resume", "cpu_s"), 2)]
            rows.append([*cells, _number(figures.median(way, "resume", "server_cpu_s"), 2)])
    titles = ["", "resume s", "/ obstore", "CPU s", "/ obstore", "server CPU s"]
    return "## Reading back\n\n" + _table(titles, rows) if rows else ""


def errors(figures: Figures) -> str:
    rows = [[row["way"], row["kind"], f"`{row['error']}`"] for row in figures.rows if "error" in row]
    return "## What could not run\n\n" + _table(["", "", "error"], rows) if rows else ""


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    start: Callable[[str, Path], Any] = import_module("kit.object_servers").start
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
    versions = {name: machine._version(name) for name in PACKAGES}
    facts = {**machine.facts(options.folder), "versions": versions, "load": os.getloadavg()[0]}
    try:
        with start(options.server, folder / "server") as server:
            (folder / "saves").mkdir()
            bench = Bench(options, server, folder / "saves")
            try:
                bench.run()
            except KeyboardInterrupt:
                say("interrupted: what there is so far follows")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts["load_after"] = os.getloadavg()[0]
    settings = {name: getattr(options, name) for name in ("mib", "rounds", "server")}
    return {"machine": facts, "settings": settings, "server_bytes": bench.server_bytes, "rows": bench.rows}


def main() -> None:
    options = arguments()
    results = measure(options)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(markdown(results))
    if any("error" in row for row in results["rows"] if row["way"] in (OURS, ON_DISK)):
        raise SystemExit("safe_ckpt itself could not run")


if __name__ == "__main__":
    main()
