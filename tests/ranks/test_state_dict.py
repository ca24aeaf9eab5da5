"""State dicts: equal to the unsharded optimizer's, at any world size; refused whole or loaded whole."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import NotConsolidatedError
from shardopt.testing import run_ranks
from tests.ranks.test_equality import OPTIMIZERS
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    ddp,
    full_state_dict,
    gradients,
    make_model,
    raises_everywhere,
    sharded,
    train,
)


def _trained(optimizer_class: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any]:
    model = ddp(make_model())
    zero = sharded(model.parameters(), optimizer_class, **{"lr": 0.01, **options})
    train(model, zero, range(3))
    return model, zero


@run_ranks(1, 2, 3)
def test_only_the_target_of_the_last_consolidation_holds_a_state_dict() -> None:
    _, zero = _trained()
    with pytest.raises(
        RuntimeError,
        match=r"holds no consolidated state; call consolidate_state_dict\(to=rank\) on all ranks",
    ):
        zero.state_dict()
    for target in range(dist.get_world_size()):
        zero.consolidate_state_dict(to=target)
        if dist.get_rank() == target:
            assert sorted(zero.state_dict()["state"]) == list(range(6))
        else:
            with pytest.raises(NotConsolidatedError):
                zero.state_dict()


@run_ranks(1, 2, 3)
def test_a_state_dict_is_a_snapshot_that_later_steps_do_not_touch() -> None:
    model, zero = _trained()
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        kept = copy.deepcopy(zero.state_dict())
    zero.param_groups[0]["lr"] = 0.5
    train(model, zero, range(3, 6))
    if dist.get_rank() == 0:
        assert_equal(zero.state_dict(), kept)
        assert all(
            t.device.type == "cpu" for e in zero.state_dict()["state"].values() for t in e.values()
        )


@run_ranks(1, 2, 3)
def test_changing_a_returned_state_dict_does_not_change_the_next() -> None:
    _, zero = _trained()
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        zero.state_dict()["state"].clear()
        zero.state_dict()["param_groups"][0]["lr"] = 7
        assert len(zero.state_dict()["state"]) == 6
        assert zero.state_dict()["param_groups"][0]["lr"] == 0.01


@run_ranks(1, 2, 3)
def test_a_target_that_is_no_rank_or_differs_is_refused_everywhere() -> None:
    _, zero = _trained()
    world_size = dist.get_world_size()
    texts = raises_everywhere(lambda: zero.consolidate_state_dict(to=world_size))
    assert all(f"to: expected a rank in [0, {world_size}), got {world_size}" in t for t in texts)
    if world_size > 1:
        texts = raises_everywhere(lambda: zero.consolidate_state_dict(to=min(1, dist.get_rank())))
        assert all("RankMismatchError: consolidate_state_dict()" in t for t in texts)


@pytest.mark.parametrize("name", OPTIMIZERS)
@run_ranks(3)
def test_state_moves_between_world_sizes_and_the_unsharded_optimizer(name: str) -> None:
    """3 ranks -> unsharded -> 2 ranks -> 1 rank -> 3 ranks, a step at each, equals the unsharded all along."""
    optimizer_class, options = OPTIMIZERS[name]
    groups = [dist.group.WORLD, "unsharded", dist.new_group([0, 1]), "alone", dist.group.WORLD]
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]

    def make() -> list[nn.Parameter]:
        return [
            p.detach().clone().requires_grad_()
            for p in make_model(bias=name != "Muon").parameters()
        ]

    def step(params: list[Any], optimizer: Any, number: int) -> None:
        for param, gradient in zip(params, gradients(params, number), strict=True):
            param.grad = gradient
        optimizer.step()

    reference, params = make(), make()
    plain = optimizer_class(reference, **options)
    state: Any = None
    for number, group in enumerate(groups):
        step(reference, plain, number)
        if group == "unsharded":
            optimizer = optimizer_class(params, **options)
        elif isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0:
            optimizer = optimizer_class(params, **options)  # rank 2 sits this one out, unsharded
        elif group is dist.GroupMember.NON_GROUP_MEMBER:
            optimizer = optimizer_class(params, **options)
        else:
            optimizer = sharded(
                params, optimizer_class, alone if group == "alone" else group, **options
            )
        if state is not None:
            optimizer.load_state_dict(state)
        step(params, optimizer, number)
        if hasattr(optimizer, "consolidate_state_dict"):
            for target in range(dist.get_world_size(optimizer.join_process_group)):
                optimizer.consolidate_state_dict(to=target)
                if target == dist.get_rank(optimizer.join_process_group):
                    state = optimizer.state_dict()
        else:
            state = copy.deepcopy(optimizer.state_dict())
        assert_equal([p.detach() for p in params], [p.detach() for p in reference])
        assert_equal(state, plain.state_dict())


@run_ranks(1, 2, 3)
def test_loading_leaves_the_callers_dict_alone_and_shares_no_memory_with_it() -> None:
    model, zero = _trained()
    state = full_state_dict(zero)
    kept = copy.deepcopy(state)
    zero.load_state_dict(state)
    assert_equal(state, kept)
    train(model, zero, range(3, 5))
    assert_equal(state, kept)


@run_ranks(2, 3)
def test_loading_keeps_only_this_ranks_part() -> None:
    _, zero = _trained()
    state = full_state_dict(zero)
    zero.load_state_dict(state)
    owned = {id(p) for group in zero.optim.param_groups for p in group["params"]}
    assert {id(p) for p in zero.state} == owned
    with pytest.raises(NotConsolidatedError):
        zero.state_dict()


@run_ranks(1, 2, 3)
def test_loaded_options_replace_the_present_ones_and_schedulers_go_on() -> None:
    _, zero = _trained(lr=0.02)
    state = full_state_dict(zero)
    model = ddp(make_model())
    fresh = sharded(model.parameters(), torch.optim.AdamW, lr=0.9, weight_decay=0.7)
    schedule = torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == fresh.optim.param_groups[0]["lr"] == 0.02
    assert fresh.param_groups[0]["weight_decay"] == 0.01
    train(model, fresh, range(1))
    del schedule


def _without_params(state: dict[str, Any]) -> Any:
    state["param_groups"][0]["params"].pop()
    return state


def _wrong_shape(state: dict[str, Any]) -> Any:
    state["state"][2]["exp_avg"] = torch.zeros(3, 3)
    return state


MISFITS = {
    "not a dict": (lambda state: None, "TypeError: state dict: expected a dict, got NoneType"),
    "empty": (lambda state: {}, "StateMismatchError: state dict: no 'state' in it"),
    "fewer params": (
        _without_params,
        "StateMismatchError: state dict: its param groups hold [5] parameters, but those of the optimizer hold [6]",
    ),
    "another shape": (
        _wrong_shape,
        "StateMismatchError: param 2: state 'exp_avg' has shape (3, 3) in the state dict, expected (17, 11)",
    ),
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("misfit", MISFITS)
@run_ranks(1, 2, 3)
def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all_and_nothing_changes(
    misfit: str, fresh: bool
) -> None:
    change, text = MISFITS[misfit]
    _, zero = _trained()
    before = full_state_dict(zero)
    last = dist.get_world_size() - 1
    given = copy.deepcopy(before)
    if dist.get_rank() == last:
        given = change(given)
    loader = sharded(make_model().parameters(), torch.optim.AdamW, lr=0.3) if fresh else zero
    texts = raises_everywhere(lambda: loader.load_state_dict(given))
    assert text in texts[last]
    assert all(
        t.startswith("RemoteRankError: load_state_dict() failed") and text in t
        for t in texts[:last]
    )
    if fresh:
        assert loader.param_groups[0]["lr"] == 0.3
        assert not loader.state
    else:
        assert_equal(full_state_dict(zero), before)


@run_ranks(2, 3)
def test_ranks_that_load_different_states_all_raise() -> None:
    _, zero = _trained()
    before = full_state_dict(zero)
    given = copy.deepcopy(before)
    if dist.get_rank() == 1:
        given["param_groups"][0]["lr"] = 5.0
    texts = raises_everywhere(lambda: zero.load_state_dict(given))
    assert all("RankMismatchError: every rank must load the same state dict" in t for t in texts)
    assert_equal(full_state_dict(zero), before)


class _RefusesToLoad(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if any(param.numel() == 187 for group in self.param_groups for param in group["params"]):
            raise KeyError("nope")


@run_ranks(2, 3)
def test_a_local_optimizer_that_fails_to_load_on_one_rank_leaves_all_as_they_were() -> None:
    model, zero = _trained(_RefusesToLoad, momentum=0.9)
    before = full_state_dict(zero)
    other = copy.deepcopy(before)
    other["param_groups"][0]["lr"] = 5.0
    other["state"][0]["momentum_buffer"].fill_(3)
    texts = raises_everywhere(lambda: zero.load_state_dict(other))
    assert sum("KeyError" in t for t in texts) == len(texts)
    assert_equal(full_state_dict(zero), before)
    assert zero.state is zero.optim.state
    train(model, zero, range(3, 4))


@run_ranks(1, 2)
def test_state_dict_hooks_fire_as_on_any_optimizer() -> None:
    _, zero = _trained()
    calls: list[str] = []
    zero.register_state_dict_pre_hook(lambda *_: calls.append("before state_dict"))
    zero.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    zero.register_load_state_dict_pre_hook(
        lambda _, state: (
            calls.append("before load") or {k: v for k, v in state.items() if k != "note"}
        )
    )
    zero.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    state = full_state_dict(zero)
    assert state["note"] == 1
    zero.load_state_dict(state)
    assert calls == ["before state_dict", "before load", "after load"]


@run_ranks(1, 2, 3)
def test_state_dicts_survive_saving_and_loading_as_weights_only() -> None:
    _, zero = _trained()
    state = full_state_dict(zero)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_equal(torch.load(file, weights_only=True), state)


@run_ranks(1, 2, 3)
def test_a_resumed_run_ends_where_the_uninterrupted_one_ends() -> None:
    def resume(number: int) -> Any:
        model = ddp(make_model())
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
        return model, zero

    model, zero = resume(0)
    train(model, zero, range(3))
    weights, state = copy.deepcopy(model.state_dict()), full_state_dict(zero)
    ends = []
    for _ in range(2):
        again, zero_again = resume(1)
        again.load_state_dict(weights)
        zero_again.load_state_dict(state)
        train(again, zero_again, range(3, 6))
        ends.append(again)
    assert_same_params(ends[0], ends[1])


@run_ranks(2, 3)
def test_reading_the_state_of_other_ranks_params_does_no_harm() -> None:
    model, zero = _trained()
    expected = full_state_dict(zero)
    for param in model.parameters():
        zero.state[param]
    assert_equal(full_state_dict(zero), expected)
    for param in model.parameters():
        zero.state[param]
    zero.load_state_dict(expected)


class _LowRank(torch.optim.SGD):
    """Keeps state of a shape of its own under a key that torch's optimizers use."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["exp_avg"] = torch.zeros(2)
        return super().step(closure)


@run_ranks(2)
def test_state_of_a_shape_of_its_own_is_loaded_into_a_fresh_optimizer() -> None:
    _, zero = _trained(_LowRank)
    state = full_state_dict(zero)
    fresh = sharded(make_model().parameters(), _LowRank, lr=0.01)
    fresh.load_state_dict(state)
    assert_equal(full_state_dict(fresh), state)


@run_ranks(2, 3)
def test_state_that_cannot_travel_raises_on_every_rank() -> None:
    _, zero = _trained()
    if dist.get_rank() == 1:
        next(iter(zero.state.values()))["function"] = lambda: None
    texts = raises_everywhere(zero.consolidate_state_dict)
    assert all("pickle" in t for t in texts)
