"""Which files are the best: after saves that failed, and where ranks have different scores."""

import re
from pathlib import Path

import pytest
from lightning_runs import QUICK, fit, names, package

from programs_of.here import full_disk
from safe_ckpt import CheckpointConfig

SCORES = (0.5, 0.3, 0.7, 0.2, 0.6, 0.9, 0.1, 0.4, 0.8)
WARNS = CheckpointConfig(timeouts=QUICK.timeouts, on_failure="warn", max_consecutive_failures=100)


def scoring(pl):
    class Scores(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.step = trainer.global_step
            pl_module.log("score", SCORES[self.step - 1])

    return Scores()


@pytest.mark.parametrize("top_k", [1, 2, 3, -1])
@pytest.mark.parametrize(("mode", "failing"), [("min", {1, 4}), ("max", {2, 6, 7}), ("min", {4, 5, 6, 7})])
@pytest.mark.quick
def test_a_save_that_failed_is_not_among_the_best_and_costs_none_of_them(tmp_path, mode, top_k, failing):
    """The files, and what the callback believes, are the best of those that were saved; ``last.ckpt`` is the newest of them."""
    scores = scoring(package("lightning.pytorch"))
    with full_disk(lambda: scores.step in failing):
        _, callback, _ = fit(
            tmp_path, filename="{step}", monitor="score", mode=mode, save_top_k=top_k, save_last=True, every_n_train_steps=1,
            config=WARNS, callbacks=[scores],
        )  # fmt: skip
    saved = [step for step in range(1, 10) if step not in failing]
    best = sorted(saved, key=lambda step: SCORES[step - 1], reverse=mode == "max")[: top_k if top_k > 0 else None]
    files = {f"step={step}.ckpt" for step in best}
    assert {Path(path).name for path in callback.best_k_models} == files
    assert Path(callback.best_model_path).name == f"step={best[0]}.ckpt"
    assert Path(callback.kth_best_model_path).name in ("", f"step={best[-1]}.ckpt")
    assert set(names(tmp_path)) == {*files, "last.ckpt"}


@pytest.mark.parametrize("monitor", ["score", None])
@pytest.mark.quick
def test_names_and_scores_are_those_of_rank_0_on_every_rank(tmp_path, monitor):
    """Without ``sync_dist`` each rank has a value of its own. This one is any rank of two, and is told what rank 0 has."""
    pl = package("lightning.pytorch")

    class OneOfTwo(pl.strategies.SingleDeviceStrategy):
        def broadcast(self, obj, src=0):
            is_metrics = isinstance(obj, dict) and "score" in obj
            return {**obj, "score": obj["score"] - obj["score"] + SCORES[int(obj["step"]) - 1]} if is_metrics else obj

    class OtherScores(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.log("score", 1.0 - SCORES[trainer.global_step - 1])

    strategy = OneOfTwo("cpu")
    strategy.world_size = 2
    _, callback, _ = fit(
        tmp_path, filename="{step}-{score:.2f}", monitor=monitor, save_top_k=2 if monitor else -1, every_n_train_steps=1,
        callbacks=[OtherScores()], settings={"strategy": strategy},
    )  # fmt: skip
    found = {
        int(step): float(score) for step, score in re.findall(r"step=(\d+)-score=([\d.]+)\.ckpt", str(names(tmp_path)))
    }
    assert found == {step: SCORES[step - 1] for step in ((7, 4) if monitor else range(1, 10))}
    if monitor:
        assert float(callback.best_model_score) == pytest.approx(min(SCORES))
