"""``Sharding(state_dict="sharded")``: each rank's own part, at any moment, without communication."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardopt.testing import run_ranks
from tests.ranks.checkpointing import WAYS, Way, full_state, make, make_model, train
from tests.ranks.traffic import counted
from tests.ranks.training import assert_equal, assert_same_params, raises_everywhere

ways = pytest.mark.parametrize("way", WAYS, ids=str)


@ways
@run_ranks(1, 3)
def test_it_never_raises_and_takes_no_communication(way: Way) -> None:
    model = make_model(way.dtype)
    zero = make(model, way, state_dict="sharded")
    for steps in (range(0), range(2)):
        train(model, zero, steps)
        with counted() as traffic:
            state = zero.state_dict()
        assert traffic.messages == []
        assert [len(group["params"]) for group in state["param_groups"]] == [6]
    owned = {part.param for part in zero.shards.parts}
    assert set(state["state"]) <= owned


@ways
@run_ranks(1, 2, 3)
def test_a_copy_restores_the_optimizer_again_and_again(way: Way) -> None:
    """As finders of learning rates do."""
    model = make_model(way.dtype)
    zero = make(model, way, state_dict="sharded")
    train(model, zero, range(2))
    kept = copy.deepcopy((zero.state_dict(), model.state_dict()))
    train(model, zero, range(2, 5))
    expected = copy.deepcopy(model.state_dict())
    for rate in (0.5, 0.25):
        zero.load_state_dict(kept[0])
        model.load_state_dict(kept[1])
        zero.param_groups[0]["lr"] = rate
        train(model, zero, range(2, 4))
    zero.load_state_dict(kept[0])
    model.load_state_dict(kept[1])
    assert zero.param_groups[0]["lr"] == 0.01
    train(model, zero, range(2, 5))
    assert_equal(dict(model.state_dict()), dict(expected))


@run_ranks(2)
def test_it_survives_pickling_and_moving() -> None:
    """What Hugging Face Accelerate does when it prepares an optimizer, and what ``torch.save`` does."""
    way = Way("element", True, True)
    model = make_model(way.dtype)
    zero = make(model, way, state_dict="sharded")
    train(model, zero, range(2))
    expected = full_state(make_again(model, way, zero))

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)({key: moved(item) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return type(value)(moved(item) for item in value)
        return value.to("cpu") if torch.is_tensor(value) else value

    buffer = io.BytesIO()
    torch.save(moved(zero.state_dict()), buffer)
    buffer.seek(0)
    other = make(make_model(way.dtype, seed=0), way)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_equal(full_state(other), expected)


def make_again(model: Any, way: Way, zero: Any) -> Any:
    """An optimizer of the default policy with the same state."""
    again = make(model, way)
    again.load_state_dict(copy.deepcopy(zero.state_dict()))
    return again


@run_ranks(2)
def test_the_part_of_another_rank_is_refused_on_all_with_nothing_loaded() -> None:
    way = Way("parameter", False)
    model = make_model()
    zero = make(model, way, state_dict="sharded")
    train(model, zero, range(2))
    parts: list[Any] = [None] * 2
    dist.all_gather_object(parts, zero.state_dict())
    train(model, zero, range(2, 4))
    before = copy.deepcopy(zero.state_dict())
    texts = raises_everywhere(lambda: zero.load_state_dict(parts[0]))
    assert all("the part of rank 0 of 2; expected that of rank 1 of 2" in t for t in texts), texts
    assert all("use save() and load()" in text for text in texts), texts
    plain = torch.optim.AdamW(make_model().parameters(), lr=0.01)
    texts = raises_everywhere(
        lambda: zero.load_state_dict(parts[0] if dist.get_rank() == 0 else plain.state_dict())
    )
    assert all("a full state dict, while other ranks pass their parts" in t for t in texts), texts
    assert_equal(zero.state_dict()["state"], before["state"])


@run_ranks(2)
def test_full_state_dicts_are_still_collected_and_loaded_as_ever() -> None:
    way = Way("element", False)
    model = make_model()
    zero = make(model, way, state_dict="sharded")
    train(model, zero, range(2))
    plain_model = make_model()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    train(plain_model, plain, range(2))
    train(model, zero, range(2, 3))
    zero.load_state_dict(plain.state_dict())
    model.load_state_dict(plain_model.state_dict())
    train(model, zero, range(2, 4))
    train(plain_model, plain, range(2, 4))
    assert_same_params(model, plain_model)
