"""Drivers of Ray Train for the tests: ``ray_runs.py STORAGE JSON`` runs jobs one after the other, each on two workers.

JSON has a list of jobs, as mappings: ``run``, the name of one of the functions below; ``name``, that of the run; what that
function asks for; ``failures``, how many restarts Ray may make; ``plain``, for Ray's own RunConfig. Of each job one line is
printed: ``JOB name {...}``. ``alone`` is the same training without Ray.
"""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # on Linux, too: Ray listens on this machine alone
    RAY_AUTH_MODE="disabled",  # else a token is written into the home directory
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.1",  # a report waits for the next look of Ray at its workers
    RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="0.2",
    RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="400",
    RAY_TRAIN_COLLECTIVE_TIMEOUT_S="300",
    RAY_DEDUP_LOGS="0",
    RAY_worker_niceness="0",  # it would be 15: beside other tests the workers would starve
)


def parts(rank, prepare):
    """A model with dropout under DDP, and what it trains with; every rank draws from a generator of its own."""
    import torch

    from safe_ckpt import PerRank, RngState

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = prepare(net)
    torch.manual_seed(rank + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer, "rng": PerRank(RngState()), "step": 0}


def step_of(state):
    import torch

    loss = state["model"](torch.randn(16, 8)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss.item()


def digest(state):
    """Of the weights, and of what is drawn next."""
    import torch

    found = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in state["model"].parameters()))
    found.update(repr(torch.rand(2).tolist()).encode())
    return found.hexdigest()


def alone(rank, steps):
    """``train`` in one piece, with torch alone: the digest."""
    import torch

    state = parts(rank, torch.nn.parallel.DistributedDataParallel)
    for _ in range(steps):
        step_of(state)
    return digest(state)


def told(options, rank, text):
    Path(options["storage"], f"{options['name']}-{rank}.txt").write_text(text, encoding="utf-8")


def train(options):
    """Train until ``steps`` and save after each; tell the digest of all that a training goes on with."""
    import ray.train
    from ray.train.torch import prepare_model

    from safe_ckpt import CheckpointConfig, Retention
    from safe_ckpt.ray import RayCheckpointer

    rank = ray.train.get_context().get_world_rank()
    if "mistakes" in options:
        misused({**options, "name": options["mistakes"]})
    state = parts(rank, prepare_model)
    Path(options["storage"], f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    asked = []
    with RayCheckpointer(CheckpointConfig(retention=Retention(keep_last=options.get("keep_last")))) as ckpt:
        ckpt.resume(state)
        for step in range(state["step"] + 1, options["steps"] + 1):
            loss = step_of(state)
            if options.get("watched"):
                time.sleep(0.05)  # as a step takes; nothing waits for it
                if ckpt.save_requested:
                    asked.append(step)
            if step % options.get("every", 1) == 0 or asked == [step]:
                ckpt.save(step, {**state, "step": step}, metrics={"loss": loss})
                if asked and step > asked[0]:  # it went on; how long Ray takes to say so is not known
                    break
    told(options, rank, json.dumps({"digest": digest(state), "asked": asked}))


def misused(options):
    """What each rank is told of mistakes: too few kept, settings that differ, and nothing of the kind."""
    import ray.train

    from safe_ckpt import CheckpointConfig, Retention, Timeouts
    from safe_ckpt.ray import RayCheckpointer

    rank = ray.train.get_context().get_world_rank()
    configs = {
        "few": CheckpointConfig(retention=Retention(keep_last=1)),
        "differ": CheckpointConfig(timeouts=Timeouts(barrier_s=60 + rank)),
        "signals": CheckpointConfig(save_on_signals=("SIGTERM",)),
        "good": CheckpointConfig(),
    }
    errors = {}
    for name, config in configs.items():
        try:
            with RayCheckpointer(config):
                errors[name] = ""
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    told(options, rank, json.dumps(errors))


def fit(storage, job):
    """One job. Returns what Ray says of it."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from safe_ckpt.ray import SafeRunConfig

    kind = RunConfig if job.get("plain") else SafeRunConfig
    result = TorchTrainer(
        globals()[job["run"]],
        train_loop_config={**job, "storage": str(storage)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=kind(
            name=job["name"],
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=job.get("failures", 0)),
        ),
    ).fit()
    latest = result.checkpoint.path if result.checkpoint else None
    listed = [checkpoint.path for checkpoint, _ in result.best_checkpoints or []]
    return {"latest": latest, "listed": listed, "metrics": result.metrics, "error": str(result.error or "")}


def drain_soon(storage, job):
    """In the background: tell Ray that its node is about to go, as soon as something is committed."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    events = Path(storage, job["name"], "checkpoints", ".safe_ckpt", "events.jsonl")
    address, node = ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_node_id()

    def drain():
        while not (events.exists() and '"committed"' in events.read_text(encoding="utf-8")):
            time.sleep(0.05)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int(time.time() * 1000) + 600_000
        print("DRAIN", GcsClient(address=address).drain_node(node, reason, "a test", deadline_ms), flush=True)

    threading.Thread(target=drain, daemon=True).start()


def main(storage, jobs):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    for job in jobs:
        if job.get("watched"):
            drain_soon(storage, job)
        try:
            found = fit(storage, job)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print("JOB", job["name"], json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
