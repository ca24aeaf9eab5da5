"""Each documented sentence of ``tensorplay.distributed.optim.ZeroRedundancyOptimizer``; see docs/tensorplay.md."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from typing import Any
from unittest import mock

import pytest

tp = pytest.importorskip("tensorplay")

import tensorplay.distributed as dist  # noqa: E402
from tensorplay.distributed.algorithms.join import Join, Joinable  # noqa: E402

from shardopt import Sharding  # noqa: E402
from shardopt.tensorplay import ZeroRedundancyOptimizer  # noqa: E402
from shardopt.testing import run_ranks  # noqa: E402
from tests.tensorplay.training import (  # noqa: E402
    assert_equal,
    average_in_rank_order,
    full_state_dict,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
    train,
    values,
)

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 0.01}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adagrad": ("Adagrad", {"lr": 0.01}),
    "RMSprop": ("RMSprop", {"lr": 0.01}),
    "Muon": ("Muon", {"lr": 0.01}),
    "Adafactor": ("Adafactor", {}),
    "NAdam": ("NAdam", {}),
    "Rprop": ("Rprop", {}),
}
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket view": {"parameters_as_bucket_view": True},
    "by element": {
        "parameters_as_bucket_view": True,
        "sharding": Sharding(granularity="element"),
    },
    "gradients": {"sharding": Sharding(gradients=True)},
    "gradients by element": {
        "parameters_as_bucket_view": True,
        "sharding": Sharding(granularity="element", gradients=True),
    },
    "gradients by element, over the network": {
        "parameters_as_bucket_view": True,
        "sharding": Sharding(granularity="element", gradients=True, shared_memory=False),
    },
}
NOT_ELEMENTWISE = (
    "Muon",
    "Adafactor",
    "AdamW foreach",
)  # foreach: other roundings on parts of tensors


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@run_ranks(1, 2, 3, framework="tensorplay")
def test_ten_steps_equal_the_unsharded_optimizer(name: str, policy: str) -> None:
    if name in NOT_ELEMENTWISE and "element" in policy:
        return
    class_name, options = OPTIMIZERS[name]
    optimizer_class = getattr(tp.optim, class_name)
    reference, model = make_model(bias=name != "Muon"), make_model(bias=name != "Muon")
    plain = optimizer_class(reference.parameters(), **options)
    zero = sharded(model.parameters(), optimizer_class, **options, **POLICIES[policy])
    train(reference, plain, range(10))
    train(model, zero, range(10), averages="gradients" not in policy)
    assert_equal(values(model), values(reference))
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, 3, framework="tensorplay")
def test_ranks_of_one_host_share_memory_unless_told_otherwise() -> None:
    for asked in (True, False):
        sharding = Sharding(shared_memory=asked)
        zero = sharded(make_model().parameters(), tp.optim.SGD, lr=0.1, sharding=sharding)
        assert zero.shards.group.shares_memory is asked


def test_the_documented_signature_holds() -> None:
    names = list(inspect.signature(ZeroRedundancyOptimizer).parameters)
    assert names[:5] == [
        "params",
        "optimizer_class",
        "process_group",
        "parameters_as_bucket_view",
        "overlap_with_ddp",
    ]
    assert names[-1] == "defaults"
    for name in (
        "add_param_group",
        "consolidate_state_dict",
        "join_device",
        "join_hook",
        "join_process_group",
        "load_state_dict",
        "state_dict",
        "step",
    ):
        assert hasattr(ZeroRedundancyOptimizer, name)


@run_ranks(1, 2, framework="tensorplay")
def test_it_is_an_optimizer_and_a_joinable_of_tensorplay() -> None:
    zero = sharded(make_model().parameters(), tp.optim.SGD, lr=0.1)
    assert isinstance(zero, tp.optim.Optimizer)
    assert isinstance(zero, Joinable)


def _params(*sizes: int) -> list[Any]:
    params = [tp.nn.Parameter(tp.ones(size)) for size in sizes]
    for param in params:
        param.grad = tp.ones(param.shape[0])
    return params


@run_ranks(2, 3, framework="tensorplay")
def test_each_rank_keeps_state_for_its_share_and_no_param_is_divided() -> None:
    sizes = [9, 7, 5, 3] * dist.get_world_size()
    params = _params(*sizes)
    zero = sharded(params, tp.optim.Adam)
    zero.step()
    owned = zero.optim.param_groups[0]["params"]
    assert sum(p.numel() for p in owned) == 24
    assert sum(entry["exp_avg"].numel() for entry in zero.state.values()) == 24
    assert all(any(p is param for param in params) for p in owned)


@run_ranks(2, 3, framework="tensorplay")
def test_replicas_are_equal_after_a_step_with_gradients_on_owners_only() -> None:
    for view in (False, True):
        params = _params(3, 4, 5, 6)
        zero = sharded(params, tp.optim.SGD, lr=0.5, parameters_as_bucket_view=view)
        for param in params:
            if not any(param is own for own in zero.optim.param_groups[0]["params"]):
                param.grad = None
        zero.step()
        assert_equal([p.detach() for p in params], [tp.ones(p.shape[0]) * 0.5 for p in params])


@run_ranks(1, 2, framework="tensorplay")
def test_params_may_be_iterables_of_tensors_pairs_or_dicts() -> None:
    model = make_model()
    sharded((p for p in model.parameters()), tp.optim.SGD, lr=0.1)
    named = sharded(model.named_parameters(), tp.optim.SGD, lr=0.1)
    assert named.param_groups[0]["param_names"][0] == "0.weight"
    grouped = sharded(
        ({"params": layer.parameters()} for layer in model if hasattr(layer, "weight")),
        tp.optim.SGD,
        lr=0.1,
    )
    assert len(grouped.param_groups) == 3
    for wrong, error in (
        ([], ValueError),
        (tp.ones(1), TypeError),
        (1.2, TypeError),
        ([42], TypeError),
    ):
        with pytest.raises(error):
            sharded(wrong, tp.optim.SGD, lr=0.1)


@run_ranks(2, framework="tensorplay")
def test_params_of_several_dtypes_are_trained_in_one_optimizer() -> None:
    for view in (False, True):
        params = [
            tp.nn.Parameter(tp.ones(4, dtype=dtype))
            for dtype in (tp.float32, tp.bfloat16, tp.float64)
        ]
        for param in params:
            param.grad = tp.ones(4, dtype=param.dtype)
        sharded(params, tp.optim.SGD, lr=0.5, parameters_as_bucket_view=view).step()
        assert [p.tolist() for p in params] == [[0.5] * 4] * 3
        assert [
            p.dtype == d for p, d in zip(params, (tp.float32, tp.bfloat16, tp.float64), strict=True)
        ] == [True] * 3


@run_ranks(3, framework="tensorplay")
def test_a_process_group_shards_among_its_ranks() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is no member of it"):
            sharded(_params(3), tp.optim.SGD, group, lr=0.5)
        return
    params = _params(3, 4)
    zero = sharded(params, tp.optim.SGD, group, lr=0.5)
    zero.step()
    assert zero.join_process_group is group
    assert_equal([p.detach() for p in params], [tp.ones(p.shape[0]) * 0.5 for p in params])


@run_ranks(2, framework="tensorplay")
def test_bucket_views_lie_in_one_flat_tensor_and_survive_replaced_data() -> None:
    model = make_model()
    zero = sharded(model.parameters(), tp.optim.SGD, lr=0.1, parameters_as_bucket_view=True)
    pointers = sorted(p.data_ptr() for p in model.parameters())
    span = pointers[-1] - pointers[0]
    assert span < 4 * sum(p.numel() for p in model.parameters()) + 64 * 6
    reference = make_model()
    plain = tp.optim.SGD(reference.parameters(), lr=0.1)
    for trained in (model, reference):
        for param in trained.parameters():
            param.data = param.detach() * 0.5
    train(reference, plain, range(3))
    train(model, zero, range(3))
    assert_equal(values(model), values(reference))
    assert sorted(p.data_ptr() for p in model.parameters()) == pointers


@run_ranks(2, 3, framework="tensorplay")
def test_a_group_added_in_training_is_sharded_and_leaves_earlier_state_valid() -> None:
    def run(model: Any, make: Any) -> Any:
        first, *rest = list(model.parameters())
        optimizer = make([first])
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": rest, "lr": 0.003})
            model.zero_grad()
            loss_of(model, step).backward()
            average_in_rank_order(model)
            optimizer.step()
        return optimizer

    for policy in ("default", "bucket view", "by element"):
        reference, model = make_model(), make_model()
        plain = run(reference, lambda params: tp.optim.AdamW(params, lr=0.01))
        zero = run(
            model, lambda params, p=policy: sharded(params, tp.optim.AdamW, lr=0.01, **POLICIES[p])
        )
        assert_equal(values(model), values(reference))
        assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, framework="tensorplay")
def test_different_groups_on_different_ranks_raise_on_all() -> None:
    zero = sharded(_params(3), tp.optim.SGD, lr=0.1)
    extra = _params(3 + dist.get_rank())
    texts = raises_everywhere(lambda: zero.add_param_group({"params": extra}))
    assert all("first difference at param 1" in text for text in texts)


@run_ranks(1, 2, 3, framework="tensorplay")
def test_consolidation_brings_the_whole_state_to_its_target_only() -> None:
    model = make_model()
    zero = sharded(model.parameters(), tp.optim.Adam, lr=0.01)
    train(model, zero, range(2))
    target = dist.get_world_size() - 1
    with pytest.raises(RuntimeError, match="holds no consolidated state"):
        zero.state_dict()
    zero.consolidate_state_dict(to=target)
    if dist.get_rank() == target:
        assert sorted(zero.state_dict()["state"]) == list(range(6))
    else:
        with pytest.raises(RuntimeError, match="holds no consolidated state"):
            zero.state_dict()


@pytest.mark.parametrize("policy", ["default", "by element"])
@run_ranks(3, framework="tensorplay")
def test_state_dicts_are_exchanged_with_the_unsharded_optimizer_at_any_world_size(
    policy: str,
) -> None:
    """3 ranks -> saved, loaded -> unsharded -> 1 rank -> 3 ranks, a step at each."""
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    makers = [
        lambda m: sharded(m.parameters(), tp.optim.AdamW, lr=0.01, **POLICIES[policy]),
        lambda m: tp.optim.AdamW(m.parameters(), lr=0.01),
        lambda m: sharded(m.parameters(), tp.optim.AdamW, alone, lr=0.01, **POLICIES[policy]),
        lambda m: sharded(m.parameters(), tp.optim.AdamW, lr=0.01, **POLICIES[policy]),
    ]
    reference, model = make_model(), make_model()
    plain = tp.optim.AdamW(reference.parameters(), lr=0.01)
    state: Any = None
    for number, maker in enumerate(makers):
        optimizer = maker(model)
        if state is not None:
            optimizer.load_state_dict(state)
        train(reference, plain, range(number, number + 1))
        train(model, optimizer, range(number, number + 1))
        if number == 1:
            state = copy.deepcopy(optimizer.state_dict())
        elif number == 2:
            optimizer.consolidate_state_dict()
            state = optimizer.state_dict()
        else:
            state = full_state_dict(optimizer)
        file = io.BytesIO()
        tp.save(state, file)
        file.seek(0)
        state = tp.load(file)
        assert_equal(values(model), values(reference))
        assert_equal(state, plain.state_dict())


@run_ranks(1, 2, framework="tensorplay")
def test_loading_leaves_the_given_state_dict_as_it_was() -> None:
    model = make_model()
    zero = sharded(model.parameters(), tp.optim.Adam, lr=0.01)
    train(model, zero, range(2))
    state = full_state_dict(zero)
    kept = copy.deepcopy(state)
    zero.load_state_dict(state)
    train(model, zero, range(2, 4))
    assert_equal(state, kept)


@run_ranks(1, 2, framework="tensorplay")
def test_step_returns_the_loss_of_the_local_optimizer_and_evaluates_the_closure_once() -> None:
    model = make_model()
    zero = sharded(model.parameters(), tp.optim.SGD, lr=0.1)
    calls: list[int] = []

    def closure() -> Any:
        calls.append(1)
        zero.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        average_in_rank_order(model)
        return loss

    first, second = zero.step(closure).item(), zero.step(closure).item()
    assert second < first
    assert len(calls) == 2


@run_ranks(1, 2, framework="tensorplay")
def test_extra_arguments_of_step_reach_the_local_optimizer() -> None:
    class Takes(tp.optim.SGD):
        def step(self, closure: Any = None, *, note: Any = None) -> Any:
            note.append(5)
            return super().step(closure)

    note: list[int] = []
    sharded(_params(3), Takes, lr=0.1).step(note=note)
    assert note == [5]


@run_ranks(1, 2, 3, framework="tensorplay")
def test_schedulers_and_hooks_work_as_on_any_optimizer() -> None:
    def run(model: Any, optimizer: Any) -> None:
        schedule = tp.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        train(model, optimizer, range(8), after_step=lambda _: schedule.step())

    reference, model = make_model(), make_model()
    run(reference, tp.optim.AdamW(reference.parameters()))
    zero = sharded(model.parameters(), tp.optim.AdamW)
    seen: list[str] = []
    zero.register_step_pre_hook(lambda *_: seen.append("before"))
    zero.register_step_post_hook(lambda *_: seen.append("after"))
    run(model, zero)
    assert seen == ["before", "after"] * 8
    assert_equal(values(model), values(reference))


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3, framework="tensorplay")
def test_uneven_inputs_through_join_equal_the_unsharded_optimizer(policy: str) -> None:
    """Gradients sharded: a rank without inputs counts as zero. Otherwise the ranks with inputs set equal gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_inputs, longest = 2 + 3 * rank, 2 + 3 * (world_size - 1)
    reference, model = make_model(), make_model()
    plain = tp.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), tp.optim.AdamW, lr=0.01, **POLICIES[policy])
    reduces = "gradients" in policy
    for step in range(longest):
        plain.zero_grad()
        loss_of(reference, step, rank if reduces else 0).backward()
        if reduces:
            if step >= num_inputs:
                for param in reference.parameters():
                    param.grad = tp.zeros_like(param.detach())
            average_in_rank_order(reference)
        plain.step()
    with warnings.catch_warnings(), Join([zero]):
        for step in range(num_inputs):
            zero.zero_grad()
            loss_of(model, step, rank if reduces else 0).backward()
            zero.step()
    assert_equal(values(model), values(reference))
    assert_equal(full_state_dict(zero), plain.state_dict())
    zero.zero_grad()
    loss_of(model, 99, 0).backward()
    zero.step()  # after Join a step announces nothing


@run_ranks(2, framework="tensorplay")
def test_join_device_and_group_are_those_of_the_params_and_the_optimizer() -> None:
    zero = sharded(_params(3), tp.optim.SGD, lr=0.1)
    assert str(zero.join_device) == "cpu"
    assert zero.join_process_group is dist.group.WORLD


@run_ranks(2, 3, framework="tensorplay")
def test_ranks_given_different_params_or_rates_raise_on_all() -> None:
    texts = raises_everywhere(lambda: sharded(_params(3 + dist.get_rank()), tp.optim.SGD, lr=0.1))
    assert all("first difference at param 0: (4,)" in text for text in texts)
    zero = sharded(_params(3), tp.optim.SGD, lr=0.1)
    zero.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    texts = raises_everywhere(zero.step)
    assert all("options differ between ranks" in text for text in texts)


@run_ranks(2, framework="tensorplay")
def test_an_exception_in_one_ranks_update_raises_on_all() -> None:
    class Fails(tp.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == 1:
                raise FloatingPointError("it went wrong")
            return super().step(closure)

    zero = sharded(_params(3, 4), Fails, lr=0.1)
    assert all("it went wrong" in text for text in raises_everywhere(zero.step))


@run_ranks(2, framework="tensorplay")
def test_lbfgs_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="LBFGS takes inner products"):
        sharded(_params(3), tp.optim.LBFGS)


@run_ranks(2, framework="tensorplay")
def test_overlap_is_refused_where_the_build_has_no_ddp() -> None:
    if tp.nn.parallel.DistributedDataParallel is not None:
        return
    with pytest.raises(ValueError, match="this build of TensorPlay has no DistributedDataParallel"):
        sharded(make_model().parameters(), tp.optim.SGD, overlap_with_ddp=True, lr=0.1)


def _with_ddp() -> Any:
    """DDP as a build that offers it has it; CPU builds hold the same class under another name."""
    from tensorplay.nn.parallel.distributed import DistributedDataParallel

    return mock.patch.object(tp.nn.parallel, "DistributedDataParallel", DistributedDataParallel)


def _allreduce(state: Any, bucket: Any) -> Any:
    """Average a bucket; TensorPlay's own ``allreduce_hook`` returns a future that is waited for in the same way."""
    flat = bucket.buffer()
    flat.div_(dist.get_world_size())
    dist.all_reduce(flat)
    return flat


@pytest.mark.parametrize("hook", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Muon"])
@run_ranks(2, framework="tensorplay")
def test_overlap_steps_in_backward_where_the_build_has_ddp(name: str, hook: str) -> None:
    """One bucket: with several, TensorPlay 1.0.0's DDP reduces some gradients before they are there."""
    from shardopt.tensorplay import ddp_zero_hook

    class_name, options = OPTIMIZERS[name]
    optimizer_class = getattr(tp.optim, class_name)
    reference = make_model(bias=name != "Muon")
    plain = optimizer_class(reference.parameters(), **options)
    train(reference, plain, range(6))
    with _with_ddp():
        model = tp.nn.parallel.DistributedDataParallel(make_model(bias=name != "Muon"))
        zero = sharded(model.parameters(), optimizer_class, overlap_with_ddp=True, **options)
        model.register_comm_hook(None, getattr(ddp_zero_hook, hook)(_allreduce, model, zero))
        train(model, zero, range(6), averages=False)
    assert_equal(values(model), values(reference))
    assert_equal(full_state_dict(zero), plain.state_dict())


@run_ranks(2, framework="tensorplay")
def test_hooks_refuse_an_optimizer_made_without_overlap() -> None:
    from shardopt.tensorplay import ddp_zero_hook

    with _with_ddp():
        model = tp.nn.parallel.DistributedDataParallel(make_model())
        zero = sharded(model.parameters(), tp.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="zero: was made with overlap_with_ddp=False"):
            ddp_zero_hook.hook_with_zero_step(_allreduce, model, zero)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@run_ranks(1, 2, 3, framework="tensorplay")
def test_clipping_of_sharded_gradients_equals_the_unsharded(norm_type: float) -> None:
    """Up to the rounding of TensorPlay's own norm, which depends on how a tensor is aligned in memory: sums of at most 187
    squares in another grouping differ by at most 187 half units in the last place."""
    bound = 187 * 2.0**-24
    reference, model = make_model(), make_model()
    plain = tp.optim.SGD(reference.parameters(), lr=0.1)
    zero = sharded(model.parameters(), tp.optim.SGD, lr=0.1, sharding=Sharding(gradients=True))
    for step in range(3):
        plain.zero_grad()
        loss_of(reference, step).backward()
        average_in_rank_order(reference)
        expected = tp.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type).item()
        plain.step()
        zero.zero_grad()
        loss_of(model, step).backward()
        norm = zero.clip_grad_norm_(0.01, norm_type).item()
        zero.step()
        assert abs(norm - expected) <= bound * expected
    for param, other in zip(values(model), values(reference), strict=True):
        assert (param - other).abs().max().item() <= 3 * 0.1 * 0.01 * bound
