"""The parameters and the state after ten steps are bitwise those of the unsharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn

from shardopt.testing import run_ranks
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
    assert_same_params,
    ddp,
    full_state_dict,
    gradients,
    loss_of,
    make_model,
    sharded,
    train,
)

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam maximize": (torch.optim.Adam, {"lr": 0.001, "maximize": True}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "Adamax": (torch.optim.Adamax, {}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "ASGD": (torch.optim.ASGD, {}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@run_ranks(1, 2, 3)
def test_ten_steps_under_ddp_equal_the_unsharded_optimizer(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    reference = ddp(make_model(bias=name != "Muon"))
    plain = optimizer_class(reference.parameters(), **options)
    train(reference, plain, range(10))
    for bucket_view in (False, True):
        model = ddp(make_model(bias=name != "Muon"))
        zero = sharded(
            model.parameters(), optimizer_class, parameters_as_bucket_view=bucket_view, **options
        )
        train(model, zero, range(10))
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(1, 2, 3)
def test_sparse_adam_with_sparse_gradients_equals_the_unsharded_optimizer() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Embedding(20, 4, sparse=True), nn.Embedding(11, 3, sparse=True)])

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        index = torch.tensor([number % 11, 3, 3])
        sum(table(index).square().sum() for table in model).backward()
        optimizer.step()

    reference, model = make(), make()
    plain = torch.optim.SparseAdam(reference.parameters())
    zero = sharded(model.parameters(), torch.optim.SparseAdam)
    for number in range(10):
        step(reference, plain, number)
        step(model, zero, number)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize(
    "name",
    ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeReference"],
)
@run_ranks(1, 2, 3)
def test_schedule_free_trains_evaluates_and_goes_on_as_unsharded(name: str) -> None:
    optimizer_class = getattr(schedulefree, name)
    for bucket_view in (False, True):
        reference, model = ddp(make_model()), ddp(make_model())
        plain = optimizer_class(reference.parameters(), lr=0.02)
        zero = sharded(
            model.parameters(), optimizer_class, lr=0.02, parameters_as_bucket_view=bucket_view
        )
        for phase in (range(5), range(5, 10)):
            for trained, optimizer in ((reference, plain), (model, zero)):
                optimizer.train()
                train(trained, optimizer, phase)
            assert_same_params(model, reference)
            plain.eval()
            zero.eval()
            assert_same_params(model, reference)
        assert_replicas_equal(model.parameters())
        assert_equal(full_state_dict(zero), plain.state_dict())


def odd_params() -> list[nn.Parameter]:
    """Dtypes, shapes and memory formats side by side."""
    generator = torch.Generator().manual_seed(3)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = [
        values(9, 4),
        values(5, 3).to(torch.bfloat16),
        torch.complex(values(4), values(4)),
        values(),
        values(0, 3),
        values(6, 5).t(),
        values(2, 3, 4, 4).to(memory_format=torch.channels_last),
        values(3, 8)[:, ::2],
        values(7).double(),
        values(33).to(torch.bfloat16),
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "SGD momentum", "RMSprop", "Adagrad", "AdamW foreach"]
)
@run_ranks(1, 2, 3)
def test_mixed_dtypes_and_layouts_in_one_optimizer_equal_the_unsharded(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    reference = odd_params()
    plain = optimizer_class(reference, **options)
    for step in range(10):
        for param, gradient in zip(reference, gradients(reference, step), strict=True):
            param.grad = gradient
        plain.step()
    for bucket_view in (False, True):
        params = odd_params()
        zero = sharded(params, optimizer_class, parameters_as_bucket_view=bucket_view, **options)
        for step in range(10):
            for param, gradient in zip(params, gradients(params, step), strict=True):
                param.grad = gradient
            zero.step()
        assert_equal([p.detach() for p in params], [p.detach() for p in reference])
        assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, 3)
def test_params_keep_their_own_memory_and_format_without_bucket_view() -> None:
    params = odd_params()
    before = [(p.data_ptr(), p.stride()) for p in params]
    zero = sharded(params, torch.optim.SGD, lr=0.1)
    for param, gradient in zip(params, gradients(params, 0), strict=True):
        param.grad = gradient
    zero.step()
    assert [(p.data_ptr(), p.stride()) for p in params] == before


@run_ranks(2, 3)
def test_dense_params_keep_their_memory_format_as_bucket_views() -> None:
    params = odd_params()
    before = [p.stride() for p in params]
    sharded(params, torch.optim.SGD, lr=0.1, parameters_as_bucket_view=True)
    gapped = 7
    assert [p.stride() for i, p in enumerate(params) if i != gapped] == before[:gapped] + before[
        gapped + 1 :
    ]
    assert params[gapped].is_contiguous()


@run_ranks(1, 2, 3)
def test_frozen_unused_and_later_unfrozen_params_equal_the_unsharded() -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        first = next(model.parameters())
        for step in range(10):
            first.requires_grad_(step % 4 != 1)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step % 3 == 0:
                list(model.parameters())[2].grad = None
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
            optimizer.step()

    reference = make_model()
    run(reference, torch.optim.Adam(reference.parameters(), lr=0.01))
    for bucket_view in (False, True):
        model = make_model()
        run(
            model,
            sharded(
                model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=bucket_view
            ),
        )
        assert_same_params(model, reference)


@run_ranks(1, 2, 3)
def test_tied_params_equal_the_unsharded() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model

    reference, model = ddp(make()), ddp(make())
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(10))
    train(model, sharded(model.parameters(), torch.optim.AdamW, lr=0.01), range(10))
    assert_same_params(model, reference)


@run_ranks(3, 4)
def test_more_ranks_than_params() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 3)

    reference, model = ddp(make()), ddp(make())
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(reference, plain, range(10))
    train(model, zero, range(10))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(1, 2, 3)
def test_several_groups_with_options_of_their_own_equal_the_unsharded() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {
                "params": (p for n, p in model.named_parameters() if "weight" in n),
                "weight_decay": 0.1,
            },
            {
                "params": (p for n, p in model.named_parameters() if "bias" in n),
                "lr": 0.05,
                "betas": (0.8, 0.9),
            },
        ]

    reference, model = ddp(make_model()), ddp(make_model())
    plain = torch.optim.AdamW(groups(reference), lr=0.01)
    zero = sharded(groups(model), torch.optim.AdamW, lr=0.01)
    train(reference, plain, range(10))
    train(model, zero, range(10))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2)
def test_groups_of_ranks_train_apart() -> None:
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    params = [nn.Parameter(torch.ones(3))]
    zero = sharded(params, torch.optim.SGD, group, lr=1.0)
    params[0].grad = torch.full((3,), float(dist.get_rank()))
    zero.step()
    assert_equal(params[0].detach(), torch.full((3,), 1.0 - dist.get_rank()))


@run_ranks(3)
def test_a_subgroup_shards_among_its_own_ranks() -> None:
    ranks = [2, 0]
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return
    reference = ddp(make_model(), process_group=group)
    model = ddp(make_model(), process_group=group)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, group, lr=0.01)
    train(reference, plain, range(10))
    train(model, zero, range(10))
    assert_same_params(model, reference)
    zero.consolidate_state_dict(to=1)
    if dist.get_rank(group) == 1:
        assert_equal(zero.state_dict(), plain.state_dict())


@run_ranks(2)
def test_a_one_dimensional_device_mesh_is_taken_as_its_group() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    reference, model = ddp(make_model()), ddp(make_model())
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(3))
    train(model, sharded(model.parameters(), torch.optim.AdamW, mesh, lr=0.01), range(3))
    assert_same_params(model, reference)
