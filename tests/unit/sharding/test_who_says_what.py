"""Which rank says what of a sharded item, of plans alone."""

import torch

from safe_ckpt.core.sharding import dcp_plan, dcp_ranks


def plan_of(state):
    planner = dcp_plan._Planner()
    planner.set_up_planner(state, is_coordinator=False)
    return planner.create_local_plan()


def test_a_mapping_that_is_empty_on_the_first_rank_is_what_the_others_have_in_it():
    """Also where they have something only two levels below; where all have nothing, one says so."""
    plans = {0: plan_of({"a": {}, "e": {}}), 1: plan_of({"a": {"b": {"c": torch.ones(2)}}, "e": {}})}
    said = dcp_ranks.divided("", plans)
    assert {rank: [item.index.fqn for item in plan.items] for rank, plan in said.items()} == {0: ["e.{}"], 1: ["a.b.c"]}
