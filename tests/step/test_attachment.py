"""Forwards that wait for the parameters they use, with an exchange that writes down what is waited for."""

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.step import Attachment, equalize_buffers
from tests.sharding import admitted, planned


class Block(torch.nn.Module):
    """Calls its first layer; its second is used without being called, as tied weights are."""

    def __init__(self):
        super().__init__()
        self.called = torch.nn.Linear(2, 2, bias=False)
        self.used = torch.nn.Linear(2, 2, bias=False)
        self.own = torch.nn.Parameter(torch.ones(2))

    def forward(self, values):
        return torch.nn.functional.linear(self.called(values), self.used.weight) * self.own


class Exchange:
    """Writes down what it is asked to wait for."""

    def __init__(self):
        self.events = []

    def wait(self, number):
        self.events.append(number)

    def drain(self):
        self.events.append("all")

    def taken(self):
        """What was waited for since the last time."""
        events, self.events = self.events, []
        return events


class Attached:
    """A module that is attached to shards of its parameters, each in a bucket of its own."""

    def __init__(self, module, params=None, *, outside_of_graphs=lambda function: function):
        self.module = module
        self.groups = [{"params": list(module.parameters() if params is None else params)}]
        self.shards = admitted(
            LoneRank(), self.groups, has_views=True, granularity="element", bucket_mb=1e-9
        )
        self.exchange = Exchange()
        self.attachment = Attachment(module, self.exchange, self.shards, outside_of_graphs)

    def bucket(self, param):
        [index] = [i for i, p in enumerate(self.shards.params) if p is param]
        return self.shards.bucket_of[index]

    def forward(self):
        """What a forward waits for, in order."""
        self.module(torch.ones(1, 2))
        return self.exchange.taken()


def buckets(attached, *params):
    return [attached.bucket(param) for param in params]


def test_a_forward_waits_for_the_parameters_of_each_submodule_it_calls_and_for_all_at_its_end():
    attached = Attached(Block())
    block = attached.module
    assert attached.forward() == [*buckets(attached, block.own, block.called.weight), "all"]


def test_after_the_first_forward_the_parameters_of_submodules_that_are_not_called_come_first():
    attached = Attached(Block())
    block = attached.module
    attached.forward()
    expected = buckets(attached, block.used.weight, block.own, block.called.weight)
    assert attached.forward() == [*expected, "all"]


def test_a_submodule_that_is_called_later_is_waited_for_where_it_is():
    attached = Attached(Block())
    block = attached.module
    attached.forward()
    block.forward = lambda values: block.used(block.called(values))
    attached.forward()
    waited = attached.forward()
    assert waited == [
        *buckets(attached, block.own, block.called.weight, block.used.weight),
        "all",
    ]


def test_only_a_forward_shows_which_submodules_are_called():
    attached = Attached(Block())
    is_ready = attached.attachment.is_ready
    attached.forward()
    assert (is_ready, attached.attachment.is_ready) == (False, True)


def test_a_forward_that_fails_waits_for_everything():
    attached = Attached(Block())
    with pytest.raises(RuntimeError, match="shapes"):
        attached.module(torch.ones(1, 3))
    assert attached.exchange.taken()[-1] == "all"


def test_parameters_of_others_are_not_waited_for():
    block = Block()
    attached = Attached(block, [block.called.weight])
    assert attached.forward() == [attached.bucket(block.called.weight), "all"]


def test_parameters_in_one_bucket_are_waited_for_once_per_submodule():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": list(module.parameters())}]
    shards = admitted(LoneRank(), groups, has_views=True)
    exchange = Exchange()
    Attachment(module, exchange, shards, lambda function: function)
    module(torch.ones(1, 2))
    assert exchange.taken() == [0, 0, "all"]


def test_a_module_that_is_called_twice_in_a_forward_is_waited_for_each_time():
    layer = torch.nn.Linear(2, 2, bias=False)
    attached = Attached(torch.nn.Sequential(layer, layer))
    assert attached.forward() == [0, 0, "all"]


def test_a_submodule_that_is_called_alone_waits_for_its_parameters():
    attached = Attached(Block())
    attached.module.called(torch.ones(1, 2))
    assert attached.exchange.taken() == [attached.bucket(attached.module.called.weight)]


def test_a_compiled_submodule_stands_for_all_that_is_in_it():
    class Compiled(torch.nn.Module):
        def __init__(self, original):
            super().__init__()
            self._orig_mod = original

        def forward(self, values):
            return values

    attached = Attached(torch.nn.Sequential(Compiled(Block())))
    assert sorted(attached.forward()[:-1]) == [0, 1, 2]


def test_hooks_are_kept_out_of_graphs():
    made = []

    def outside(function):
        made.append(function)
        return function

    attached = Attached(Block(), outside_of_graphs=outside)
    assert len(made) == 2 + 3  # begin and end, and a hook for each module that holds parameters
    assert attached.forward()[-1] == "all"


@pytest.mark.parametrize("pick", [lambda m: m, lambda m: m.called], ids=["outermost", "inner"])
def test_a_state_dict_is_read_once_everything_is_there(pick):
    attached = Attached(Block())
    pick(attached.module).state_dict()
    assert set(attached.exchange.taken()) == {"all"}


def test_parameters_that_were_added_later_are_waited_for_too():
    """Of layers that are unfrozen in mid-training, say."""
    block = Block()
    attached = Attached(block, [block.called.weight])
    attached.forward()
    attached.groups.append({"params": [block.used.weight, block.own]})
    attached.shards.admit(attached.groups, planned(attached.shards, attached.groups))
    attached.attachment.read()
    attached.forward()
    waited = attached.forward()
    end = waited.index("all")
    assert set(waited[:end]) == {0, 1, 2}


def test_parameters_that_are_no_bucket_views_cannot_arrive_during_forward():
    block = Block()
    shards = admitted(LoneRank(), [{"params": list(block.parameters())}])
    with pytest.raises(ValueError, match="attach") as caught:
        Attachment(block, Exchange(), shards, lambda function: function)
    assert str(caught.value) == (
        "attach() lets parameters arrive during forward, for which they have to be bucket views; pass "
        "parameters_as_bucket_view=True, and overlap_with_ddp=False"
    )


def test_a_module_that_cannot_be_attached_is_left_without_hooks():
    block = Block()
    shards = admitted(LoneRank(), [{"params": list(block.parameters())}])
    exchange = Exchange()
    with pytest.raises(ValueError, match="attach"):
        Attachment(block, exchange, shards, lambda function: function)
    block(torch.ones(1, 2))
    assert exchange.events == []


# --- equalize_buffers -----------------------------------------------------------------------------


def with_buffers(rank, *, numel=4):
    """A module whose buffers say which rank made them: contiguous, of no dimension, transposed, and none."""
    module = torch.nn.Module()
    module.register_buffer("mean", torch.full((numel,), float(rank)))
    module.register_buffer("count", torch.tensor(rank))
    module.register_buffer("matrix", (torch.arange(6.0).view(3, 2) + 10 * rank).t())
    module.register_buffer("nothing", None)
    module.register_buffer("empty", torch.zeros(0))
    return module


def test_buffers_become_those_of_the_first_rank(run_threads):
    def serve(group):
        module = with_buffers(group.rank)
        equalize_buffers(group, module)
        return module.mean.tolist(), module.count.item(), module.matrix.tolist()

    run = run_threads(3, serve)
    expected = ([0.0] * 4, 0, [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]])
    assert (run.texts, run.results) == ([""] * 3, [expected] * 3)


def test_buffers_stay_where_they_are(run_threads):
    def serve(group):
        module = with_buffers(group.rank)
        before = [(b.data_ptr(), b.stride()) for b in module.buffers()]
        equalize_buffers(group, module)
        return before == [(b.data_ptr(), b.stride()) for b in module.buffers()]

    assert run_threads(2, serve).results == [True, True]


def test_other_buffers_on_one_rank_are_named_on_every_rank(run_threads):
    def serve(group):
        equalize_buffers(group, with_buffers(group.rank, numel=4 + group.rank))

    run = run_threads(2, serve)
    text = (
        "RankMismatchError: every rank must attach the same module: rank 1 was given other things than rank 0; first "
        "difference at buffer 'mean': (5,) torch.float32 on rank 1, (4,) torch.float32 on rank 0"
    )
    assert run.texts == [text, text]


def test_something_without_buffers_on_one_rank_stops_every_rank(run_threads):
    run = run_threads(2, lambda g: equalize_buffers(g, with_buffers(0) if g.rank else None))
    assert run.texts[0].startswith("AttributeError")
    assert run.texts[1].startswith("RemoteRankError: reading the module's buffers failed")
