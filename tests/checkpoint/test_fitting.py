"""What does not fit is refused, with the parameter, what was found and what was expected; nothing is loaded."""

import copy

import pytest
import torch

import shardopt
from shardopt import Sharding, StateMismatchError, ZeroRedundancyOptimizer

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1}),
    "RMSprop, centered": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


SAME = [("Adam", "AdamW, fused"), ("Adam", "RAdam")]
"""These keep the same state, under options of the same names."""


def make_params():
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (4,), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def stepped(optimizer, num_steps=2):
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def state_of(zero):
    zero.consolidate_state_dict()
    return copy.deepcopy(zero.state_dict())


def plain_state(name):
    optimizer_class, options = OPTIMIZERS[name]
    return stepped(optimizer_class(make_params(), **options)).state_dict()


def zero_of(name):
    optimizer_class, options = OPTIMIZERS[name]
    return stepped(ZeroRedundancyOptimizer(make_params(), optimizer_class, **options))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_the_same_optimizer_is_loaded(name):
    zero = zero_of(name)
    zero.load_state_dict(plain_state(name))
    stepped(zero)


@pytest.mark.parametrize("name", ["Adam", "SGD, momentum", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("other", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded(name, other):
    """But for classes that keep the same under the same options, whose state dicts cannot be told apart."""
    zero = zero_of(name)
    before = state_of(zero)
    same_class = OPTIMIZERS[name][0] is OPTIMIZERS[other][0]
    if same_class or (name, other) in SAME:
        return
    with pytest.raises(StateMismatchError, match="state of another optimizer"):
        zero.load_state_dict(plain_state(other))
    torch.testing.assert_close(state_of(zero), before, rtol=0, atol=0)
    stepped(zero)


def test_sgd_into_adam_says_what_is_missing():
    with pytest.raises(
        StateMismatchError, match=r"param group 0 has no option .* which Adam needs"
    ):
        zero_of("Adam").load_state_dict(plain_state("SGD"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda s: s["state"][0].pop("exp_avg_sq"),
            r"param 0: the state dict holds \['exp_avg', 's",
        ),
        (lambda s: s["state"][2].update(odd=torch.zeros(())), r"param 2: .*'odd'.*but Adam keeps"),
        (
            lambda s: s["state"].update({7: {}}),
            "state of parameter 7, which is in none of its param",
        ),
        (lambda s: s["param_groups"][0].pop("betas"), "group 0 has no option 'betas', which Adam"),
    ],
)
def test_missing_and_extra_entries_are_refused_unless_asked_for(change, text):
    zero = zero_of("Adam")
    before = state_of(zero)
    state = plain_state("Adam")
    change(state)
    with pytest.raises(StateMismatchError, match=text):
        zero.load_state_dict(state)
    torch.testing.assert_close(state_of(zero), before, rtol=0, atol=0)
    zero.load_state_dict(state, strict=False)


def test_a_parameter_that_had_no_gradient_has_no_state_and_that_is_fine():
    state = plain_state("Adam")
    del state["state"][1]
    zero = zero_of("Adam")
    zero.load_state_dict(state)
    assert set(state_of(zero)["state"]) == {0, 2}
    stepped(zero)


def test_options_of_the_state_dict_decide_what_is_expected():
    """An Adam without amsgrad takes the state of one with it, options included, as torch's does."""
    zero = zero_of("Adam")
    zero.load_state_dict(plain_state("Adam, amsgrad"))
    assert zero.param_groups[0]["amsgrad"] is True
    stepped(zero)


class Counting(torch.optim.Optimizer):
    """Keeps its own state, and more of it from the second step on."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    entry = self.state[param]
                    entry["count"] = entry.get("count", 0) + 1
                    if entry["count"] > 1:
                        entry["slow"] = param.clone()
                    param -= group["lr"] * param.grad


def test_classes_that_are_not_the_frameworks_may_keep_more_than_they_began_with():
    zero = stepped(ZeroRedundancyOptimizer(make_params(), Counting))
    state = state_of(zero)
    other = ZeroRedundancyOptimizer(make_params(), Counting)
    other.load_state_dict(state)
    torch.testing.assert_close(state_of(other), state, rtol=0, atol=0)
    with pytest.raises(StateMismatchError, match=r"but Counting keeps \['count'\]"):
        other.load_state_dict(plain_state("SGD, momentum"))


class Refusing(Counting):
    """Cannot be made from a second list of parameters."""

    num_made = 0

    def __init__(self, params):
        type(self).num_made += 1
        if type(self).num_made > 1:
            raise RuntimeError("there can be only one")
        super().__init__(params)


def test_a_class_that_cannot_be_asked_is_not_checked():
    zero = stepped(ZeroRedundancyOptimizer(make_params(), Refusing))
    zero.load_state_dict(state_of(zero))


@pytest.mark.parametrize("granularity", ["parameter", "element"])
def test_master_weights_are_no_extra_entry(granularity):
    def make():
        params = [torch.nn.Parameter(p.detach().to(torch.bfloat16)) for p in make_params()]
        return ZeroRedundancyOptimizer(
            params,
            torch.optim.Adam,
            parameters_as_bucket_view=True,
            sharding=Sharding(master_dtype=torch.float32, granularity=granularity),
        )

    state = state_of(stepped(make()))
    assert "master_weight" in state["state"][0]
    other = make()
    other.load_state_dict(state)
    torch.testing.assert_close(state_of(other), state, rtol=0, atol=0)


def test_files_are_checked_in_the_same_way(tmp_path):
    sgd = zero_of("SGD, momentum")
    sgd.save(tmp_path / "folder")
    sgd.save_full(tmp_path / "full.safetensors")
    torch.save(plain_state("SGD"), tmp_path / "plain.pt")
    zero = zero_of("Adam")
    before = state_of(zero)
    for load in (
        lambda: zero.load(tmp_path / "folder"),
        lambda: zero.load(tmp_path / "full.safetensors"),
        lambda: zero.load_full(tmp_path / "full.safetensors"),
        lambda: zero.load_full(tmp_path / "plain.pt"),
    ):
        with pytest.raises(shardopt.StateMismatchError, match="state of another optimizer"):
            load()
    torch.testing.assert_close(state_of(zero), before, rtol=0, atol=0)
