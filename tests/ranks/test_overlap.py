"""The step inside DDP's backward: equal to the step after it, from the first iteration on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

from shardopt import OverlapError
from shardopt.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from shardopt.testing import run_ranks
from tests.ranks.test_equality import OPTIMIZERS
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

HOOKS = {"after": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


def plain_ddp(module: nn.Module, **options: Any) -> Any:
    """DDP that divides as the overlapping one does: ``allreduce_hook`` divides by N, DDP's own code multiplies by 1/N."""
    model = ddp(module, **options)
    model.register_comm_hook(options.get("process_group"), allreduce_hook)
    return model


def overlapped(
    module: nn.Module,
    hook: str,
    optimizer_class: Any,
    *,
    inner: Any = allreduce_hook,
    params: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A DDP module and the optimizer that steps in its backward."""
    ddp_options = options.pop("ddp_options", {})
    model = ddp(module, **ddp_options)
    zero = sharded(
        model.parameters() if params is None else params(model),
        optimizer_class,
        overlap_with_ddp=True,
        **options,
    )
    model.register_comm_hook(ddp_options.get("process_group"), HOOKS[hook](inner, model, zero))
    return model, zero


@pytest.mark.parametrize("name", OPTIMIZERS)
@run_ranks(1, 2, 3)
def test_ten_steps_in_backward_equal_the_unsharded_optimizer(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    reference = plain_ddp(make_model(bias=name != "Muon"))
    plain = optimizer_class(reference.parameters(), **options)
    train(reference, plain, range(10))
    for hook in HOOKS:
        model, zero = overlapped(make_model(bias=name != "Muon"), hook, optimizer_class, **options)
        for step in range(10):
            zero.zero_grad()
            loss_of(model, step).backward()  # no step(): the update happens here
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2, 3)
def test_every_kind_of_ddp_works(hook: str, ddp_options: dict[str, bool]) -> None:
    reference = plain_ddp(make_model(), **ddp_options)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(10))
    model, zero = overlapped(
        make_model(), hook, torch.optim.AdamW, lr=0.01, ddp_options=ddp_options
    )
    train(model, zero, range(10))
    assert_same_params(model, reference)


class Branches(nn.Module):
    """Uses one of two branches; which one can depend on the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(6, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.shared(inputs))


@pytest.mark.parametrize("choice", ["same on all ranks", "another on each rank"])
@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2, 3)
def test_params_unused_on_all_ranks_are_left_alone_and_used_on_one_are_updated(
    hook: str, choice: str
) -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        for step in range(6):
            branch = (step + (dist.get_rank() if choice != "same on all ranks" else 0)) % 2
            optimizer.zero_grad()
            model(batch(step), branch).square().mean().backward()
            optimizer.step()

    options = {"find_unused_parameters": True}
    reference = plain_ddp(Branches(), **options)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    model, zero = overlapped(Branches(), hook, torch.optim.AdamW, lr=0.01, ddp_options=options)
    run(reference, plain)
    run(model, zero)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2)
def test_a_static_graph_with_unused_params_leaves_them_alone(hook: str) -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step), 1).square().mean().backward()
            optimizer.step()

    options = {"static_graph": True}
    reference = plain_ddp(Branches(), **options)
    model, zero = overlapped(Branches(), hook, torch.optim.AdamW, lr=0.01, ddp_options=options)
    run(reference, torch.optim.AdamW(reference.parameters(), lr=0.01))
    run(model, zero)
    assert_same_params(model, reference)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(1, 2, 3)
def test_accumulation_under_no_sync_updates_once(hook: str) -> None:
    def run(model: Any, optimizer: Any) -> None:
        for step in range(5):
            optimizer.zero_grad()
            with model.no_sync():
                model(batch(2 * step)).square().mean().backward()
            model(batch(2 * step + 1)).square().mean().backward()
            optimizer.step()

    reference = plain_ddp(make_model())
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    run(reference, plain)
    model, zero = overlapped(make_model(), hook, torch.optim.AdamW, lr=0.01)
    run(model, zero)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2, 3)
def test_groups_schedules_and_hand_set_rates_take_effect_at_the_next_update(hook: str) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.named_parameters())
        return [
            {"params": [p for n, p in params if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in params if "bias" in n], "lr": 0.05},
        ]

    def run(model: nn.Module, optimizer: Any) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

        def after(step: int) -> None:
            schedule.step()
            if step == 6:
                optimizer.param_groups[0]["lr"] = 0.0

        train(model, optimizer, range(10), after)

    reference = plain_ddp(make_model())
    run(reference, torch.optim.AdamW(groups(reference), lr=0.02))
    model, zero = overlapped(make_model(), hook, torch.optim.AdamW, lr=0.02, params=groups)
    run(model, zero)
    assert_same_params(model, reference)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(3)
def test_a_subgroup_works(hook: str) -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    reference = plain_ddp(make_model(), process_group=group)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(5))
    model, zero = overlapped(
        make_model(),
        hook,
        torch.optim.AdamW,
        lr=0.01,
        process_group=group,
        ddp_options={"process_group": group},
    )
    train(model, zero, range(5))
    assert_same_params(model, reference)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2)
def test_a_compressing_hook_gives_what_it_gives_without_overlap(hook: str) -> None:
    reference = ddp(make_model())
    reference.register_comm_hook(None, fp16_compress_hook)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(5))
    model, zero = overlapped(
        make_model(), hook, torch.optim.AdamW, lr=0.01, inner=fp16_compress_hook
    )
    train(model, zero, range(5))
    assert_same_params(model, reference)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(1, 2)
def test_step_hooks_fire_once_per_update_before_it_and_after_it(hook: str) -> None:
    model, zero = overlapped(make_model(), hook, torch.optim.SGD, lr=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    seen: list[tuple[str, bool]] = []

    def is_start() -> bool:
        return all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))

    def is_end() -> bool:
        return not any(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))

    zero.register_step_pre_hook(lambda *_: seen.append(("before", is_start())))
    zero.register_step_post_hook(lambda *_: seen.append(("after", is_end())))
    loss_of(model, 0).backward()
    zero.step()
    assert seen == [("before", True), ("after", True)]


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2, 3)
def test_state_saved_in_mid_training_continues_as_the_unsharded_would(hook: str) -> None:
    model, zero = overlapped(make_model(), hook, torch.optim.AdamW, lr=0.01)
    train(model, zero, range(4))
    state = full_state_dict(zero)
    reference = plain_ddp(make_model())
    again, zero_again = overlapped(make_model(), hook, torch.optim.AdamW, lr=0.5)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.5)
    for resumed, optimizer in ((reference, plain), (again, zero_again)):
        resumed.load_state_dict(model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(state))
        train(resumed, optimizer, range(4, 8))
    assert_same_params(again, reference)


class _CountsInGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(1, 2, 3)
def test_what_an_optimizer_counts_in_its_groups_it_counts_once_per_step(hook: str) -> None:
    model, zero = overlapped(make_model(), hook, _CountsInGroup, lr=0.1)
    train(model, zero, range(5))
    assert zero.param_groups[0]["count"] == 5


class _Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if any(param.numel() == 187 for group in self.param_groups for param in group["params"]):
            raise FloatingPointError("it went wrong")
        return super().step(closure)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2, 3)
def test_an_exception_in_one_ranks_update_raises_from_backward_on_every_rank(hook: str) -> None:
    model, _zero = overlapped(make_model(), hook, _Fails, lr=0.1)
    texts = raises_everywhere(lambda: loss_of(model, 0).backward())
    assert sum(t == "FloatingPointError: it went wrong" for t in texts) == 1
    assert sum(
        t.startswith("RemoteRankError: the local optimizer's step() inside backward") for t in texts
    ) == (len(texts) - 1)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2)
def test_rates_that_differ_between_ranks_raise_from_backward_everywhere_and_ddp_goes_on(
    hook: str,
) -> None:
    model, zero = overlapped(make_model(), hook, torch.optim.SGD, lr=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        zero.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        texts = raises_everywhere(lambda step=step: loss_of(model, step).backward())
        assert all("options differ between ranks" in t for t in texts)
        zero.zero_grad()
    assert_equal([p.detach() for p in model.parameters()], start)
    zero.param_groups[0]["lr"] = 0.1
    loss_of(model, 3).backward()
    zero.step()


@run_ranks(1, 2)
def test_two_updating_backwards_before_one_step_raise_and_name_no_sync() -> None:
    model, zero = overlapped(make_model(), "after", torch.optim.SGD, lr=0.1)
    loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    with pytest.raises(OverlapError, match=r"2 updates were made in backward .* under no_sync\(\)"):
        zero.step()


@run_ranks(1, 2)
def test_keywords_of_step_come_too_late() -> None:
    model, zero = overlapped(make_model(), "after", torch.optim.SGD, lr=0.1)
    loss_of(model, 0).backward()
    with pytest.raises(OverlapError, match=r"\['bogus'\] come too late"):
        zero.step(bogus=3)


@run_ranks(1, 2)
def test_a_group_added_after_the_hook_is_refused() -> None:
    _, zero = overlapped(make_model(), "after", torch.optim.SGD, lr=0.1)
    with pytest.raises(OverlapError, match="add all groups first, then call hook_with_zero_step"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@run_ranks(1, 2)
def test_clipping_after_backward_raises_and_says_what_to_use() -> None:
    for confirm in ("step", "zero_grad"):
        model, zero = overlapped(make_model(), "after", torch.optim.SGD, lr=0.1)
        loss_of(model, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        with pytest.raises(OverlapError, match="gradients were changed between backward and step"):
            getattr(zero, confirm)()


@run_ranks(1, 2)
def test_a_grad_scaler_raises_and_says_what_to_use() -> None:
    model, zero = overlapped(make_model(), "after", torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(
        OverlapError, match="GradScaler unscales gradients between backward and step"
    ):
        scaler.step(zero)


@run_ranks(1, 2)
def test_step_without_an_update_in_backward_raises() -> None:
    model = ddp(make_model())
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    loss_of(model, 0).backward()
    with pytest.raises(OverlapError, match="no update happened in backward since the last one"):
        zero.step()


@run_ranks(1, 2)
def test_zero_grad_without_a_hook_raises_before_gradients_are_lost() -> None:
    model = ddp(make_model())
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    zero.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(OverlapError, match="no update happened in backward since the last one"):
        zero.zero_grad()


@run_ranks(1, 2)
def test_step_evaluates_a_closure_whose_backward_updates() -> None:
    model, zero = overlapped(make_model(), "after", torch.optim.SGD, lr=0.1)

    def closure() -> torch.Tensor:
        zero.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    first = zero.step(closure).item()
    assert zero.step(closure).item() < first


@run_ranks(2)
def test_hooks_refuse_what_they_could_not_update() -> None:
    model = ddp(make_model())
    without = sharded(model.parameters(), torch.optim.SGD)
    with pytest.raises(ValueError, match="zero: was made with overlap_with_ddp=False"):
        hook_with_zero_step(allreduce_hook, model, without)
    stranger = sharded([nn.Parameter(torch.ones(3))], torch.optim.SGD, overlap_with_ddp=True)
    with pytest.raises(ValueError, match=r"zero: param 0, \(3,\), is no parameter of ddp"):
        hook_with_zero_step(allreduce_hook, model, stranger)
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    other = sharded(model.parameters(), torch.optim.SGD, group, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="zero: its process group has global ranks"):
        hook_with_zero_step_interleaved(allreduce_hook, model, other)


@pytest.mark.parametrize("hook", HOOKS)
@run_ranks(2)
def test_sharding_buckets_or_not_gives_the_same(hook: str) -> None:
    results = []
    for shard_buckets in (False, True):
        model = ddp(make_model())
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
        model.register_comm_hook(
            None, HOOKS[hook](allreduce_hook, model, zero, shard_buckets=shard_buckets)
        )
        train(model, zero, range(3))
        results.append([p.detach().clone() for p in model.parameters()])
    assert_equal(results[1], results[0])
