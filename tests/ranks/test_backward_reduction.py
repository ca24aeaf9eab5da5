"""Gradients are reduced while backward runs: whatever backward does, steps equal the unsharded optimizer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardopt.testing import run_ranks
from tests.ranks.averaging import (
    POLICIES,
    add_up_averages,
    assert_trains_alike,
    average_in_rank_order,
    backward_of_loss,
    train_sharded,
    train_unsharded,
)
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    batch,
    full_state_dict,
    loss_of,
    make_model,
    sharded,
)


class Branches(nn.Module):
    """Layers side by side, of which every forward chooses some, in an order that backward reverses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(6, width) for width in (9, 3, 17, 4, 11))

    def forward(self, inputs: Tensor, chosen: Sequence[int]) -> Tensor:
        return torch.cat([self.layers[number](inputs).tanh() for number in chosen], dim=1)


def branch_backward(model: nn.Module, step: int, chosen: Sequence[int]) -> None:
    model(batch(step), chosen).square().mean().backward()


@run_ranks(1, 2, 3)
def test_branches_chosen_by_step_and_rank_equal_the_unsharded() -> None:
    """Some layers are used on no rank, some on a few only, and some rest for several steps."""

    def backward(model: nn.Module, step: int) -> None:
        rank = dist.get_rank()
        chosen = [n for n in range(5) if (n + step // 2) % 4 and (n + rank + step) % 3]
        branch_backward(model, step, chosen)

    assert_trains_alike(Branches, backward, steps=range(12))


@run_ranks(1, 2, 3)
def test_gradients_that_arrive_in_another_order_on_each_rank_equal_the_unsharded() -> None:
    def backward(model: nn.Module, step: int) -> None:
        shift = step + dist.get_rank()
        branch_backward(model, step, [(n + shift) % 5 for n in range(5)][:: (-1) ** shift])

    assert_trains_alike(Branches, backward)


@run_ranks(1, 2, 3)
def test_params_frozen_and_unfrozen_at_any_time_equal_the_unsharded() -> None:
    """Layer 0 is frozen from the start and trained later, layer 1 the other way round, layer 2 now and then."""

    def make() -> nn.Module:
        model = make_model()
        model[0].requires_grad_(False)
        return model

    def backward(model: nn.Module, step: int) -> None:
        model[0].requires_grad_(step >= 3)
        model[2].requires_grad_(step < 5)
        model[4].requires_grad_(step % 3 != 1)
        backward_of_loss(model, step)

    assert_trains_alike(make, backward, steps=[0, 1, 2, 3, 4, 5, 6, 8, 9])


@run_ranks(1, 2, 3)
def test_params_frozen_between_backward_and_step_equal_the_unsharded() -> None:
    def backward(model: nn.Module, step: int) -> None:
        model.requires_grad_(True)
        backward_of_loss(model, step)
        model[2 * (step % 3)].requires_grad_(False)

    assert_trains_alike(make_model, backward)


@run_ranks(1, 2, 3)
def test_a_retained_graph_can_be_run_again_before_the_step() -> None:
    def backward(model: nn.Module, step: int) -> None:
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()

    def average_backward(model: nn.Module, step: int) -> None:
        loss = loss_of(model, step)
        again = [lambda: loss.backward(retain_graph=True)] * 2
        add_up_averages(model, again)

    assert_trains_alike(make_model, backward, average_backward=average_backward)


@run_ranks(1, 2, 3)
def test_backwards_over_other_params_each_add_up_before_the_step() -> None:
    """The second backward uses layers that the first did not, and the other way round."""

    def backwards(model: nn.Module, step: int) -> list[Any]:
        rank = dist.get_rank()
        return [
            lambda: branch_backward(model, step, [0, 1, 2]),
            lambda: branch_backward(model, step + 50, [4, 2, (rank + step) % 2]),
        ]

    def backward(model: nn.Module, step: int) -> None:
        for run in backwards(model, step):
            run()

    def average_backward(model: nn.Module, step: int) -> None:
        add_up_averages(model, backwards(model, step))

    assert_trains_alike(Branches, backward, average_backward=average_backward, steps=[0, 1, 3])


class Checkpointed(nn.Module):
    """Layers inside activation checkpoints; the first and the last stand outside unless ``is_wholly``."""

    def __init__(self, *, use_reentrant: bool, is_wholly: bool) -> None:
        super().__init__()
        self.layers = make_model()
        self.use_reentrant = use_reentrant
        self.is_wholly = is_wholly

    def _run(self, layers: nn.Module, inputs: Tensor) -> Tensor:
        return checkpoint(layers, inputs, use_reentrant=self.use_reentrant)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()  # a reentrant checkpoint has no gradient otherwise
        if self.is_wholly:
            return self._run(self.layers, inputs)
        return self.layers[3:](self._run(self.layers[1:3], self.layers[0](inputs)))


@pytest.mark.parametrize("is_wholly", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@run_ranks(1, 2, 3)
def test_activation_checkpoints_equal_the_unsharded(use_reentrant: bool, is_wholly: bool) -> None:
    assert_trains_alike(lambda: Checkpointed(use_reentrant=use_reentrant, is_wholly=is_wholly))


class CheckpointedTwice(nn.Module):
    """Layers that run inside a checkpoint and outside, or inside two: their gradients come in several pieces."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs)
        for _ in range(2):
            hidden = checkpoint(self.inner, hidden, use_reentrant=self.use_reentrant)
        return self.inner(self.outer(hidden))


@pytest.mark.parametrize("use_reentrant", [False, True])
@run_ranks(1, 2, 3)
def test_layers_used_inside_and_outside_of_checkpoints_equal_the_unsharded(
    use_reentrant: bool,
) -> None:
    """With small whole numbers, of which no sum rounds in any order; averages over 3 ranks are exact multiples of 3."""

    def make() -> nn.Module:
        model = CheckpointedTwice(use_reentrant=use_reentrant)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_((param * 5).round())
        return model

    def backward(model: nn.Module, step: int) -> None:
        inputs = (batch(step) * 2).round() * dist.get_world_size()
        (model(inputs).sum() * dist.get_world_size()).backward()

    assert_trains_alike(make, backward, steps=range(1), optimizer_class=torch.optim.SGD, lr=1.0)


@run_ranks(1, 2, 3)
def test_tied_weights_equal_the_unsharded() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model

    assert_trains_alike(make)


@run_ranks(1, 2, 3)
def test_gradients_of_another_memory_format_equal_the_unsharded() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        return model.to(memory_format=torch.channels_last)

    def backward(model: nn.Module, step: int) -> None:
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        model(inputs if step % 2 else inputs.contiguous()).square().mean().backward()

    assert_trains_alike(make, backward)


@run_ranks(1, 2, 3)
def test_groups_added_in_mid_training_equal_the_unsharded() -> None:
    def run(model: nn.Module, make: Any, train: Any) -> Any:
        first, second, *rest = list(model.parameters())
        optimizer = make([first, second])
        train(model, optimizer, range(3))
        model.zero_grad()
        optimizer.add_param_group({"params": rest, "lr": 0.05})
        train(model, optimizer, range(3, 6))
        return optimizer

    reference = make_model()
    plain = run(reference, lambda p: torch.optim.AdamW(p, lr=0.01), train_unsharded)
    for name, policy in POLICIES.items():
        model = make_model()
        zero = run(
            model, lambda p, o=policy: sharded(p, torch.optim.AdamW, lr=0.01, **o), train_sharded
        )
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict(), name)


@pytest.mark.timeout(600)
@run_ranks(1, 2, timeout=300.0)
def test_a_compiled_model_equals_the_unsharded() -> None:
    """Both compiled, by what leaves kernels as they are."""
    reference = make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    compiled = torch.compile(reference, backend="aot_eager")
    for step in range(3):
        plain.zero_grad()
        loss_of(compiled, step).backward()
        average_in_rank_order(reference)
        plain.step()
    for policy in ("by parameter", "by element, small buckets"):
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
        train_sharded(torch.compile(model, backend="aot_eager"), zero, range(3))
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict(), policy)
