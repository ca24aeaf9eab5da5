import pytest
import torch

from shardopt.step import only_params


@pytest.fixture
def groups():
    params = [torch.zeros(1) for _ in range(4)]
    return [
        {"params": params[:2], "param_names": ["a", "b"], "lr": 0.1},
        {"params": params[2:], "lr": 0.2},
    ]


def test_groups_hold_only_the_chosen_params_inside_the_block(groups):
    b, c = groups[0]["params"][1], groups[1]["params"][0]
    with only_params(groups, [b, c]):
        assert [[id(p) for p in group["params"]] for group in groups] == [[id(b)], [id(c)]]


def test_names_follow_their_params_inside_the_block(groups):
    with only_params(groups, [groups[0]["params"][1]]):
        assert groups[0]["param_names"] == ["b"]


def test_no_names_are_invented_inside_the_block(groups):
    with only_params(groups, []):
        assert "param_names" not in groups[1]


def test_the_lists_of_the_groups_are_back_after_the_block(groups):
    lists = [group["params"] for group in groups]
    with only_params(groups, []):
        pass
    assert [g["params"] is kept for g, kept in zip(groups, lists, strict=True)] == [True, True]


def test_the_groups_are_as_before_after_an_exception(groups):
    before = [dict(group) for group in groups]
    with pytest.raises(ValueError, match="odd"):
        with only_params(groups, []):
            raise ValueError("odd")
    assert [list(map(id, g.values())) for g in groups] == [
        list(map(id, g.values())) for g in before
    ]


def test_options_written_inside_the_block_stay(groups):
    with only_params(groups, []):
        groups[1]["lr"] = 0.5
    assert groups[1]["lr"] == 0.5


def test_the_chosen_params_are_read_once(groups):
    b = groups[0]["params"][1]
    with only_params(groups, iter([b])):
        assert [len(group["params"]) for group in groups] == [1, 0]


def test_params_keep_their_order_whatever_the_order_of_the_chosen_ones(groups):
    a, b = groups[0]["params"]
    with only_params(groups, [b, a]):
        assert [id(p) for p in groups[0]["params"]] == [id(a), id(b)]


def test_what_is_in_no_group_does_not_matter(groups):
    with only_params(groups, [torch.zeros(1)]):
        assert [group["params"] for group in groups] == [[], []]
