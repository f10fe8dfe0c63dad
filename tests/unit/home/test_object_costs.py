"""What docs/object-stores.md says of the number of requests is what a proxy counts."""

import re
from pathlib import Path

import pytest
import torch

from kit.fault_proxy import FaultProxy
from safe_ckpt import CheckpointConfig, Checkpointer, Retention

PAGE = Path(__file__).resolve().parents[3] / "docs" / "object-stores.md"


@pytest.fixture
def count(object_server, bucket, monkeypatch):
    """Returns how many requests came since it was called last."""
    with FaultProxy(object_server.endpoint) as proxy:
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)

        def counted():
            proxy.settle()
            number = len(proxy.seen)
            proxy.reset()
            return number

        yield counted


def said():
    """The numbers of each line of the table, in their order."""
    table = PAGE.read_text().partition("## Costs in requests")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \|$", table, re.MULTILINE)
    return {name: [int(number) for number in re.findall(r"\d+", cell)] for name, cell in rows}


def state(value):
    return {"w": {"t": torch.ones(4) * value}, "n": value}


FILES, PARTS = 2, 2  # of such a state: two files of one part each


def test_the_table_of_requests_in_the_page_is_what_a_proxy_counts(count, bucket):
    """Opening, saving, deleting and resuming take as many requests as the page says, for several numbers of checkpoints."""
    costs, found = said(), []
    save, per_file, _, per_copy = costs["a save"]
    with Checkpointer(bucket.url(), CheckpointConfig(retention=Retention(keep_last=2))) as ckpt:
        found.append(("open", count(), costs["open a new directory"][0]))
        for step, deleted in ((1, 0), (2, 0), (3, 1), (4, 1)):
            ckpt.save(step, state(step)).result(timeout_s=30)
            deleting = deleted * costs["deleting one checkpoint"][0]
            found.append(("save", count(), save + per_file * FILES + deleting))
    count()
    for there in (2, 3):
        with Checkpointer(bucket.url()) as ckpt:
            start, each = costs["open an old one"]
            found.append(("open again", count(), start + each * there))
            ckpt.resume(state(0))
            start, each, per_file_read = costs["a resume"]
            found.append(("resume", count(), start + each * there + per_file_read * FILES + PARTS))
            ckpt.save(10 + there, state(9)).result(timeout_s=30)
        count()
    frozen = torch.nn.Linear(600, 600).requires_grad_(requires_grad=False)
    with Checkpointer(f"{bucket.url()}/other") as ckpt:
        for number in (1, 2):
            count()
            ckpt.save(number, {"m": frozen, "n": number}).result(timeout_s=30)
        found.append(("shared", count(), save + per_file + per_copy))
    assert [(what, counted) for what, counted, _ in found] == [(what, expected) for what, _, expected in found]
