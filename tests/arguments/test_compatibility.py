import dataclasses
import functools
import logging

import pytest
import torch

from shardopt import Sharding
from shardopt.arguments import name_of, policy_fingerprint, require_possible, take_granularities
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


# --- policy_fingerprint ---------------------------------------------------------------------------------


def test_the_policy_in_words():
    fingerprint = policy_fingerprint(
        torch.optim.Adam, Sharding(bucket_mb=1), has_views=True, overlaps=False
    )
    assert fingerprint == [
        ("optimizer_class", "Adam"),
        ("parameters_as_bucket_view", "True"),
        ("overlap_with_ddp", "False"),
        ("sharding", Sharding(bucket_mb=1).fingerprint()),
    ]


# --- require_possible -----------------------------------------------------------------------------


@pytest.mark.parametrize("has_views", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_whole_parameters_are_possible_with_any_optimizer(has_views, gradients):
    check(Outer.Inner, sharding=Sharding(gradients=gradients), has_views=has_views)


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


@pytest.mark.parametrize("change", [{"master_dtype": torch.float32}, {"cost": len}], ids=str)
def test_overlap_excludes_further_options_too(change):
    assert text_of(sharding=Sharding(**change), overlaps=True).startswith(
        "overlap_with_ddp=True steps whole parameters in DDP's backward, so it excludes Sharding("
    )


@pytest.mark.parametrize("sharding", ["element", None, {"gradients": True}], ids=str)
def test_a_policy_that_is_none_is_a_type_error(sharding):
    with pytest.raises(TypeError) as caught:
        require_possible(TORCH, torch.optim.Adam, sharding, has_views=False, overlaps=False)
    assert str(caught.value) == (f"sharding: expected a Sharding, got {type(sharding).__name__}")


def test_what_cannot_make_an_optimizer_is_a_type_error():
    with pytest.raises(TypeError) as caught:
        check("Adam")
    assert str(caught.value) == "optimizer_class: expected a class, got 'Adam'"


# --- steps in backward ----------------------------------------------------------------------------

IN_BACKWARD = Sharding(gradients=True, step_in_backward=True)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.Muon])
def test_steps_in_backward_are_possible_where_every_parameter_is_updated_on_its_own(kind):
    check(kind, sharding=IN_BACKWARD)


class Subclass(torch.optim.Adam):
    pass


def test_steps_in_backward_need_an_optimizer_known_to_update_every_parameter_on_its_own():
    assert text_of(optimizer_class=Subclass, sharding=IN_BACKWARD) == (
        "optimizer_class: Subclass is not known to update every parameter on its own, so it cannot be run bucket by "
        "bucket; use step_in_backward=False"
    )


def test_steps_in_backward_need_a_backward_that_can_be_watched():
    framework = dataclasses.replace(TORCH, name="made up", autograd=None)
    assert text_of(framework=framework, sharding=IN_BACKWARD) == (
        f"{IN_BACKWARD}: backward cannot be watched in made up; use step_in_backward=False"
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


# --- take_granularities ---------------------------------------------------------------------------


def take(*granularities, optimizer_class=torch.optim.AdamW, sharding=None, has_views=True):
    """Take from groups that name a granularity, or none where it is None; returns that, and what is left."""
    groups = [
        {"lr": 0.1} if granularity is None else {"lr": 0.1, "granularity": granularity}
        for granularity in granularities
    ]
    taken = take_granularities(
        TORCH, optimizer_class, sharding or Sharding(), groups, has_views=has_views
    )
    return taken, groups


def refusal(*granularities, **arguments):
    with pytest.raises(ValueError, match=r".") as caught:
        take(*granularities, **arguments)
    return str(caught.value)


def test_groups_without_their_own_granularity_have_that_of_the_policy():
    assert take(None, None)[0] == ["parameter"] * 2
    assert take(None, None, sharding=BY_ELEMENT)[0] == ["element"] * 2


def test_a_group_may_have_its_own_granularity():
    assert take("element", None, "parameter")[0] == ["element", "parameter", "parameter"]
    assert take("parameter", None, sharding=BY_ELEMENT)[0] == ["parameter", "element"]


def test_a_granularity_is_no_option_of_the_wrapped_optimizer():
    assert take("element", None)[1] == [{"lr": 0.1}] * 2


@pytest.mark.parametrize("granularity", ["elements", 3], ids=str)
def test_a_granularity_that_is_none_is_refused(granularity):
    assert refusal("parameter", granularity) == (
        "granularity of a param group: expected one of ('parameter', 'element'), got "
        f"{granularity!r}"
    )


@pytest.mark.parametrize("kind", [Outer.Inner, torch.optim.Adafactor, Subclass])
@pytest.mark.parametrize("has_views", [False, True])
def test_whole_parameters_can_be_had_of_every_optimizer(kind, has_views):
    assert (
        take(None, "parameter", optimizer_class=kind, has_views=has_views)[0] == ["parameter"] * 2
    )


@pytest.mark.parametrize("granularity", [None, "element"])
def test_elements_need_views(granularity):
    sharding = Sharding() if granularity else BY_ELEMENT
    assert refusal(granularity, sharding=sharding, has_views=False) == (
        "element granularity cuts flat buckets, of which parameters have to be views; pass "
        "parameters_as_bucket_view=True, and overlap_with_ddp=False"
    )


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(elementwise=True)], ids=str)
def test_elements_are_not_to_be_had_of_what_is_known_to_look_at_whole_parameters(kind, sharding):
    assert refusal("element", optimizer_class=kind, sharding=sharding) == (
        f"optimizer_class: {kind.__name__} looks at whole parameters, so parts of them would give other results, "
        "silently; use granularity='parameter'"
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Subclass, "Subclass"), (functools.partial(torch.optim.Adam), "partial")],
    ids=["subclass", "partial"],
)
def test_elements_need_an_optimizer_known_to_update_each_on_its_own(kind, name):
    assert refusal("element", optimizer_class=kind) == (
        f"optimizer_class: {name} is not known to update every element on its own, so parts of parameters could give "
        "other results, silently; use granularity='parameter', or vouch for it with Sharding(elementwise=True)"
    )


@pytest.mark.parametrize("kind", [Subclass, functools.partial(torch.optim.Adam)])
def test_a_user_can_vouch_for_an_optimizer(kind):
    assert take("element", optimizer_class=kind, sharding=Sharding(elementwise=True))[0] == [
        "element"
    ]


def test_an_optimizer_of_one_group_by_element_and_one_by_parameter_has_to_fit_the_former():
    assert "looks at whole parameters" in refusal(
        "parameter", "element", optimizer_class=torch.optim.Muon
    )
