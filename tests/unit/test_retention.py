import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from safe_ckpt import CheckpointInfo, Retention
from safe_ckpt.core.directory.retention import best, to_delete


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
def test_what_a_rule_keeps_is_kept_and_the_newest_always(found, last, top, mode, every):
    """No policy ever deletes the newest checkpoint, or one that any of its rules keeps; the rest goes."""
    policy = Retention(keep_last=last, keep_best=top, metric="loss", mode=mode, keep_every_steps=every)
    gone = {i.sequence for i in to_delete(found, policy)}
    newest_first = sorted(found, key=lambda i: -i.sequence)
    kept = {i.sequence for i in newest_first[: last or 1]}
    kept |= {i.sequence for i in best(found, policy)[: top or 0]}
    kept |= {i.sequence for i in found if every and i.step % every == 0}
    if last is top is every is None:
        kept = {i.sequence for i in found}
    assert gone == {i.sequence for i in found} - kept


def test_best_prefers_the_newer_of_equals_and_nan_comes_last():
    """Ranking by metric is total: NaN is worse than anything, ties go to the newer."""
    found = [info(1, 1, loss=0.5), info(2, 2, loss=math.nan), info(3, 3, loss=0.5), info(4, 4, loss=0.9), info(5, 5)]
    order = [i.sequence for i in best(found, Retention(keep_best=1, metric="loss"))]
    assert order == [3, 1, 4, 2]
    order = [i.sequence for i in best(found, Retention(keep_best=1, metric="loss", mode="max"))]
    assert order == [4, 3, 1, 2]


def test_an_abandoned_future_does_not_outlive_its_rewind():
    """After a rewind the older step with the newer commit counts as the newest."""
    found = [info(1, 500), info(2, 1000), info(3, 600)]
    assert [i.step for i in to_delete(found, Retention(keep_last=1))] == [500, 1000]
