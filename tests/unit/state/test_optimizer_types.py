"""What an optimizer keeps in another type than its parameters comes back in that type: torch would round it."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer, dcp

CONFIG = CheckpointConfig(timeouts=QUICK)


class Float32Moments(torch.optim.Optimizer):
    """Of the user's own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float32))
                state["sum"].mul_(0.9).add_(parameter.grad.float())
                parameter.sub_(group["lr"] * state["sum"].to(parameter.dtype))


def _trained(make, dtype, steps):
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2).to(dtype)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 3).to(dtype)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _kept(optimizer):
    return {(number, key): one for number, of in optimizer.state_dict()["state"].items() for key, one in of.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, Float32Moments])
@pytest.mark.parametrize("door", ["Checkpointer", "dcp"])
def test_what_is_kept_in_float32_beside_bfloat16_is_not_rounded(tmp_path, make, door):
    """NAdam's products, ASGD's rates, moments of a class of one's own: values and types, with a Checkpointer and with DCP."""
    model, optimizer = _trained(make, torch.bfloat16, 3)
    again, resumed = _trained(make, torch.bfloat16, 0)
    if door == "dcp":
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "one")
        dcp.load({"model": again, "optimizer": resumed}, checkpoint_id=tmp_path / "one")
    else:
        with Checkpointer(tmp_path, CONFIG) as ckpt:
            ckpt.save(1, {"model": model, "optimizer": optimizer}).result()
            ckpt.resume({"model": again, "optimizer": resumed})
    kept, found = _kept(optimizer), _kept(resumed)
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in kept.items()}
    assert all(torch.equal(one, kept[name]) for name, one in found.items())


class App:
    """A Stateful as DCP's tutorial has it."""

    def __init__(self, model, optimizer, **options):
        self.of, self.options = (model, optimizer), StateDictOptions(**options)

    def state_dict(self):
        model, optimizer = get_state_dict(*self.of, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        named = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(*self.of, **named, options=self.options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("handed", ["app", "flattened", "functions"])
@pytest.mark.parametrize("door", ["Checkpointer", "dcp"])
def test_a_state_that_torchs_functions_will_round_is_a_warning_that_names_it(tmp_path, caplog, handed, door):
    """At the resume: what to hand over instead. State of the parameters' own type is none, nor are steps."""

    def states(make, steps, name):
        model, optimizer = _trained(make, torch.bfloat16, steps)
        if handed == "functions":
            found = get_state_dict(model, optimizer)
            return {f"{name}-model": found[0], f"{name}-optimizer": found[1]}
        return {name: App(model, optimizer, flatten_optimizer_state_dict=handed == "flattened")}

    for make, said in ((torch.optim.AdamW, []), (torch.optim.NAdam, ["mu_product"])):
        name = f"{make.__name__}-of-{handed}-{door}"
        if door == "dcp":
            dcp.save(states(make, 3, name), checkpoint_id=tmp_path / name)
            dcp.load(states(make, 1, name), checkpoint_id=tmp_path / name)
        else:
            with Checkpointer(tmp_path / name, CONFIG) as ckpt:
                ckpt.save(1, states(make, 3, name)).result()
                ckpt.resume(states(make, 1, name))
        found = [record.message for record in caplog.records if "rounds" in record.message]
        assert len(found) == len(said)
        assert all(f"weight.{key}" in text and "bias.step" not in text for key, text in zip(said, found, strict=True))


def test_parameters_of_another_type_take_the_state_with_them(tmp_path):
    """As torch does it: a model that is bfloat16 by now has moments of bfloat16."""
    model, optimizer = _trained(torch.optim.AdamW, torch.float32, 2)
    again, resumed = _trained(torch.optim.AdamW, torch.bfloat16, 0)
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}).result()
        ckpt.resume({"model": again, "optimizer": resumed})
    assert {one.dtype for (_, key), one in _kept(resumed).items() if key != "step"} == {torch.bfloat16}
