import math
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_ckpt import CheckpointConfig, Checkpointer, CheckpointInfo, Retention
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest
from safe_ckpt.core.home.retention import (
    Unjudged,
    best_first,
    decide_deletions,
    delete_listed,
    keep_newest,
    policy_of,
    to_delete,
    unjudged,
)
from safe_ckpt.core.home.standing import Catalog, replaced_among
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place


def info(sequence, step, **metrics):
    return CheckpointInfo(
        path=Path(f"step-{step}"),
        name=f"step-{step}",
        step=step,
        sequence=sequence,
        metrics=metrics,
        created_at="",
        world_size=1,
        size_bytes=1,
    )


infos = st.lists(
    st.tuples(st.integers(0, 50), st.one_of(st.none(), st.floats(allow_infinity=True, allow_nan=True))), max_size=12
).map(lambda rows: [info(i + 1, step, **({} if v is None else {"loss": v})) for i, (step, v) in enumerate(rows)])
counts = st.one_of(st.none(), st.integers(1, 5))


@given(infos, counts, counts, st.sampled_from(["min", "max"]), st.one_of(st.none(), st.integers(1, 10)))
def test_retention_keeps_the_newest_and_what_any_rule_keeps(found, last, top, mode, every):
    """No policy ever deletes the newest checkpoint, or one that any of its rules keeps; the rest goes.

    Where no checkpoint has a finite metric, keep_best cannot choose, and keeps all.
    """
    policy = Retention(keep_last=last, keep_best=top, metric="loss", mode=mode, keep_every_steps=every)
    gone = {i.sequence for i in to_delete(found, policy)}
    by_commit = sorted(found, key=lambda i: -i.sequence)
    kept = {i.sequence for i in by_commit[: last or 1]}
    kept |= {i.sequence for i in best_first(found, policy)[: top or 0]}
    kept |= {i.sequence for i in found if every and i.step % every == 0}
    without = all(not math.isfinite(i.metrics.get("loss", math.nan)) for i in found)
    if last is top is every is None or (top and without):
        kept = {i.sequence for i in found}
    assert gone == {i.sequence for i in found} - kept


def test_best_prefers_the_newer_of_equals_and_nan_comes_last():
    """Ranking by metric is total: NaN is worse than anything, ties go to the newer."""
    found = [info(1, 1, loss=0.5), info(2, 2, loss=math.nan), info(3, 3, loss=0.5), info(4, 4, loss=0.9), info(5, 5)]
    order = [i.sequence for i in best_first(found, Retention(keep_best=1, metric="loss"))]
    assert order == [3, 1, 4, 2]
    order = [i.sequence for i in best_first(found, Retention(keep_best=1, metric="loss", mode="max"))]
    assert order == [4, 3, 1, 2]


@pytest.mark.parametrize(
    ("metrics", "known"),
    [
        ([{}, {}], ()),
        ([{"loss": math.nan}, {"loss": math.inf}], ()),
        ([{"val/loss": 1.0}, {"val.loss": 2.0, "a": 1}, {}], ("a", "val.loss", "val/loss")),
    ],
)
def test_a_rule_by_a_metric_that_none_has_keeps_all_and_names_those_there_are(metrics, known):
    """Also where other rules are set; a name within another is another name; one number is enough to choose by."""
    rules = Retention(keep_last=1, keep_every_steps=50, keep_best=1, metric="loss")
    found = [info(n, n, **has) for n, has in enumerate(metrics, 1)]
    assert to_delete(found, rules) == []
    assert unjudged(found, rules).known == known
    found.append(info(9, 9, loss=0.5))
    assert [i.sequence for i in to_delete(found, rules)] == [n for n, _ in enumerate(metrics, 1)]
    assert unjudged(found, rules) is None


def test_a_metric_of_a_copy_or_of_an_unhealthy_checkpoint_is_none_to_choose_by(tmp_path):
    """Neither counts for a rule. Without checkpoints, or without keep_best, there is nothing to say."""
    rules = Retention(keep_last=1, keep_best=1, metric="loss")
    made = [
        _committed(tmp_path / "step-1", 1),
        replace(_committed(tmp_path / "step-2", 2, loss=0.1), marked=True),
        replace(_committed(tmp_path / "step-3", 3, loss=0.1), name="step-7"),
        _committed(tmp_path / "step-4", 4, acc=0.5),
    ]
    catalog = Catalog()
    for one in made:
        decision = decide_deletions(one, catalog, policy_of(rules))
        assert decision.to_delete == []
    assert decision.unjudged == Unjudged(metric="loss", known=("acc",))
    assert (unjudged([], rules), unjudged(made, Retention(keep_last=1, metric="loss"))) == (None, None)


def test_an_abandoned_future_does_not_outlive_its_rewind():
    """After a rewind the older step with the newer commit counts as the newest."""
    found = [info(1, 500), info(2, 1000), info(3, 600)]
    assert [i.step for i in to_delete(found, Retention(keep_last=1))] == [500, 1000]


def test_the_newest_commit_stays_whatever_a_policy_chooses(tmp_path):
    """A policy that wants all of them gone: after a rewind the newer commit of the lower step stays, and the abandoned one of
    the highest step goes. A marked one is not what a resume takes, so beside it the newest healthy one stays.
    """

    def all_of_them(committed):
        return [one.path for one in committed]

    catalog, steps = Catalog(), (500, 1000, 600)
    made = [_committed(tmp_path / f"step-{step}", step, number) for number, step in enumerate(steps)]
    for one in made[:2]:
        decide_deletions(one, catalog, None)
    decision = decide_deletions(made[2], catalog, all_of_them)
    assert (decision.to_delete, decision.kept) == ([made[0].path, made[1].path], ["step-600"])
    marked = replace(_committed(tmp_path / "step-700", 700, 3), marked=True)
    assert decide_deletions(marked, catalog, all_of_them).to_delete == []
    last = _committed(tmp_path / "step-100", 100, 4)
    assert decide_deletions(last, catalog, all_of_them).to_delete == [made[2].path]


@given(st.lists(st.integers(0, 1000), unique=True, max_size=12), st.integers(-1, 6), st.integers(-1, 11))
def test_rotation_of_a_trainer_keeps_newest_and_best_within_the_limit(sequences, limit, best):
    """For any history: never the newest, never the best, no more than the limit otherwise, the oldest first."""
    committed = [
        CheckpointInfo(
            path=Path(f"/run/checkpoint-{n}"), name="", step=1000 - n, sequence=n, metrics={}, created_at="",
            world_size=1, size_bytes=0,
        )
        for n in sequences
    ]  # fmt: skip
    chosen = committed[best].path if 0 <= best < len(committed) else None
    paths = keep_newest(limit, chosen)(committed)
    gone = [info for info in committed if info.path in paths]
    left = sorted((i for i in committed if i not in gone), key=lambda i: i.sequence)
    assert chosen not in [info.path for info in gone]
    if committed:
        assert left[-1].sequence == max(sequences)
    if limit < 1:
        assert not gone
    else:
        assert len(left) <= max(limit, 2)
        assert len(left) >= min(limit, len(committed))
    plain = [info for info in left if info.path != chosen]
    assert all(old.sequence < min(p.sequence for p in plain) for old in gone) if plain else True


@pytest.mark.parametrize("ids", ["abc", "cba", "bca"])
def test_of_several_saves_of_a_step_in_a_store_the_last_one_stays(ids):
    """Whatever their folders are called: the order in which a store lists them says nothing."""
    run = open_place("s3://bucket/run", StorageOptions())
    saves = [replace(info(number, 7), path=run / f"step-7.{one}") for number, one in enumerate(ids, start=1)]
    others = [replace(info(9, 7), path=run / "step-7.d", marked="loss"), replace(info(4, 8), path=run / "step-8.a")]
    listed = sorted([*saves, *others], key=lambda one: one.path.name)
    assert {one.path.name for one in replaced_among(listed)} == {f"step-7.{one}" for one in ids[:-1]}


def test_retention_keeps_what_a_pointer_names_or_another_job_saved(tmp_path):
    """What a pointer names stays, as does what is of another job now; what goes is forgotten; a list needs no catalog."""
    made = [_committed(tmp_path / f"step-{n}", n) for n in range(8, 13)]
    (tmp_path / "latest").write_text("step-9\n")
    catalog = Catalog(pointers=[tmp_path / "latest", tmp_path / "missing"])
    for one in made[:4]:
        assert decide_deletions(one, catalog, None) is None
    _committed(tmp_path / "step-10", 10)  # saved again by another job
    decision = decide_deletions(made[4], catalog, keep_newest(1))
    assert (decision.to_delete, decision.kept) == ([made[0].path, made[3].path], ["step-9", "step-12"])
    assert [one.step for one in catalog.committed] == [9, 10, 12]
    listed = decide_deletions(made[4], None, delete_listed([tmp_path / "old"]))
    assert (listed.to_delete, listed.kept) == ([tmp_path / "old"], [])


def _committed(path, step, sequence=None, **metrics):
    sequence = step if sequence is None else sequence
    manifest = Manifest(
        name=path.name, sequence=sequence, step=step, op_id=uuid.uuid4().hex, world_size=1, metrics=metrics, files=()
    )
    path.mkdir(exist_ok=True)
    (path / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return CheckpointInfo.of(manifest, path, 0)


@pytest.mark.parametrize("damage", ["gone", "unreadable", "another's"])
def test_a_checkpoint_whose_manifest_cannot_be_checked_is_not_deleted(tmp_path, damage):
    """What has its name may be another one by now: where nobody can say, retention leaves it."""
    manifest = tmp_path / "step-00000001/manifest.json"
    with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=30)
        manifest.chmod(0o644)
        if damage == "gone":
            manifest.unlink()
        elif damage == "unreadable":
            manifest.write_bytes(manifest.read_bytes()[:-20])
        else:
            manifest.write_bytes(manifest.read_bytes().replace(b'"step": 1,', b'"step": 1, "sequence": 77,'))
        ckpt.save(2, {"x": 2}).result(timeout_s=30)
        assert (tmp_path / "step-00000001/x.json").exists()
        ckpt.save(3, {"x": 3}).result(timeout_s=30)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
