"""Mends turned back, which programs of the kinds "sharded" and "ranks" find: module of the package, old text, new text."""

FOUND_BY = {
    "dcp.load asks for what a fresh optimizer has": ("sharded", 0, {"door": 1}),
    "dcp.load wants state of parameters that had none": ("sharded", 0, {"door": 1, "handed": 2, "unused": 2}),
    "dcp.load leaves the state that torch has made for a parameter that had none": (
        "sharded", 0, {"door": 1, "handed": 4, "unused": 3},
    ),
    "a flattened state begins anew with zeros": ("sharded", 0, {"door": 1, "handed": 4, "unused": 3, "optimizer": 10}),
    "dcp.load puts text beside numbers that are keys": ("sharded", 0, {"door": 1, "scheduler": 2}),
    "no resume takes a list of DTensors": ("sharded", 0, {"more": 2}),
    "ranks that are new draw what rank 0 draws": (
        "ranks", 0, {"ranks": 2, "order": 0, "elsewhere": 2, "ranks again": 2, "signal": 2, "kills": 0},
    ),
    "a loader of a rank that is new begins its epoch": (
        "ranks", 0, {
            "ranks": 2, "order": 0, "elsewhere": 2, "ranks again": 1, "signal": 2, "kills": 0, "per rank": 1,
            "breaks behind": 0, "every": 0, "saves": 0,
        },
    ),
    "workers that would have gone on running are seeded again": (
        "loops", 7, {"workers": 2, "persistent": 1, "draws": 1, "order": 1, "breaks behind": 0, "saves": 1},
    ),
}  # fmt: skip
"""Title -> the kind, seed and choices of a program that finds it; of "sharded" ones, with ``IN_PLACE`` besides."""
IN_PLACE = {"stop": 0, "door": 0, "handed": 0, "optimizer": 0, "elsewhere": 0, "groups": 0, "wrap": 0, "ranks": 0}

PLANTED = {
    "dcp.load asks for what a fresh optimizer has": (
        "core/sharding/dcp_load.py",
        "        state.update({name: _all_of(one, name, metadata, paths) for name, one in optimizers.items()})\n",
        "",
    ),
    "dcp.load wants state of parameters that had none": (
        "core/sharding/dcp_load.py",
        "self.anew = {} if self._planner.allow_partial_load else self._leave_out(paths)",
        "self.anew = {}",
    ),
    "dcp.load leaves the state that torch has made for a parameter that had none": (
        "core/sharding/dcp_load.py",
        "            dtensor.begin_anew(_at(self._state, place[:-1]), place[-1])",
        "            pass",
    ),
    "a flattened state begins anew with zeros": (
        "core/sharding/dtensor.py",
        "        begins = holder.get(f\"param_groups.{above.removeprefix('state.')}.lr\", 0)\n",
        "        begins = 0\n",
    ),
    "dcp.load puts text beside numbers that are keys": (
        "core/sharding/dcp_load.py",
        "            if keys != path:\n",
        "            if False:\n",
    ),
    "no resume takes a list of DTensors": (
        "core/state/items.py",
        "if not isinstance(self.value, dict | list):",
        "if not isinstance(self.value, dict):",
    ),
    "ranks that are new draw what rank 0 draws": (
        "core/state/rng.py",
        "salt=str(rank).encode()",
        'salt=b"0"',
    ),
    "a loader of a rank that is new begins its epoch": (
        "data/loader.py",
        "        del rank\n        self.load_state_dict(state)",
        "        del rank",
    ),
    "workers that would have gone on running are seeded again": (
        "data/loader.py",
        "        if pending is not None and pending.warm and not order.is_warm(self):",
        "        if False:",
    ),
}
