import functools
import types

import pytest
import torch

from shardopt.collectives import HybridGroup, LoneRank, RankGroup
from shardopt.frameworks.shared import (
    ELEMENTWISE,
    SEPARABLE,
    find_group,
    fire_step_hooks,
    is_elementwise,
    is_separable,
)


class ProcessGroup:
    """A process group of a made-up framework."""

    def __init__(self, world_size=2, rank=0):
        self.world_size = world_size
        self.rank = rank


class Mesh:
    """A device mesh of a made-up framework."""

    def __init__(self, ndim, group):
        self.ndim = ndim
        self._group = group

    def get_group(self, dim=None):
        return self._group if dim is None else self._group[dim]


def make_distributed(world=None):
    """The ``distributed`` module of a made-up framework; initialized if there is a world."""
    return types.SimpleNamespace(
        __name__="made.up",
        ProcessGroup=ProcessGroup,
        GroupMember=types.SimpleNamespace(NON_GROUP_MEMBER=-100),
        group=types.SimpleNamespace(WORLD=world),
        is_initialized=lambda: world is not None,
        get_rank=lambda group=None: 5 if group is None else group.rank,
        get_world_size=lambda group: group.world_size,
        get_global_rank=lambda group, rank: rank,
    )


@pytest.fixture
def meetings():
    """Groups whose ranks met, with what they asked for."""
    return []


@pytest.fixture
def find(monkeypatch, meetings):
    """Find a group in a framework whose world has 4 ranks, unless told otherwise."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(RankGroup, "meet", lambda group, **asked: meetings.append((group, asked)))
    default = ProcessGroup(4)

    def call(process_group=None, *, world=default, shares_memory=True):
        return find_group(
            process_group,
            framework=None,
            distributed=make_distributed(world),
            mesh_class=Mesh,
            control_of=lambda group: group,
            timeout_of=lambda control: 10.0 * control.world_size,
            shares_memory=shares_memory,
        )

    return call


def test_without_a_launcher_this_process_is_alone(find):
    assert type(find(world=None)) is LoneRank


def test_a_launcher_of_one_process_is_no_other_process(find, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert type(find(world=None)) is LoneRank


def test_a_launcher_of_several_processes_needs_a_process_group(find, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError) as caught:
        find(world=None)
    assert str(caught.value) == (
        "made.up is not initialized, but WORLD_SIZE is above 1; call init_process_group() before making the optimizer"
    )


def test_a_process_group_needs_an_initialized_framework(find):
    with pytest.raises(RuntimeError) as caught:
        find(ProcessGroup(), world=None)
    assert str(caught.value) == (
        "made.up is not initialized, but a process_group was given; "
        "call init_process_group() before making the optimizer"
    )


def test_by_default_the_world_shares_the_work(find):
    assert find().world_size == 4


def test_a_process_group_shares_the_work(find):
    group = ProcessGroup(3, rank=2)
    found = find(group)
    assert (type(found), found.process_group, found.rank) == (RankGroup, group, 2)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_ranks_that_share_the_work_meet(find, meetings, shares_memory):
    found = find(shares_memory=shares_memory)
    assert meetings == [(found, {"shares_memory": shares_memory, "timeout_s": 40.0})]


def test_only_ranks_of_a_row_may_share_memory(find, meetings):
    find((ProcessGroup(3), ProcessGroup(2)))
    assert [asked for _, asked in meetings] == [
        {"shares_memory": True, "timeout_s": 30.0},
        {"shares_memory": False, "timeout_s": 20.0},
    ]


def test_a_process_group_of_one_is_a_lone_rank_that_knows_it(find):
    group = ProcessGroup(1)
    found = find(group)
    assert (type(found), found.process_group) == (LoneRank, group)


def test_a_mesh_of_one_dimension_shares_the_work(find):
    group = ProcessGroup(3)
    assert find(Mesh(1, group)).process_group is group


def test_a_mesh_of_two_dimensions_shards_along_the_second_and_replicates_along_the_first(find):
    replicas, shards = ProcessGroup(2, rank=1), ProcessGroup(3, rank=2)
    found = find(Mesh(2, [replicas, shards]))
    assert (type(found), found.world_size, found.num_members) == (HybridGroup, 3, 6)
    assert (found.rank, found.process_group is shards, found.is_first_replica) == (2, True, False)


def test_a_pair_of_groups_is_one_that_shards_and_one_that_replicates(find):
    shards, replicas = ProcessGroup(3, rank=2), ProcessGroup(2, rank=0)
    found = find((shards, replicas))
    assert (type(found), found.world_size, found.num_members) == (HybridGroup, 3, 6)
    assert (found.rank, found.process_group is shards, found.is_first_replica) == (2, True, True)


@pytest.mark.parametrize(("num_columns", "num_rows"), [(1, 3), (3, 1), (1, 1)])
def test_a_grid_may_be_one_rank_wide_or_high(find, num_columns, num_rows):
    found = find((ProcessGroup(num_columns), ProcessGroup(num_rows)))
    assert (found.world_size, found.num_members) == (num_columns, num_columns * num_rows)


def test_a_mesh_of_more_dimensions_is_refused_with_the_way_out(find):
    with pytest.raises(ValueError, match="DeviceMesh") as caught:
        find(Mesh(3, ProcessGroup()))
    assert str(caught.value) == (
        "process_group is a DeviceMesh of 3 dimensions, expected 1, or 2 to shard along the second and "
        "replicate along the first; pass one or two dimensions of it, e.g. mesh['data']"
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_process_has_to_be_a_member_of_both_groups_of_a_grid(find, place):
    pair = [ProcessGroup(), ProcessGroup()]
    pair[place] = ProcessGroup(rank=-1)
    with pytest.raises(ValueError, match="is no member of it"):
        find(tuple(pair))


@pytest.mark.parametrize("pair", [(ProcessGroup(), "data"), (1, ProcessGroup())], ids=str)
def test_a_pair_of_something_else_is_a_type_error(find, pair):
    with pytest.raises(TypeError, match="expected a ProcessGroup, a DeviceMesh, a pair of groups"):
        find(pair)


@pytest.mark.parametrize("group", [ProcessGroup(rank=-1), -100], ids=["group", "non-member"])
def test_a_process_that_is_no_member_is_refused_with_the_way_out(find, group):
    with pytest.raises(ValueError, match="process_group") as caught:
        find(group)
    assert str(caught.value) == (
        "process_group: global rank 5 is no member of it; "
        "make the optimizer only on the ranks that new_group() was given"
    )


def test_something_else_is_a_type_error(find):
    with pytest.raises(TypeError) as caught:
        find("data")
    assert str(caught.value) == (
        "process_group: expected a ProcessGroup, a DeviceMesh, a pair of groups (that shards, that replicates) or None, "
        "got str"
    )


# --- fire_step_hooks ------------------------------------------------------------------------------


def fired(*, before):
    """Who was called, in order."""
    called = []

    def hook(name):
        return lambda optimizer, args, kwargs: called.append((name, args == (optimizer,), kwargs))

    optimizer = types.SimpleNamespace(
        _optimizer_step_pre_hooks={0: hook("own pre")},
        _optimizer_step_post_hooks={0: hook("own post")},
    )
    fire_step_hooks(
        optimizer,
        before=before,
        global_before={0: hook("global pre")},
        global_after={0: hook("global post")},
    )
    return called


def test_before_a_step_global_hooks_come_first():
    assert [name for name, _, _ in fired(before=True)] == ["global pre", "own pre"]


def test_after_a_step_global_hooks_come_last():
    assert [name for name, _, _ in fired(before=False)] == ["own post", "global post"]


def test_hooks_get_what_a_step_without_arguments_gives_them():
    assert [rest for _, *rest in fired(before=True)] == [[True, {}]] * 2


# --- is_elementwise -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_known_optimizers_update_every_element_on_its_own(name):
    """Halves of a parameter, with the gradient's halves, end as the whole one does."""
    kind = getattr(torch.optim, name)
    whole = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 64))
    halves = [torch.nn.Parameter(half.clone()) for half in whole.detach().split(32)]
    optimizers = [kind([whole], lr=0.1), kind(halves, lr=0.1)]
    for step in range(3):
        whole.grad = torch.linspace(-2.0, 3.0, 64) * (step + 1)
        for half, gradient in zip(halves, whole.grad.split(32), strict=True):
            half.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert is_elementwise(kind, optim=torch.optim)
    assert torch.equal(torch.cat([half.detach() for half in halves]), whole.detach())


@pytest.mark.parametrize(
    "kind",
    [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer],
    ids=lambda kind: kind.__name__,
)
def test_other_optimizers_are_not_known_to_be_elementwise(kind):
    assert not is_elementwise(kind, optim=torch.optim)


def test_a_subclass_or_a_maker_of_a_known_optimizer_may_do_other_things():
    class Noisy(torch.optim.SGD):
        pass

    makers = [Noisy, functools.partial(torch.optim.SGD), lambda params: torch.optim.SGD(params)]
    assert [is_elementwise(maker, optim=torch.optim) for maker in makers] == [False] * 3


# --- is_separable ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ELEMENTWISE, *SEPARABLE])
def test_known_optimizers_update_every_parameter_on_its_own(name):
    """One parameter now and the other later end as both at once do."""
    kind = getattr(torch.optim, name)
    together, apart = ([torch.nn.Parameter(torch.ones(3, 4) * n) for n in (1, 2)] for _ in range(2))
    optimizers = [kind(together, lr=0.1), kind(apart, lr=0.1)]
    for step in range(3):
        for index in range(2):
            for params in (together, apart):
                params[index].grad = torch.linspace(-2.0, 3.0, 12).view(3, 4) * (step + index + 1)
        optimizers[0].step()
        [group] = optimizers[1].param_groups
        for param in apart:
            group["params"] = [param]
            optimizers[1].step()
        group["params"] = list(apart)
    assert is_separable(kind, optim=torch.optim)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


@pytest.mark.parametrize(
    "kind",
    [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer],
    ids=lambda kind: kind.__name__,
)
def test_other_optimizers_are_not_known_to_be_separable(kind):
    assert not is_separable(kind, optim=torch.optim)


def test_a_subclass_or_a_maker_of_a_separable_optimizer_may_do_other_things():
    class Noisy(torch.optim.Adafactor):
        pass

    makers = [Noisy, functools.partial(torch.optim.SGD), lambda params: torch.optim.SGD(params)]
    assert [is_separable(maker, optim=torch.optim) for maker in makers] == [False] * 3


def test_a_framework_without_some_of_the_optimizers_knows_the_others():
    optim = types.SimpleNamespace(**{name: getattr(torch.optim, name) for name in ELEMENTWISE})
    assert is_separable(torch.optim.Adam, optim=optim)
    assert not is_separable(torch.optim.Muon, optim=optim)
