"""What ranks are given: accepted, or refused on every rank with the way out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import RankMismatchError
from shardopt.testing import run_ranks
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
    assert_same_params,
    ddp,
    full_state_dict,
    make_model,
    raises_everywhere,
    sharded,
    train,
)


def _params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


@run_ranks(1, 2)
def test_generators_are_consumed_once_at_both_levels() -> None:
    model = make_model()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    zero = sharded(
        ({"params": (p for p in layer.parameters())} for layer in layers), torch.optim.SGD, lr=0.1
    )
    assert [len(group["params"]) for group in zero.param_groups] == [2, 2, 2]


@run_ranks(1, 2, 3)
def test_named_parameters_keep_their_names_in_groups_and_state_dicts() -> None:
    reference, model = ddp(make_model()), ddp(make_model())
    plain = torch.optim.AdamW(reference.named_parameters(), lr=0.01)
    zero = sharded(model.named_parameters(), torch.optim.AdamW, lr=0.01)
    train(reference, plain, range(3))
    train(model, zero, range(3))
    assert zero.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(1, 2)
def test_the_wrapped_class_defaults_are_seen_so_that_schedulers_find_them() -> None:
    model = make_model()
    zero = sharded(model.parameters(), torch.optim.AdamW)
    plain = torch.optim.AdamW(model.parameters())
    assert zero.defaults == plain.defaults
    assert {k: v for k, v in zero.param_groups[0].items() if k != "params"} == {
        k: v for k, v in plain.param_groups[0].items() if k != "params"
    }
    torch.optim.lr_scheduler.OneCycleLR(zero, max_lr=0.1, total_steps=10)


@run_ranks(1, 2)
def test_it_is_an_optimizer_and_a_joinable() -> None:
    zero = sharded(_params((3,)), torch.optim.SGD)
    assert isinstance(zero, torch.optim.Optimizer)
    assert isinstance(zero, dist.algorithms.join.Joinable)


WRONG_PARAMS: dict[str, tuple[Any, str]] = {
    "no params": (lambda: [], "ValueError: params: got an empty parameter list"),
    "a bare tensor": (lambda: torch.ones(1), "TypeError: params: expected an iterable"),
    "a float": (lambda: 1.2, "TypeError: params: expected an iterable"),
    "not a tensor": (
        lambda: [*_params((2,)), 42],
        "TypeError: optimizer can only optimize Tensors",
    ),
    "a set": (
        lambda: [{"params": set(_params((2,)))}],
        "TypeError: params: got a set",
    ),
    "a sparse tensor": (
        lambda: [torch.sparse_coo_tensor(size=(2, 3), check_invariants=False)],
        "has layout torch.sparse_coo",
    ),
    "a non-leaf": (lambda: [_params((2,))[0] * 2], "ValueError: can't optimize a non-leaf Tensor"),
    "one twice": (lambda: _params((2,)) * 2, "is given twice"),
}


@pytest.mark.parametrize("wrong", WRONG_PARAMS)
@run_ranks(1, 2, 3)
def test_wrong_params_on_one_rank_raise_on_every_rank(wrong: str) -> None:
    make, text = WRONG_PARAMS[wrong]
    last = dist.get_world_size() - 1
    good = _params((2,))
    texts = raises_everywhere(
        lambda: sharded(make() if dist.get_rank() == last else good, torch.optim.SGD)
    )
    assert text in texts[last]
    for other in texts[:last]:
        assert other.startswith("RemoteRankError: making the optimizer failed on another rank")
        assert text in other


@run_ranks(2)
def test_a_param_in_two_groups_is_refused() -> None:
    params = _params((2,))
    texts = raises_everywhere(
        lambda: sharded([{"params": params}, {"params": params}], torch.optim.SGD)
    )
    assert all("more than one parameter group" in text for text in texts)


DIFFERENCES: dict[str, tuple[Any, str]] = {
    "number": (lambda r: _params(*[(2,)] * (3 + r)), "first difference at param 3: "),
    "order": (
        lambda r: _params(*[(2,), (3,)][:: 1 - 2 * (r == 1)]),
        "first difference at param 0: (3,)",
    ),
    "shape": (
        lambda r: _params((2,), (4, 4) if r == 1 else (16,)),
        "first difference at param 1: (4, 4)",
    ),
    "dtype": (
        lambda r: [
            nn.Parameter(p.to([torch.float32, torch.float64][r == 1])) for p in _params((2,))
        ],
        "torch.float64",
    ),
    "requires_grad": (lambda r: [p.requires_grad_(r != 1) for p in _params((2,))], "frozen"),
    "groups": (
        lambda r: [{"params": [p]} for p in _params((2,), (3,))] if r == 1 else _params((2,), (3,)),
        "in group 1",
    ),
    "names": (lambda r: [("bias" if r == 1 else "weight", p) for p in _params((2,))], "'bias'"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@run_ranks(2, 3)
def test_ranks_given_different_params_all_raise_and_name_the_first_difference(
    difference: str,
) -> None:
    make, text = DIFFERENCES[difference]
    texts = raises_everywhere(lambda: sharded(make(dist.get_rank()), torch.optim.SGD))
    assert all(t == texts[0] for t in texts)
    assert texts[0].startswith(
        "RankMismatchError: every rank must make the same optimizer: rank 1 was"
    )
    assert text in texts[0]
    assert "on rank 1" in texts[0]
    assert "on rank 0" in texts[0]


@run_ranks(2, 3)
def test_ranks_given_different_options_all_raise() -> None:
    texts = raises_everywhere(
        lambda: sharded(_params((2,)), torch.optim.SGD, lr=0.1 * (1 + dist.get_rank()))
    )
    assert all(
        "first difference at option 'lr' of group 0: 0.2 on rank 1, 0.1 on rank 0" in t
        for t in texts
    )


@run_ranks(2)
def test_ranks_given_different_classes_all_raise() -> None:
    classes = [torch.optim.SGD, torch.optim.Adam]
    texts = raises_everywhere(lambda: sharded(_params((2,)), classes[dist.get_rank()], lr=0.1))
    assert all(
        "first difference at optimizer_class: Adam on rank 1, SGD on rank 0" in t for t in texts
    )


@run_ranks(2, 3)
def test_a_param_that_the_wrapped_optimizer_refuses_raises_on_every_rank() -> None:
    texts = raises_everywhere(lambda: sharded(_params((8, 8), (3,), (4, 4)), torch.optim.Muon))
    assert sum("ValueError: Muon only supports 2D parameters" in t for t in texts) == len(texts)
    assert (
        sum(t.startswith("RemoteRankError: making the local Muon") for t in texts) == len(texts) - 1
    )


@run_ranks(1, 2)
def test_lbfgs_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="LBFGS takes inner products over all parameters"):
        sharded(_params((2,)), torch.optim.LBFGS)


@run_ranks(2)
def test_params_that_share_memory_are_refused() -> None:
    storage = torch.ones(10)
    params = [nn.Parameter(storage[:6]), nn.Parameter(storage[5:])]
    with pytest.raises(ValueError, match="param 0 and param 1 overlap in memory"):
        sharded(params, torch.optim.SGD)


@run_ranks(2)
def test_params_side_by_side_in_one_storage_are_fine() -> None:
    storage = torch.ones(10)
    sharded([nn.Parameter(storage[:5]), nn.Parameter(storage[5:])], torch.optim.SGD)


@run_ranks(2)
def test_a_dtensor_is_refused_with_the_reason() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    texts = raises_everywhere(lambda: sharded([param], torch.optim.SGD))
    assert all("param 0 of its group is a DTensor, which is sharded already" in t for t in texts)


@run_ranks(2)
def test_a_group_without_this_rank_is_refused_where_it_is_no_member() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="process_group: global rank 1 is no member of it"):
            sharded(_params((2,)), torch.optim.SGD, group)
    else:
        sharded(_params((2,)), torch.optim.SGD, group)


@run_ranks(2)
def test_a_mesh_of_three_dimensions_is_refused() -> None:
    names = ("data", "model", "other")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=names)
    with pytest.raises(ValueError, match="a DeviceMesh of 3 dimensions, expected 1, or 2"):
        sharded(_params((2,)), torch.optim.SGD, mesh)
    sharded(_params((2,)), torch.optim.SGD, mesh["data"])


@run_ranks(1, 2)
def test_something_else_as_process_group_is_refused() -> None:
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup"):
        sharded(_params((2,)), torch.optim.SGD, "gloo")


@run_ranks(2, 3)
def test_a_group_added_in_training_leaves_earlier_state_and_owners_valid() -> None:
    def run(model: nn.Module, make: Any) -> Any:
        first, *rest = [layer for layer in model if isinstance(layer, nn.Linear)]
        for layer in rest:
            layer.requires_grad_(False)
        optimizer = make(first.parameters())
        for step in range(10):
            if step == 4:
                for layer in rest:
                    layer.requires_grad_(True)
                optimizer.add_param_group(
                    {"params": (p for layer in rest for p in layer.parameters()), "lr": 0.003}
                )
            optimizer.zero_grad()
            model(torch.ones(2, 6) + step).square().mean().backward()
            optimizer.step()
        return optimizer

    reference = make_model()
    plain = run(reference, lambda params: torch.optim.AdamW(params, lr=0.01))
    for view in (False, True):
        model = make_model()
        zero = run(
            model,
            lambda params, view=view: sharded(
                params, torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=view
            ),
        )
        assert_same_params(model, reference)
        assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, 3)
def test_a_group_that_one_rank_refuses_leaves_every_rank_as_it_was() -> None:
    model = make_model()
    zero = sharded(model.parameters(), torch.optim.AdamW)
    extra = _params((4,), (5,))
    bad = {"params": [*extra, next(model.parameters())]}
    good = {"params": extra}
    texts = raises_everywhere(lambda: zero.add_param_group(bad if dist.get_rank() == 1 else good))
    assert all(texts)
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    zero.add_param_group(good)
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 2


@run_ranks(2)
def test_different_added_groups_leave_every_rank_as_it_was() -> None:
    zero = sharded(_params((4,)), torch.optim.AdamW)
    extra = _params((3 + dist.get_rank(),))
    with pytest.raises(RankMismatchError, match="first difference at param 1"):
        zero.add_param_group({"params": extra})
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1


@run_ranks(1, 2)
def test_pickling_and_copying_are_refused_with_the_way_out() -> None:
    zero = sharded(_params((4,)), torch.optim.AdamW)
    for action in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(
            TypeError, match="cannot be pickled or copied: it belongs to a process group"
        ):
            action(zero)


@run_ranks(2, 3)
def test_each_rank_keeps_state_for_about_its_share() -> None:
    params = _params(*[(n, 1) for n in (9, 7, 5, 3) * dist.get_world_size()])
    zero = sharded(params, torch.optim.Adam)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    assert sum(p.numel() for p in zero.optim.param_groups[0]["params"]) == 24
    assert sum(entry["exp_avg"].numel() for entry in zero.state.values()) == 24
    assert_replicas_equal(params)


@run_ranks(2)
def test_state_shows_the_live_state_of_owned_params() -> None:
    params = _params((4,), (5,))
    zero = sharded(params, torch.optim.Adam)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    owned = [p for p in params if p in zero.state]
    assert len(owned) == 1
    assert zero.state[owned[0]] is zero.optim.state[owned[0]]
    zero.consolidate_state_dict(to=0)
    zero.load_state_dict(_from_rank_0(zero))
    assert zero.state is zero.optim.state


def _from_rank_0(zero: Any) -> Any:
    box = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@run_ranks(1, 2)
def test_arguments_of_another_type_are_named() -> None:
    with pytest.raises(TypeError, match="sharding: expected a Sharding, got dict"):
        sharded(_params((2,)), torch.optim.SGD, sharding={"gradients": True})
    with pytest.raises(TypeError, match="optimizer_class: expected a class, got 'SGD'"):
        sharded(_params((2,)), "SGD")


@run_ranks(2, 3)
def test_dtypes_may_be_mixed_by_an_added_group() -> None:
    for view in (False, True):
        params = _params((4,), (5,))
        extra = [nn.Parameter(torch.ones(6, dtype=torch.bfloat16))]
        zero = sharded(params, torch.optim.SGD, lr=0.5, parameters_as_bucket_view=view)
        zero.add_param_group({"params": extra})
        assert [p.dtype for p in (*params, *extra)] == [
            torch.float32,
            torch.float32,
            torch.bfloat16,
        ]
        for param in (*params, *extra):
            param.grad = torch.ones_like(param)
        zero.step()
        assert_replicas_equal([*params, *extra])


@run_ranks(2, 3)
def test_after_a_failed_add_param_group_the_optimizer_steps_on() -> None:
    class Refuses(torch.optim.SGD):
        def add_param_group(self, group: Any) -> None:
            if any(p.numel() == 7 for p in group["params"]):
                raise ValueError("not seven")
            super().add_param_group(group)

    for view in (False, True):
        params = _params((4,), (5,))
        zero = sharded(params, Refuses, lr=0.5, parameters_as_bucket_view=view)
        extra = {"params": _params((7,), (8,))}
        assert all(
            "not seven" in t
            for t in raises_everywhere(lambda z=zero, e=extra: z.add_param_group(e))
        )
        for param in params:
            param.grad = torch.ones_like(param)
        zero.step()
        assert all(torch.equal(p.detach(), torch.full_like(p, 0.5)) for p in params)
