import torch
import torch.distributed as dist

from shardopt.testing import run_ranks


@run_ranks(1, 2, 3)
def test_pool_runs(tmp_path):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()
