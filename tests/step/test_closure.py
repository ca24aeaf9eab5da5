import pytest

from shardopt.step import EvaluatedClosure


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
