"""step(): options, closures, hooks, failures, views, loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import ParameterChangedError
from shardopt.testing import run_ranks
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
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


def _with_gradients(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@run_ranks(1, 2, 3)
def test_schedulers_and_rates_set_by_hand_take_effect_at_the_next_step() -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)

        def after(step: int) -> None:
            schedule.step()
            if step == 5:
                optimizer.param_groups[0]["weight_decay"] = 0.3

        train(model, optimizer, range(10), after)

    reference, model = ddp(make_model()), ddp(make_model())
    run(reference, torch.optim.AdamW(reference.parameters()))
    run(model, sharded(model.parameters(), torch.optim.AdamW))
    assert_same_params(model, reference)


@run_ranks(2, 3)
def test_a_tensor_rate_changed_in_place_takes_effect() -> None:
    params = _with_gradients((3,), (4,), (5,))
    rate = torch.tensor(1.0)
    zero = sharded(params, torch.optim.SGD, lr=rate)
    rate.fill_(0.25)
    zero.step()
    assert all(torch.equal(p.detach(), torch.full_like(p, 0.75)) for p in params)


@run_ranks(2, 3)
def test_rates_that_differ_between_ranks_raise_everywhere_and_update_nothing() -> None:
    params = _with_gradients((3,), (4,))
    zero = sharded(params, torch.optim.SGD, lr=0.1)
    zero.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    texts = raises_everywhere(zero.step)
    assert all(
        "options differ between ranks; set learning rates and schedules alike: rank 1 was given other things than "
        "rank 0; first difference at option 'lr' of group 0: 0.2 on rank 1, 0.1 on rank 0" in t
        for t in texts
    )
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in params)


class _CountsInGroup(torch.optim.SGD):
    """Keeps an option of its own, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@run_ranks(1, 2, 3)
def test_options_that_the_wrapped_optimizer_keeps_in_its_groups_survive() -> None:
    params = _with_gradients((3,), (4,))
    zero = sharded(params, _CountsInGroup, lr=0.1)
    for _ in range(3):
        zero.step()
    assert zero.param_groups[0]["count"] == zero.optim.param_groups[0]["count"] == 3


@run_ranks(1, 2, 3)
def test_a_closure_is_evaluated_once_and_its_loss_returned() -> None:
    def run(model: nn.Module, optimizer: Any, losses: list[Tensor], calls: list[int]) -> None:
        for step in range(5):

            def closure(step: int = step) -> Tensor:
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())

    reference, model = ddp(make_model()), ddp(make_model())
    expected: list[Tensor] = []
    losses: list[Tensor] = []
    calls: list[int] = []
    run(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), expected, [])
    run(model, sharded(model.parameters(), torch.optim.AdamW, lr=0.01), losses, calls)
    assert_equal(losses, expected)
    assert calls == [0, 1, 2, 3, 4]
    assert_same_params(model, reference)


class _ClosureTwice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class _MovesBeforeClosure(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer_class", "text"),
    [
        (_ClosureTwice, "evaluates the closure more than once"),
        (_MovesBeforeClosure, "changes parameters before"),
    ],
)
@run_ranks(1, 2, 3)
def test_an_optimizer_that_would_see_unequal_replicas_in_its_closure_is_stopped_everywhere(
    optimizer_class: Any, text: str
) -> None:
    params = _with_gradients((3,), (4,), (5,))
    zero = sharded(params, optimizer_class, lr=0.1)
    texts = raises_everywhere(lambda: zero.step(lambda: torch.tensor(0.0)))
    assert all(text in t for t in texts)
    assert_replicas_equal(params)


class _TakesKeyword(torch.optim.SGD):
    def step(self, closure: Any = None, *, note: list[int] | None = None) -> Any:
        assert note is not None
        note.append(5)
        return super().step(closure)


@run_ranks(1, 2)
def test_extra_keywords_reach_the_wrapped_optimizer_as_they_are() -> None:
    note: list[int] = []
    sharded(_with_gradients((3,)), _TakesKeyword, lr=0.1).step(note=note)
    assert note == [5]


class _TakesNothing(torch.optim.SGD):
    def step(self) -> Any:
        return super().step()


@run_ranks(1, 2)
def test_an_optimizer_without_closure_argument_works() -> None:
    params = _with_gradients((1,))
    sharded(params, _TakesNothing, lr=0.25).step()
    assert params[0].item() == 0.75


@run_ranks(1, 2, 3)
def test_step_hooks_fire_once_and_the_post_hook_sees_synced_params() -> None:
    params = _with_gradients((3,), (4,), (5,))
    zero = sharded(params, torch.optim.SGD, lr=0.5)
    seen: list[Any] = []
    zero.register_step_pre_hook(lambda *_: seen.append([p.detach().mean().item() for p in params]))
    zero.register_step_post_hook(lambda *_: seen.append([p.detach().mean().item() for p in params]))
    zero.step()
    assert seen == [[1.0] * 3, [0.5] * 3]


@run_ranks(1, 2)
def test_the_profiler_label_carries_the_name_of_the_class() -> None:
    zero = sharded(_with_gradients((3,)), torch.optim.SGD, lr=0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        zero.step()
    labels = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#ZeroRedundancyOptimizer.step" in labels


class _Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if any(param.numel() == 4 for group in self.param_groups for param in group["params"]):
            raise FloatingPointError("it went wrong")
        return result


@run_ranks(2, 3)
def test_an_exception_in_one_ranks_update_raises_on_every_rank_and_leaves_equal_replicas() -> None:
    for view in (False, True):
        params = _with_gradients((5,), (4,), (3,))
        zero = sharded(params, _Fails, lr=0.5, parameters_as_bucket_view=view)
        texts = raises_everywhere(zero.step)
        assert texts[1] == "FloatingPointError: it went wrong"
        expected = "RemoteRankError: the local optimizer's step() failed on another rank; rank 1: FloatingPointError: it went wrong"
        assert [t for r, t in enumerate(texts) if r != 1] == [expected] * (len(texts) - 1)
        assert_replicas_equal(params)


@run_ranks(1, 2, 3)
def test_replaced_data_is_taken_into_the_buckets_again() -> None:
    reference, model = ddp(make_model()), ddp(make_model())
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True)
    for phase in range(3):
        train(reference, plain, range(2 * phase, 2 * phase + 2))
        train(model, zero, range(2 * phase, 2 * phase + 2))
        assert_same_params(model, reference)
        for trained in (reference, model):
            for param in trained.parameters():
                param.data = param.data * 0.9


@run_ranks(1, 2, 3)
def test_a_changed_dtype_raises_everywhere_and_names_the_param() -> None:
    for view in (False, True):
        model = make_model()
        zero = sharded(model.named_parameters(), torch.optim.AdamW, parameters_as_bucket_view=view)
        if dist.get_rank() == dist.get_world_size() - 1:
            model.to(torch.bfloat16)
        texts = raises_everywhere(zero.step)
        assert texts[-1].startswith(
            "ParameterChangedError: param 0 '0.weight': now (11, 6) torch.bfloat16 on cpu, but (11, 6) torch.float32 on cpu when "
        )
        assert all("ParameterChangedError: param 0 '0.weight'" in t for t in texts)
    assert issubclass(ParameterChangedError, RuntimeError)


@run_ranks(2, 3)
def test_gradients_present_on_the_owner_only_are_enough() -> None:
    params = _with_gradients((3,), (4,), (5,))
    zero = sharded(params, torch.optim.SGD, lr=0.5)
    for param in params:
        if not any(param is own for own in zero.optim.param_groups[0]["params"]):
            param.grad = None
    zero.step()
    assert all(torch.equal(p.detach(), torch.full_like(p, 0.5)) for p in params)


@run_ranks(1, 2)
def test_zero_grad_resets_every_gradient() -> None:
    params = _with_gradients((3,), (4,))
    zero = sharded(params, torch.optim.SGD)
    zero.zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@run_ranks(1, 2, 3)
def test_grad_scaler_with_and_without_clipping_equals_the_unsharded(
    fused: bool, clip: bool
) -> None:
    def run(model: nn.Module, optimizer: Any) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        for step in range(10):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 4:
                next(model.parameters()).grad[0, 0] = torch.inf
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    reference, model = ddp(make_model()), ddp(make_model())
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, fused=fused)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, fused=fused)
    assert run(reference, plain) == run(model, zero)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())
    assert not hasattr(zero.optim, "found_inf")


@pytest.mark.parametrize("fused", [False, True])
@run_ranks(2, 3)
def test_an_inf_on_one_rank_lets_all_ranks_skip(fused: bool) -> None:
    params = _with_gradients((3,), (4,), (5,))
    zero = sharded(params, torch.optim.Adam, lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 1:
        params[0].grad[0] = torch.inf
    scaler.step(zero)
    scaler.update()
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in params)


@run_ranks(2, 3)
def test_methods_beyond_step_are_those_of_the_wrapped_optimizer() -> None:
    class Doubles(torch.optim.SGD):
        note = "kept"

        @torch.no_grad()
        def double(self, factor: int) -> str:
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(factor)
            return "done"

        def get_note(self) -> str:
            return self.note

    params = _with_gradients((3,), (4,), (5,))
    zero = sharded(params, Doubles, lr=0.5)
    assert zero.double(2) == "done"
    assert all(torch.equal(p.detach(), torch.full_like(p, 2.0)) for p in params)
    assert zero.note == "kept"
    assert zero.get_note() == "kept"
    assert_replicas_equal(params)
    with pytest.raises(AttributeError, match="no_such_method"):
        zero.no_such_method()


@run_ranks(2)
def test_sums_of_gradients_over_micro_batches_equal_the_unsharded() -> None:
    def run(model: Any, optimizer: Any) -> None:
        for step in range(5):
            optimizer.zero_grad()
            with model.no_sync():
                model(batch(2 * step)).square().mean().backward()
            model(batch(2 * step + 1)).square().mean().backward()
            optimizer.step()

    reference, model = ddp(make_model()), ddp(make_model())
    run(reference, torch.optim.AdamW(reference.parameters(), lr=0.01))
    run(model, sharded(model.parameters(), torch.optim.AdamW, lr=0.01))
    assert_same_params(model, reference)


@run_ranks(2, 3)
def test_a_method_that_fails_on_one_rank_raises_on_every_rank() -> None:
    class Fails(torch.optim.SGD):
        @torch.no_grad()
        def double(self) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(2)
                    if param.numel() == 4:
                        raise FloatingPointError("it went wrong")

    params = _with_gradients((5,), (4,), (3,))
    zero = sharded(params, Fails, lr=0.5)
    assert all("it went wrong" in t for t in raises_everywhere(zero.double))
    assert_replicas_equal(params)


@run_ranks(2, 3)
def test_a_closure_that_fails_on_one_rank_raises_on_every_rank() -> None:
    params = _with_gradients((5,), (4,), (3,))
    zero = sharded(params, torch.optim.SGD, lr=0.5)

    def closure() -> Tensor:
        if dist.get_rank() == 1:
            raise FloatingPointError("no loss")
        return torch.tensor(0.0)

    assert all("no loss" in t for t in raises_everywhere(lambda: zero.step(closure)))
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in params)


@run_ranks(2, 3)
def test_loss_scales_that_differ_between_ranks_raise_everywhere() -> None:
    for fused in (False, True):
        params = _with_gradients((3,), (4,), (5,))
        zero = sharded(params, torch.optim.Adam, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0 if dist.get_rank() != 1 else 8.0)
        scaler.scale(torch.ones(()))
        texts = raises_everywhere(lambda s=scaler, z=zero: s.step(z))
        assert all(
            "first difference at GradScaler's scale: 8.0 on rank 1, 4.0 on rank 0" in t
            for t in texts
        )
        assert not {"grad_scale", "found_inf"} & (set(vars(zero)) | set(vars(zero.optim)))


@run_ranks(2, 3)
def test_a_scaler_on_a_rank_without_any_gradient_hangs_nobody() -> None:
    for fused in (False, True):
        params = _with_gradients((3,), (4,), (5,))
        zero = sharded(params, torch.optim.Adam, fused=fused)
        if dist.get_rank() == 1:
            zero.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(zero)
        assert_replicas_equal(params)


@run_ranks(1, 2)
def test_param_groups_edited_by_hand_raise() -> None:
    params = _with_gradients((3,), (4,))
    zero = sharded(params, torch.optim.SGD, lr=0.5)
    zero.param_groups[0]["params"] = params[:1]
    with pytest.raises(
        ParameterChangedError, match="param_groups hold 1 parameters, which are not the 2"
    ):
        zero.step()
