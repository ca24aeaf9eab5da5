import dataclasses
import functools
import logging

import pytest
import torch

from shardopt import Sharding
from shardopt.arguments import name_of, policy_facts, require_possible
from shardopt.frameworks.torch import TORCH

BY_ELEMENT = Sharding(granularity="element")


def check(
    optimizer_class=torch.optim.Adam,
    *,
    sharding=None,
    has_views=False,
    overlaps=False,
    framework=TORCH,
):
    require_possible(
        framework,
        optimizer_class,
        sharding or Sharding(),
        has_views=has_views,
        overlaps=overlaps,
    )


def text_of(**arguments):
    with pytest.raises(ValueError, match=r".") as caught:
        check(**arguments)
    return str(caught.value)


# --- name_of --------------------------------------------------------------------------------------


def test_a_class_is_called_by_its_name():
    assert name_of(torch.optim.Adam) == "Adam"


def test_what_has_no_name_is_called_by_its_type():
    assert name_of(functools.partial(torch.optim.Adam, lr=1.0)) == "partial"


def test_a_class_inside_another_is_called_by_both():
    assert name_of(Outer.Inner) == "Outer.Inner"


class Outer:
    class Inner:
        pass


# --- policy_facts ---------------------------------------------------------------------------------


def test_the_policy_in_words():
    facts = policy_facts(torch.optim.Adam, Sharding(bucket_mb=1), has_views=True, overlaps=False)
    assert facts == [
        ("optimizer_class", "Adam"),
        ("parameters_as_bucket_view", "True"),
        ("overlap_with_ddp", "False"),
        ("sharding", "Sharding(granularity='parameter', gradients=False, bucket_mb=1)"),
    ]


# --- require_possible -----------------------------------------------------------------------------


@pytest.mark.parametrize("has_views", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_whole_parameters_are_possible_with_any_optimizer(has_views, gradients):
    check(Outer.Inner, sharding=Sharding(gradients=gradients), has_views=has_views)


@pytest.mark.parametrize("gradients", [False, True])
def test_elements_are_possible_with_views_and_an_elementwise_optimizer(gradients):
    sharding = Sharding(granularity="element", gradients=gradients)
    check(torch.optim.AdamW, sharding=sharding, has_views=True)


def test_overlap_is_possible_with_any_bucket_size():
    check(sharding=Sharding(bucket_mb=1), overlaps=True)


def test_an_optimizer_that_cannot_be_sharded_is_refused_with_the_reason():
    assert text_of(optimizer_class=torch.optim.LBFGS) == (
        "optimizer_class: LBFGS takes inner products over all parameters and evaluates the closure repeatedly, so it "
        "cannot be sharded by parameter; use it unsharded, or choose an optimizer that updates each parameter on its own"
    )


@pytest.mark.parametrize("sharding", [Sharding(gradients=True), BY_ELEMENT], ids=str)
def test_overlap_excludes_what_does_not_go_with_ddp(sharding):
    assert text_of(sharding=sharding, overlaps=True, has_views=True) == (
        f"overlap_with_ddp=True steps whole parameters in DDP's backward, so it excludes {sharding}; "
        "use overlap_with_ddp=False"
    )


def test_elements_need_views():
    assert text_of(sharding=BY_ELEMENT) == (
        "Sharding(granularity='element') cuts flat buckets, of which parameters have to be views; pass "
        "parameters_as_bucket_view=True"
    )


class Subclass(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("optimizer_class", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),
        (Subclass, "Subclass"),
        (functools.partial(torch.optim.Adam), "partial"),
    ],
    ids=["adafactor", "subclass", "partial"],
)
def test_elements_need_an_optimizer_known_to_update_each_on_its_own(optimizer_class, name):
    assert text_of(optimizer_class=optimizer_class, sharding=BY_ELEMENT, has_views=True) == (
        f"optimizer_class: {name} is not known to update every element on its own, so parts of parameters could give "
        "other results, silently; use Sharding(granularity='parameter')"
    )


def test_a_framework_without_ddp_refuses_overlap_only():
    framework = dataclasses.replace(TORCH, reject_overlap=lambda: "there is no DDP")
    check(framework=framework)
    assert text_of(framework=framework, overlaps=True) == "overlap_with_ddp=True: there is no DDP"


@pytest.mark.parametrize(
    ("has_views", "overlaps"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_views_that_have_no_effect_are_logged(caplog, has_views, overlaps):
    with caplog.at_level(logging.WARNING):
        check(has_views=has_views, overlaps=overlaps)
    expected = [
        "parameters_as_bucket_view has no effect with overlap_with_ddp=True: DDP's buckets are exchanged"
    ]
    assert caplog.messages == (expected if has_views and overlaps else [])
