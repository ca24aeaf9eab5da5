import copy

import pytest
import torch

from shardopt.step import copy_options


def test_options_are_copied_group_by_group():
    target = [{"params": [1], "lr": 0.1}, {"params": [2], "lr": 0.1}]
    copy_options([{"params": [3], "lr": 0.5}, {"params": [4], "lr": 0.7}], target)
    assert target == [{"params": [1], "lr": 0.5}, {"params": [2], "lr": 0.7}]


def test_options_new_in_the_source_are_added():
    target = [{"params": [1]}]
    copy_options([{"params": [], "k": 3}], target)
    assert target == [{"params": [1], "k": 3}]


def test_names_of_parameters_are_not_copied():
    target = [{"params": [1], "param_names": ["w"]}]
    copy_options([{"params": [1, 2], "param_names": ["v", "w"]}], target)
    assert target == [{"params": [1], "param_names": ["w"]}]


def test_the_groups_themselves_stay_the_same_objects():
    target = [{"params": [1]}]
    group = target[0]
    copy_options([{"params": [], "lr": 0.5}], target)
    assert target[0] is group


def test_values_are_shared_so_that_a_tensor_stays_one_tensor():
    rate = torch.tensor(0.1)
    target = [{"params": [1]}]
    copy_options([{"params": [], "lr": rate}], target)
    assert target[0]["lr"] is rate


def test_the_source_is_left_alone():
    source = [{"params": [3], "lr": 0.5}]
    before = copy.deepcopy(source)
    copy_options(source, [{"params": [1], "momentum": 0.9}])
    assert source == before


def test_source_and_target_have_equally_many_groups():
    with pytest.raises(ValueError, match="zip"):
        copy_options([{"params": []}], [])
