import dataclasses

import pytest

from shardopt import Sharding


def test_a_bucket_is_25_mib_by_default():
    assert Sharding().bucket_nbytes == 25 * 2**20


@pytest.mark.parametrize(("mb", "nbytes"), [(1, 2**20), (0.5, 2**19), (1e-9, 1)])
def test_bucket_nbytes_is_bucket_mb_in_bytes_and_at_least_one(mb, nbytes):
    assert Sharding(bucket_mb=mb).bucket_nbytes == nbytes


@pytest.mark.parametrize("mb", [0, -1.5, float("nan")])
def test_a_bound_that_is_not_above_zero_is_refused(mb):
    with pytest.raises(ValueError, match="bucket_mb") as caught:
        Sharding(bucket_mb=mb)
    assert str(caught.value) == f"bucket_mb: expected a finite number of MiB above 0, got {mb!r}"


def test_a_bound_that_is_no_number_is_a_type_error():
    with pytest.raises(TypeError):
        Sharding(bucket_mb="25")


def test_an_infinite_bound_is_refused_at_the_door():
    with pytest.raises(ValueError, match="bucket_mb"):
        Sharding(bucket_mb=float("inf"))


def test_sharding_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sharding().bucket_mb = 1.0


def test_equal_options_are_equal_and_read_equally():
    assert (Sharding(bucket_mb=2) == Sharding(bucket_mb=2), str(Sharding(bucket_mb=2))) == (
        True,
        "Sharding(granularity='parameter', gradients=False, step_in_backward=False, master_dtype=None, "
        "reduce_dtype=None, sum_dtype=None, bucket_mb=2, shared_memory=True, state_dict='consolidated', elementwise=False, cost=None)",
    )


def test_whole_parameters_and_averaged_gradients_are_the_default():
    assert (Sharding().granularity, Sharding().gradients) == ("parameter", False)


@pytest.mark.parametrize("granularity", ["elements", "Parameter", None, 1])
def test_another_granularity_is_refused(granularity):
    with pytest.raises(ValueError, match="granularity") as caught:
        Sharding(granularity=granularity)
    assert str(caught.value) == (
        f"granularity: expected 'parameter' or 'element', got {granularity!r}"
    )


# --- options of gradients -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("step_in_backward", True), ("reduce_dtype", "bfloat16"), ("sum_dtype", "float32")],
)
def test_how_gradients_are_reduced_is_nothing_to_say_where_ddp_does_it(option, value):
    with pytest.raises(ValueError, match=option) as caught:
        Sharding(**{option: value})
    assert str(caught.value) == (
        f"{option}={value} says how gradients are reduced, which DDP does unless gradients=True; "
        f"set that, or leave {option} out"
    )


def test_everything_can_be_asked_for_together():
    sharding = Sharding(
        granularity="element",
        gradients=True,
        step_in_backward=True,
        master_dtype="float32",
        reduce_dtype="bfloat16",
        sum_dtype="float32",
        elementwise=True,
        cost=len,
    )
    assert (sharding.step_in_backward, sharding.cost) == (True, len)


def test_master_weights_need_no_sharded_gradients():
    assert Sharding(master_dtype="float32").gradients is False


# --- fingerprint ----------------------------------------------------------------------------------------


def test_ranks_compare_every_option_but_the_cost():
    assert Sharding(bucket_mb=2, cost=len).fingerprint() == (
        "granularity=parameter, gradients=False, step_in_backward=False, master_dtype=None, reduce_dtype=None, "
        "sum_dtype=None, bucket_mb=2, shared_memory=True, state_dict=consolidated, elementwise=False"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"granularity": "element"},
        {"gradients": True},
        {"master_dtype": "float32"},
        {"gradients": True, "reduce_dtype": "bfloat16"},
        {"gradients": True, "sum_dtype": "float32"},
        {"gradients": True, "step_in_backward": True},
        {"bucket_mb": 24.0},
        {"elementwise": True},
    ],
    ids=str,
)
def test_facts_differ_where_ranks_must_not(change):
    rest = {"gradients": True} if len(change) > 1 else {}
    assert Sharding(**change).fingerprint() != Sharding(**rest).fingerprint()


def test_costs_that_are_other_functions_are_no_difference():
    assert (
        Sharding(cost=lambda spec: 1.0).fingerprint()
        == Sharding(cost=lambda spec: 1.0).fingerprint()
    )
