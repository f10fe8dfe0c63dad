"""Ranks that see different things at one path, as on hosts with disks of their own: each has mounts of its own."""

import ctypes
import subprocess

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from safe_ckpt import CheckpointConfig, Mirror, PerRank, Retention, Timeouts

_CLONE_NEWNS = 0x00020000
TIMEOUTS = Timeouts(barrier_s=30, lengthy_s=60, peer_stall_s=5, shutdown_s=20)


def why_no_mounts():
    """Why a rank cannot have mounts of its own here; empty when it can."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()


def move_to_host(number, folder):
    """This process is on host ``number`` from now on: ``folder/near`` is that host's disk. Returns that path."""
    near, disk = folder / "near", folder / f"host{number}"
    near.mkdir(exist_ok=True)
    disk.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", disk, near], check=True)
    return near


def config(folder, *, far="far", timeouts=TIMEOUTS, keep_last=2):
    mirror = Mirror(url=str(folder / far), near="per-host")
    return CheckpointConfig(mirror=mirror, timeouts=timeouts, retention=Retention(keep_last=keep_last))


def state_of(rank, step):
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": torch.rand(1000, generator=generator),
        "step": step,
        "own": PerRank(torch.full((500,), float(1000 * step + rank))),
    }


def empty():
    return {"weights": torch.zeros(1000), "step": -1, "own": PerRank(torch.zeros(500))}


def same(state, rank, step):
    """What of ``state`` is not that of ``step``."""
    wanted = state_of(rank, step)
    wrong = [] if state["step"] == step else [f"step {state['step']}"]
    wrong += [] if torch.equal(state["weights"], wanted["weights"]) else ["weights"]
    own, expected = state["own"], wanted["own"].value
    own = own.value if isinstance(own, PerRank) else own
    return wrong + ([] if torch.equal(own, expected) else ["own"])


def shards_of(step, mesh_shape, dimension):
    """A tensor that is cut over the ranks: along this dimension, over this mesh; over a second dimension of it, whole."""
    names = ("data", "model")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    whole = torch.arange(480.0).reshape(24, 20) + step
    placements = [Shard(dimension), *[Replicate()] * (len(mesh_shape) - 1)]
    return {"sharded": distribute_tensor(whole, mesh, placements), "step": step}


def same_shards(state, step):
    """Whether every part is that of ``step``, and the number of the step."""
    whole = state["sharded"].full_tensor()
    return state["step"] == step and torch.equal(whole, torch.arange(480.0).reshape(24, 20) + step)
