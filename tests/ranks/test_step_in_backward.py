"""Sharding(step_in_backward=True): each bucket is updated in backward, and comes out as it would at the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from shardopt import OverlapError, Sharding
from shardopt.testing import run_ranks
from tests.ranks.averaging import (
    POLICIES,
    assert_trains_alike,
    average_in_rank_order,
    backward_of_loss,
    train_sharded,
    train_unsharded,
    with_sharding,
)
from tests.ranks.test_backward_reduction import Branches, branch_backward
from tests.ranks.test_equality import OPTIMIZERS
from tests.ranks.traffic import counted
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
    assert_same_params,
    batch,
    full_state_dict,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
)

IN_BACKWARD = {
    name: with_sharding(policy, step_in_backward=True) for name, policy in POLICIES.items()
}


def _by_parameter(model: nn.Module, optimizer_class: Any = torch.optim.SGD, **options: Any) -> Any:
    return sharded(
        model.parameters(), optimizer_class, **{"lr": 0.1, **options}, **IN_BACKWARD["by parameter"]
    )


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW fused", "AdamW foreach", "NAdam", "RMSprop", "SGD momentum"]
)
@run_ranks(1, 2, 3)
def test_ten_steps_equal_the_unsharded_optimizer(name: str) -> None:
    """Foreach kernels round otherwise on parts of tensors, so they are tried by parameter only."""
    optimizer_class, options = OPTIMIZERS[name]
    policies = {n: p for n, p in IN_BACKWARD.items() if "foreach" not in name or "element" not in n}
    assert_trains_alike(
        make_model,
        steps=range(10),
        policies=policies,
        optimizer_class=optimizer_class,
        **options,
    )


@run_ranks(1, 2, 3)
def test_muon_on_whole_matrices_equals_the_unsharded_optimizer() -> None:
    policies = {name: p for name, p in IN_BACKWARD.items() if "element" not in name}
    assert_trains_alike(
        lambda: make_model(bias=False),
        policies=policies,
        optimizer_class=torch.optim.Muon,
        lr=0.01,
    )


@run_ranks(1, 2, 3)
def test_schedules_and_options_set_by_hand_take_effect_in_the_next_backward() -> None:
    def run(model: nn.Module, optimizer: Any, train: Any) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        for step in range(8):
            train(model, optimizer, [step])
            schedule.step()
            if step == 5:
                optimizer.param_groups[0]["weight_decay"] = 0.3

    reference = make_model()
    run(reference, torch.optim.AdamW(reference.parameters()), train_unsharded)
    for policy in IN_BACKWARD.values():
        model = make_model()
        run(model, sharded(model.parameters(), torch.optim.AdamW, **policy), train_sharded)
        assert_same_params(model, reference)


@run_ranks(1, 2, 3)
def test_all_but_the_last_backward_of_a_step_stand_under_no_sync() -> None:
    reference = make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)

    def micro(model: nn.Module, number: int) -> None:
        model(batch(number)).square().mean().backward()

    train_unsharded(
        reference, plain, range(3), lambda m, s: [micro(m, 3 * s + i) for i in range(3)]
    )
    for name, policy in IN_BACKWARD.items():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy)
        for step in range(3):
            with zero.no_sync():
                micro(model, 3 * step)
                micro(model, 3 * step + 1)
            micro(model, 3 * step + 2)
            zero.step()
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict(), name)


@run_ranks(1, 2, 3)
def test_params_unused_on_some_ranks_or_on_all_equal_the_unsharded() -> None:
    def backward(model: nn.Module, step: int) -> None:
        rank = dist.get_rank()
        chosen = [n for n in range(5) if (n + step // 2) % 4 and (n + rank + step) % 3]
        branch_backward(model, step, chosen[:: (-1) ** (step + rank)])

    assert_trains_alike(Branches, backward, steps=range(12), policies=IN_BACKWARD)


@run_ranks(1, 2, 3)
def test_params_frozen_and_unfrozen_at_any_time_equal_the_unsharded() -> None:
    def make() -> nn.Module:
        model = make_model()
        model[0].requires_grad_(False)
        return model

    def backward(model: nn.Module, step: int) -> None:
        model[0].requires_grad_(step >= 3)
        model[2].requires_grad_(step < 5)
        backward_of_loss(model, step)

    assert_trains_alike(make, backward, steps=range(7), policies=IN_BACKWARD)


@run_ranks(2, 3)
def test_the_update_and_its_exchange_are_made_when_backward_returns() -> None:
    reference = make_model()
    train_unsharded(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(2))
    for policy in IN_BACKWARD.values():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy)
        loss_of(model, 0).backward()
        zero.step()
        loss_of(model, 1).backward()
        assert_same_params(model, reference)
        with counted() as traffic:
            zero.step()
        assert traffic.messages == []


@run_ranks(1, 2, 3)
def test_step_hooks_fire_once_per_step_with_the_whole_optimizer() -> None:
    for policy in IN_BACKWARD.values():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **policy)
        before = [p.detach().clone() for p in model.parameters()]
        seen: list[Any] = []

        def note(name: str, seen: Any = seen, model: Any = model) -> Any:
            values = [p.detach().clone() for p in model.parameters()]
            return lambda optimizer, *_: seen.append((name, optimizer, values))

        zero.register_step_pre_hook(lambda o, *_, s=seen: s.append(("before", o)))
        zero.register_step_post_hook(lambda o, *_, s=seen: s.append(("after", o)))
        ends: list[Any] = []
        zero.register_step_post_hook(
            lambda *_, e=ends, m=model: e.append([p.detach().clone() for p in m.parameters()])
        )
        loss_of(model, 0).backward()
        zero.step()
        assert seen == [("before", zero), ("after", zero)]
        assert_equal(ends, [[p.detach() for p in model.parameters()]])
        assert any(not torch.equal(a, b) for a, b in zip(before, ends[0], strict=True))


@run_ranks(1, 2, 3)
def test_a_closure_runs_backward_and_its_loss_is_returned() -> None:
    reference, model = make_model(), make_model()
    train_unsharded(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(1))
    zero = _by_parameter(model)

    def closure() -> Any:
        loss = loss_of(model, 0)
        loss.backward()
        return loss.detach()

    assert_equal(zero.step(closure), loss_of(make_model(), 0).detach())
    assert_same_params(model, reference)


@run_ranks(1, 2, 3)
def test_several_backwards_or_none_per_step_raise_on_every_rank() -> None:
    for policy in IN_BACKWARD.values():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **policy)
        texts = raises_everywhere(zero.step)
        assert all("no update happened in backward since the last one" in t for t in texts)
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        texts = raises_everywhere(zero.step)
        assert all(
            t.startswith("OverlapError: 2 updates were made in backward since") for t in texts
        )
        assert_replicas_equal(model.parameters())
        loss_of(model, 2).backward()
        zero.step()


@run_ranks(1, 2, 3)
def test_clipping_and_scaling_raise_on_every_rank() -> None:
    model = make_model()
    zero = _by_parameter(model)
    for clip in (
        lambda: zero.clip_grad_norm_(1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ):
        loss_of(model, 0).backward()
        texts = raises_everywhere(clip)
        assert all("OverlapError: gradients were changed between backward and" in t for t in texts)
        zero.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for action in (scaler.unscale_, scaler.step):
        scaler.scale(loss_of(model, 1)).backward()
        texts = raises_everywhere(lambda a=action: a(zero))
        assert all(t.startswith("OverlapError") for t in texts)
        zero.step()
    assert_replicas_equal(model.parameters())


class _Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if getattr(self, "fails", False):
            raise FloatingPointError("it went wrong")
        return result


def _known_as_separable() -> Any:
    """Let a class of these tests pass for one that updates each parameter on its own, as it does."""
    from dataclasses import replace
    from unittest import mock

    from shardopt import ZeroRedundancyOptimizer

    framework = replace(ZeroRedundancyOptimizer.framework, is_separable=lambda _: True)
    return mock.patch.object(ZeroRedundancyOptimizer, "framework", framework)


@run_ranks(2, 3)
def test_rates_that_differ_between_ranks_raise_at_the_step_of_all_and_update_nothing() -> None:
    for policy in IN_BACKWARD.values():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **policy)
        before = [p.detach().clone() for p in model.parameters()]
        zero.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        loss_of(model, 0).backward()
        texts = raises_everywhere(zero.step)
        assert all("first difference at option 'lr' of group 0: 0.2 on rank 1" in t for t in texts)
        assert_equal([p.detach() for p in model.parameters()], before)
        zero.param_groups[0]["lr"] = 0.1
        reference = make_model()
        train_unsharded(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(1))
        train_sharded(model, zero, range(1))
        assert_same_params(model, reference)


@run_ranks(2)
def test_what_cannot_be_combined_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="says how gradients are reduced, which DDP does unless"):
        Sharding(step_in_backward=True)
    zero = _by_parameter(model)
    with pytest.raises(OverlapError, match="Join cannot be combined with steps in backward"):
        Join([zero])
    loss_of(model, 0).backward()
    with pytest.raises(OverlapError, match=r"\['note'\] come too late"):
        zero.step(note=1)


@run_ranks(1, 2, 3)
def test_an_exception_in_backward_on_all_ranks_leaves_equal_replicas_and_a_working_optimizer() -> (
    None
):
    """What had been reduced may have been updated with; the next step is as from there."""

    def fail(gradient: Any) -> None:
        raise ArithmeticError("in backward")

    for name, policy in IN_BACKWARD.items():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **policy)
        hidden = model[:2](batch(0)) * 1.0
        hidden.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model[2:](hidden).square().mean().backward()
        zero.zero_grad()
        raises_everywhere(zero.step)
        assert_replicas_equal(model.parameters())
        reference = make_model()
        reference.load_state_dict(model.state_dict())
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        loss_of(reference, 1).backward()
        average_in_rank_order(reference)
        plain.step()
        loss_of(model, 1).backward()
        assert set(raises_everywhere(zero.step)) == {""}, name
        assert_same_params(model, reference)
