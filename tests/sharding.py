"""Shards of a few parameters, for ranks that are threads."""

import torch

from shardopt import Sharding
from shardopt.frameworks.torch import TORCH
from shardopt.shards import Shards

POLICY = [("optimizer_class", "Adam")]


def make_groups(*numels, lr=0.1):
    return [{"params": [torch.nn.Parameter(torch.ones(n)) for n in numels], "lr": lr}]


def make_shards(group, *, has_views=False, **options):
    return Shards(group, TORCH, Sharding(**options), has_views=has_views)


def planned(shards, groups, *, policy=POLICY):
    """The plan for groups that have no granularity of their own."""
    return shards.plan(groups, [shards._sharding.granularity] * len(groups), policy)


def admitted(group, groups, **options):
    shards = make_shards(group, **options)
    shards.admit(groups, planned(shards, groups))
    return shards


def by_element(group, groups, **options):
    return admitted(group, groups, has_views=True, granularity="element", **options)


def in_memory_order(tensor):
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def make_odd_groups():
    """A channels-last parameter, one with gaps, an empty one, and two more in a second group."""
    tensors = [
        torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(3, 8)[:, ::2],
        torch.zeros(0, 2),
        torch.tensor(7.0),
        torch.arange(40.0),
    ]
    params = [torch.nn.Parameter(tensor) for tensor in tensors]
    return [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.2}]
