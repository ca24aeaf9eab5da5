import pytest

from shardopt.step import EvaluatedClosure, local_step


def test_the_closure_returns_the_loss_that_was_computed():
    loss = object()
    assert EvaluatedClosure(loss, lambda: [0, 0])() is loss


def test_a_second_evaluation_is_refused():
    closure = EvaluatedClosure(1.0, lambda: [0])
    closure()
    with pytest.raises(RuntimeError) as caught:
        closure()
    assert str(caught.value) == (
        "the wrapped optimizer evaluates the closure more than once in a step, which needs all parameters to be "
        "exchanged in between; use an optimizer that evaluates it at most once"
    )


def test_an_evaluation_after_parameters_changed_is_refused():
    versions = [0, 0]
    closure = EvaluatedClosure(1.0, lambda: list(versions))
    versions[1] += 1
    with pytest.raises(RuntimeError) as caught:
        closure()
    assert str(caught.value) == (
        "the wrapped optimizer changes parameters before it evaluates the closure, which would compute the loss with "
        "replicas that differ; compute the gradients before step() and pass no closure"
    )


def test_changes_after_the_evaluation_do_not_matter():
    versions = [0]
    closure = EvaluatedClosure(1.0, lambda: list(versions))
    loss = closure()
    versions[0] += 1
    assert loss == 1.0


def test_changes_before_the_closure_was_made_do_not_matter():
    assert EvaluatedClosure(1.0, lambda: [7, 3])() == 1.0


def test_a_rank_that_owns_nothing_can_evaluate():
    assert EvaluatedClosure(1.0, list)() == 1.0


# --- local_step -----------------------------------------------------------------------------------


class Optimizer:
    """Writes down what its step is given, and evaluates the closure."""

    def __init__(self):
        self.given = []

    def step(self, closure=None, **kwargs):
        self.given.append((closure, kwargs))
        return closure() if callable(closure) else "no closure"


def test_without_a_closure_the_local_optimizer_gets_none():
    optimizer = Optimizer()
    assert local_step(optimizer, None, None, list, {"foreach": True})() == "no closure"
    assert optimizer.given == [(None, {"foreach": True})]


def test_a_closure_is_not_evaluated_again():
    def closure():
        raise AssertionError("was evaluated before")

    assert local_step(Optimizer(), closure, "loss", lambda: [0], {})() == "loss"


def test_every_run_may_evaluate_its_closure_once():
    step = local_step(Optimizer(), len, "loss", lambda: [0], {})
    assert [step(), step(), step()] == ["loss"] * 3


def test_a_run_starts_from_the_versions_that_earlier_runs_have_left():
    versions = [0]
    step = local_step(Optimizer(), len, "loss", lambda: list(versions), {})
    step()
    versions[0] += 1
    assert step() == "loss"


def test_what_cannot_be_called_is_handed_on_as_it_is():
    optimizer = Optimizer()
    local_step(optimizer, "odd", None, list, {})()
    assert optimizer.given == [("odd", {})]
