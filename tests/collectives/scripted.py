"""A ``distributed`` module that writes down what is asked of it, and tensors that pretend to lie elsewhere."""

import types

import torch


class NamedGroup(str):
    """A process group that is told apart by name; unlike a plain string it can be referred to weakly."""


DATA, CONTROL = NamedGroup("data"), NamedGroup("control")


class Work:
    """Counts its waits and does its part at the first of them."""

    def __init__(self, then=lambda: None):
        self.num_waits = 0
        self._then = then

    def wait(self):
        self.num_waits += 1
        then, self._then = self._then, lambda: None
        then()


class Elsewhere(torch.Tensor):
    """A tensor in CPU memory that says it is not."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def elsewhere(tensor):
    return tensor.as_subclass(Elsewhere)


class Distributed:
    """One rank of the group of global ranks 4, 6, 9; by default rank 1.

    Collectives on tensors find the other ranks' tensors in ``theirs``, by rank.
    """

    ReduceOp = types.SimpleNamespace(MAX="max", SUM="sum")

    def __init__(self, rank=1):
        self.calls = []
        self.tags = []
        self.works = []
        self.theirs = {}
        self._rank = rank

    @property
    def num_waits(self):
        return [work.num_waits for work in self.works]

    def get_rank(self, group):
        return self._rank

    def get_world_size(self, group):
        return 3

    def get_global_rank(self, group, rank):
        return [4, 6, 9][rank]

    def _work(self, then=lambda: None):
        self.works.append(Work(then))
        return self.works[-1]

    # --- on tensors of any device -----------------------------------------------------------------

    def broadcast(self, tensor, *, src, group, async_op):
        self.calls.append(("broadcast", tensor.dtype, tensor.numel(), src, group, async_op))
        return self._work()

    def isend(self, tensor, *, dst, group, tag):
        self.tags.append(tag)
        self.calls.append(("isend", tensor.dtype, tensor.numel(), dst, group))
        return self._work()

    def irecv(self, tensor, *, src, group, tag):
        self.tags.append(tag)
        self.calls.append(("irecv", tensor.dtype, tensor.numel(), src, group))
        return self._work()

    def all_reduce(self, tensor, *, op, group):
        self.calls.append(("all_reduce", tensor.dtype, tensor.numel(), op, group))

    # --- on tensors elsewhere ---------------------------------------------------------------------

    def all_gather_into_tensor(self, flat, mine, *, group, async_op):
        self.calls.append(("all_gather_into_tensor", flat.data_ptr(), flat.numel(), mine.numel()))
        self.calls.append(("over", group, async_op))
        return self._work()

    def reduce_scatter_tensor(self, out, flat, *, group, async_op):
        self.calls.append(("reduce_scatter_tensor", flat.data_ptr(), flat.numel(), out.numel()))
        self.calls.append(("over", group, async_op))
        numel, start = out.numel(), self._rank * out.numel()
        parts = {r: t for r, t in self.theirs.items()}
        return self._work(lambda: self._sum(out, flat.narrow(0, start, numel), parts))

    def reduce_scatter(self, out, parts, *, group, async_op):
        self.calls.append(("reduce_scatter", [part.numel() for part in parts], out.numel()))
        self.calls.append(("over", group, async_op))
        return self._work(lambda: self._sum(out, parts[self._rank], self.theirs))

    def all_to_all(self, received, parts, *, group, async_op):
        self.calls.append(("all_to_all", [part.numel() for part in parts], len(received)))
        self.calls.append(("over", group, async_op))

        def deliver():
            for rank, place in enumerate(received):
                place.copy_(parts[rank] if rank == self._rank else self.theirs[rank])

        return self._work(deliver)

    def _sum(self, out, mine, theirs):
        everyone = {**theirs, self._rank: mine}
        out.copy_(sum(everyone[rank] for rank in sorted(everyone)))

    # --- on plain values --------------------------------------------------------------------------

    def all_gather(self, everyone, mine, *, group, async_op):
        assert async_op
        self.calls.append(("all_gather", mine.dtype, mine.numel(), group))
        for rank, theirs in enumerate(everyone):
            theirs.copy_(mine + rank)
        return self._work()

    def all_gather_object(self, everyone, value, *, group):
        self.calls.append(("all_gather_object", group))
        everyone[:] = [(rank, value) for rank in range(len(everyone))]
