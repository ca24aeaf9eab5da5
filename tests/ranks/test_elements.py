"""Element granularity: equal sections of flat buckets, and still the unsharded optimizer's results and state dicts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import Sharding
from shardopt.testing import run_ranks
from tests.ranks.test_equality import OPTIMIZERS, odd_params
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    ddp,
    full_state_dict,
    gradients,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
    train,
)

ELEMENTWISE = [
    name
    for name in OPTIMIZERS
    if name.split()[0] not in ("Adafactor", "Muon") and "foreach" not in name
]
BY_ELEMENT = Sharding(granularity="element")


def by_element(params: Any, optimizer_class: Any, **options: Any) -> Any:
    return sharded(
        params,
        optimizer_class,
        **{"sharding": BY_ELEMENT, **options},
        parameters_as_bucket_view=True,
    )


@pytest.mark.parametrize("name", ELEMENTWISE)
@run_ranks(1, 2, 3)
def test_ten_steps_under_ddp_equal_the_unsharded_optimizer(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    reference, model = ddp(make_model()), ddp(make_model())
    plain = optimizer_class(reference.parameters(), **options)
    zero = by_element(model.parameters(), optimizer_class, **options)
    train(reference, plain, range(10))
    train(model, zero, range(10))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("name", ["Adam", "SGD momentum"])
@run_ranks(1, 2, 3)
def test_mixed_dtypes_and_layouts_equal_the_unsharded(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    reference, params = odd_params(), odd_params()
    plain = optimizer_class(reference, **options)
    zero = by_element(params, optimizer_class, **options)
    for step in range(10):
        for group, optimizer in ((reference, plain), (params, zero)):
            for param, gradient in zip(group, gradients(group, step), strict=True):
                param.grad = gradient
            optimizer.step()
    assert_equal([p.detach() for p in params], [p.detach() for p in reference])
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, 3)
def test_one_large_param_is_divided_evenly_among_ranks() -> None:
    params = [nn.Parameter(torch.ones(n)) for n in (100_000, 3, 5)]
    for param in params:
        param.grad = torch.ones_like(param)
    zero = by_element(params, torch.optim.Adam)
    zero.step()
    total = 2 * sum(p.numel() for p in params)
    mine = sum(t.numel() for entry in zero.optim.state.values() for t in entry.values())
    assert mine <= 1.01 * total / dist.get_world_size()


@run_ranks(1, 2, 3)
def test_params_without_gradient_are_left_alone() -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            list(model.parameters())[step % 3].grad = None
            optimizer.step()

    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = by_element(model.parameters(), torch.optim.AdamW, lr=0.01)
    run(reference, plain)
    run(model, zero)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, 3)
def test_groups_added_in_training_and_schedules_equal_the_unsharded() -> None:
    def run(model: nn.Module, make: Any) -> Any:
        first, *rest = list(model.named_parameters())
        optimizer = make([first])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": rest, "lr": 0.05})
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            model.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            schedule.step()
        return optimizer

    reference, model = ddp(make_model()), ddp(make_model())
    plain = run(reference, lambda p: torch.optim.AdamW(p, lr=0.01))
    zero = run(model, lambda p: by_element(p, torch.optim.AdamW, lr=0.01))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("name", ["Adam amsgrad", "NAdam", "ASGD", "Rprop", "SGD momentum"])
@run_ranks(3)
def test_state_moves_between_granularities_and_world_sizes(name: str) -> None:
    """By element at 3 ranks -> by parameter at 3 -> unsharded -> by element at 1 -> by element at 3."""
    optimizer_class, options = OPTIMIZERS[name]
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]

    def make() -> list[nn.Parameter]:
        return [p.detach().clone().requires_grad_() for p in make_model().parameters()]

    makers = [
        lambda p: by_element(p, optimizer_class, **options),
        lambda p: sharded(p, optimizer_class, **options),
        lambda p: optimizer_class(p, **options),
        lambda p: by_element(p, optimizer_class, process_group=alone, **options),
        lambda p: by_element(p, optimizer_class, **options),
    ]
    reference, params = make(), make()
    plain = optimizer_class(reference, **options)
    state: Any = None
    for number, maker in enumerate(makers):
        optimizer = maker(params)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        for group, stepped in ((reference, plain), (params, optimizer)):
            for param, gradient in zip(group, gradients(group, number), strict=True):
                param.grad = gradient
            stepped.step()
        if number == 3:
            optimizer.consolidate_state_dict()
            state = optimizer.state_dict()
        else:
            state = full_state_dict(optimizer) if number != 2 else optimizer.state_dict()
        assert_equal([p.detach() for p in params], [p.detach() for p in reference])
        assert_equal(state, plain.state_dict())


class _Mine(torch.optim.SGD):
    pass


@run_ranks(2)
def test_an_optimizer_not_known_to_be_elementwise_is_refused_by_name_unless_vouched_for() -> None:
    vouched = Sharding(granularity="element", elementwise=True)
    texts = raises_everywhere(lambda: by_element([nn.Parameter(torch.ones(4, 4))], _Mine))
    assert all("_Mine is not known to update every element on its own" in t for t in texts)
    assert all("use granularity='parameter', or vouch for it with " in t for t in texts)
    assert all("Sharding(elementwise=True)" in t for t in texts)
    reference, model = ddp(make_model()), ddp(make_model())
    plain = _Mine(reference.parameters(), lr=0.1, momentum=0.9)
    zero = by_element(model.parameters(), _Mine, lr=0.1, momentum=0.9, sharding=vouched)
    train(reference, plain, range(3))
    train(model, zero, range(3))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2)
def test_an_optimizer_known_to_look_at_whole_params_is_refused_even_if_vouched_for() -> None:
    for optimizer_class in (torch.optim.Adafactor, torch.optim.Muon):
        for elementwise in (False, True):
            sharding = Sharding(granularity="element", elementwise=elementwise)
            texts = raises_everywhere(
                lambda c=optimizer_class, s=sharding: by_element(
                    [nn.Parameter(torch.ones(4, 4))], c, sharding=s
                )
            )
            name = optimizer_class.__name__
            assert all(f"{name} looks at whole parameters" in t for t in texts)
            assert all(t.endswith("use granularity='parameter'") for t in texts)


@run_ranks(2)
def test_element_granularity_without_views_is_refused() -> None:
    with pytest.raises(ValueError, match="pass parameters_as_bucket_view=True"):
        sharded([nn.Parameter(torch.ones(4))], torch.optim.SGD, sharding=BY_ELEMENT)


@run_ranks(2)
def test_overlap_with_ddp_excludes_element_granularity() -> None:
    with pytest.raises(ValueError, match="overlap_with_ddp=True steps whole parameters"):
        by_element([nn.Parameter(torch.ones(4))], torch.optim.SGD, overlap_with_ddp=True)
