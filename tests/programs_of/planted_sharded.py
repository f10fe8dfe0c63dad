"""Bugs that programs of plain torch find: title -> the module below src/safe_ckpt, old text, new text."""

SHARDED = {
    "dcp.load asks for what a fresh optimizer has": (
        "core/sharding/dcp_load.py",
        "        state.update({name: _all_of(one, name, metadata, paths) for name, one in optimizers.items()})\n",
        "        pass\n",
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
}
RANKS = {
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
}
LOOPS = {
    "workers that would have gone on running are seeded again": (
        "data/loader.py",
        "        if pending is not None and pending.warm and not order.is_warm(self):",
        "        if False:",
    ),
}
