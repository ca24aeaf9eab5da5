"""attach(): parameters travel while the program goes on, and each forward waits for those it needs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from shardopt import Sharding
from shardopt.testing import run_ranks
from tests.ranks.arrivals import arriving_when_awaited
from tests.ranks.averaging import (
    POLICIES,
    average_in_rank_order,
    train_unsharded,
    with_sharding,
)
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    batch,
    ddp,
    full_state_dict,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
    train,
)

VIEWS: dict[str, dict[str, Any]] = {
    name: {**with_sharding(p, shared_memory=False), "parameters_as_bucket_view": True}
    for name, p in POLICIES.items()
    if "network" not in name
}
"""Over the network, where parameters travel by themselves; and through shared memory, where a step waits for them."""
VIEWS["by element, shared"] = POLICIES["by element"]


class Tied(nn.Module):
    """A weight that is used by its module, by another that shares it, and without any module being called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(9, 6)
        self.body = make_model()
        self.back = nn.Linear(3, 6)
        self.twin = nn.Linear(6, 9, bias=False)
        self.twin.weight = self.embedding.weight
        self.spare = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        tokens = (inputs[:, 0] * 2).long() % 9
        hidden = self.back(self.body(inputs + self.embedding(tokens))) * self.scale
        if step % 3 == 1:
            hidden = hidden + self.spare(hidden)
        if step % 2:
            return self.twin(hidden)
        return F.linear(hidden, self.embedding.weight)


class Uncalled(nn.Module):
    """Weights of submodules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        hidden = F.linear(inputs, self.first.weight, self.first.bias).tanh()
        return F.linear(hidden, self.second.weight, self.second.bias)


def _backward(model: nn.Module, step: int) -> None:
    model(batch(step), step).square().mean().backward()


@pytest.mark.parametrize("make", [Tied, Uncalled])
@pytest.mark.parametrize("in_backward", [False, True])
@run_ranks(1, 2, 3)
def test_training_equals_the_unsharded_whichever_modules_are_called(
    make: Any, in_backward: bool
) -> None:
    reference = make()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train_unsharded(reference, plain, range(8), _backward)
    for name, policy in VIEWS.items():
        model = make()
        policy = with_sharding(policy, step_in_backward=in_backward)
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy)
        zero.attach(model)
        for step in range(8):
            _backward(model, step)
            zero.step()
        zero.wait()
        assert_equal([p.detach() for p in model.parameters()], [*_values(reference)], name)
        assert_equal(full_state_dict(zero), plain.state_dict(), name)


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


@run_ranks(1, 2, 3)
def test_training_under_ddp_equals_the_unsharded() -> None:
    for policy in ({}, {"sharding": POLICIES["by element, small buckets"]["sharding"]}):
        options = dict(policy)
        if policy:
            options = with_sharding(policy, gradients=False)
        reference, model = ddp(make_model()), ddp(make_model())
        plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
        zero = sharded(
            model.parameters(),
            torch.optim.AdamW,
            lr=0.01,
            parameters_as_bucket_view=True,
            **options,
        )
        zero.attach(model.module)
        train(reference, plain, range(6))
        train(model, zero, range(6))
        zero.wait()
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(1, 2, 3)
def test_a_state_dict_right_after_the_step_is_complete_and_so_is_an_evaluation() -> None:
    reference = make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    models = {name: make_model() for name in VIEWS}
    zeros = {
        name: sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **VIEWS[name])
        for name, model in models.items()
    }
    for name, zero in zeros.items():
        zero.attach(models[name])
    for step in range(4):
        train_unsharded(reference, plain, [step])
        for name, model in models.items():
            with arriving_when_awaited():
                loss_of(model, step).backward()
                zeros[name].step()
            if step == 1:
                assert_equal(dict(model.state_dict()), dict(reference.state_dict()), name)
            elif step == 2:
                with torch.no_grad():
                    assert_equal(model.eval()(batch(90)), reference(batch(90)), name)
                assert_same_params(model.train(), reference)
            elif step == 3:
                assert_equal(dict(model[2].state_dict()), dict(reference[2].state_dict()), name)
                zeros[name].wait()
                assert_same_params(model, reference)


@run_ranks(2, 3)
def test_a_step_returns_while_parameters_travel_once_a_forward_was_seen() -> None:
    model = make_model()
    zero = sharded(
        model.parameters(), torch.optim.SGD, lr=0.1, **VIEWS["by element, small buckets"]
    )
    zero.attach(model)
    for step in range(3):
        loss_of(model, step).backward()
        versions = [p._version for p in model.parameters()]
        zero.step()
        zero.wait()
        assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
        assert zero._pieces.stepper._awaits_exchange is False


@run_ranks(2, 3)
def test_a_weight_that_a_forward_reads_without_calling_its_module_at_last_raises_in_backward() -> (
    None
):
    """Its module was called in the first forward, so nothing waits for it; autograd notices that it came too late."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = make_model()
            self.last = nn.Linear(3, 3)
            self.calls = True

        def forward(self, inputs: Tensor) -> Tensor:
            weight = self.last.weight
            if self.calls:
                return self.last(self.layers(inputs))
            hidden = F.linear(inputs[:, :3].clone().requires_grad_(), weight)
            return self.layers(torch.cat([hidden, hidden], dim=1))

    model = Fickle()
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **VIEWS["by parameter"])
    zero.attach(model)
    loss_of(model, 0).backward()
    zero.step()
    loss_of(model, 1).backward()
    zero.step()
    model.calls = False
    loss = model.last.weight.sum() * 0 + loss_of(model, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@run_ranks(1, 2, 3)
def test_buffers_are_made_those_of_the_first_rank_if_asked_for() -> None:
    for broadcasts in (False, True):
        rank = dist.get_rank()
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        model.register_buffer("odd", torch.full((2, 3), float(rank)).t())
        model.register_buffer("flag", torch.tensor(rank == 0))
        model.register_buffer("none", None)
        model.register_buffer("empty", torch.zeros(0))
        model[0].running_mean.fill_(rank)
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **VIEWS["by element"])
        zero.attach(model, broadcast_buffers=broadcasts)
        value = 0.0 if broadcasts else float(rank)
        assert_equal(model[0].running_mean, torch.full((6,), value))
        assert_equal(model.odd, torch.full((2, 3), value).t())
        assert bool(model.flag) is (broadcasts or rank == 0)


@run_ranks(2, 3)
def test_modules_with_other_buffers_on_another_rank_are_refused_on_all() -> None:
    model = make_model()
    model.register_buffer("table", torch.zeros(3 + (dist.get_rank() == 1)))
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **VIEWS["by element"])
    texts = raises_everywhere(lambda: zero.attach(model, broadcast_buffers=True))
    assert all("every rank must attach the same module" in t for t in texts)
    assert all("buffer 'table'" in t for t in texts)


@run_ranks(2)
def test_attaching_is_refused_without_views_or_with_overlap() -> None:
    for options in (
        {},
        POLICIES["by parameter"],
        {"overlap_with_ddp": True},
    ):
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **options)
        with pytest.raises(ValueError, match="pass parameters_as_bucket_view=True"):
            zero.attach(model)


@run_ranks(1, 2, 3)
def test_a_part_of_a_model_and_several_parts_can_be_attached() -> None:
    """What is not attached has no hooks that wait, so ``wait()`` is called before the forward."""
    reference = make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train_unsharded(reference, plain, range(4))
    for parts in ([0, 2, 4], [2]):
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **VIEWS["by element"])
        for part in parts:
            zero.attach(model[part])
        for step in range(4):
            zero.wait()
            loss_of(model, step).backward()
            zero.step()
        zero.wait()
        assert_same_params(model, reference)


@run_ranks(1, 2, 3)
def test_a_compiled_part_waits_for_all_it_holds() -> None:
    reference = make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train_unsharded(reference, plain, range(3))
    model = make_model()
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **VIEWS["by element"])
    compiled = torch.compile(model, backend="eager")
    zero.attach(compiled)
    for step in range(3):
        loss_of(compiled, step).backward()
        zero.step()
    zero.wait()
    assert_same_params(model, reference)
    loss_of(model, 9).backward()
    average_in_rank_order([])


@run_ranks(1, 2)
def test_an_attached_module_can_be_copied() -> None:
    """For a moving average of parameters, say; the copy computes on its own."""
    model = make_model()
    zero = sharded(
        model.parameters(),
        torch.optim.SGD,
        lr=0.1,
        parameters_as_bucket_view=True,
        sharding=Sharding(gradients=True),
    )
    zero.attach(model)
    train(model, zero, range(3))
    zero.wait()
    copied = copy.deepcopy(model)
    expected = [param.detach().clone() for param in model.parameters()]
    train(model, zero, range(3, 5))
    assert_equal([param.detach() for param in copied.parameters()], expected)
    assert not any(
        p.data_ptr() == q.data_ptr()
        for p, q in zip(copied.parameters(), model.parameters(), strict=True)
    )
    copied(batch(0))
