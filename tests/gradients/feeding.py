"""One rank's parameters with what averages their gradients, fed by an autograd that does as it is told."""

import types

import torch

from shardopt.arguments import read_specs
from shardopt.buffers import GradientBucket
from shardopt.collectives import StagingPool
from shardopt.frameworks.torch import TORCH
from shardopt.gradients import (
    BackwardHooks,
    GradientFinalizer,
    GradientPlaceholders,
    GradientReducer,
)
from shardopt.partition import parts_of, plan_element_layout

NUMELS = (4, 6, 8, 0)


def gradient(index, value):
    return torch.full((NUMELS[index],), float(value))


class Placeholder(torch.Tensor):
    """What ``param.grad`` is while the gradient is elsewhere."""


class Autograd:
    """Watches parameters; a backward holds its callbacks until it ends, or lets go of them where it fails."""

    def __init__(self, params):
        self._index_of = {id(param): index for index, param in enumerate(params)}
        self.watched = {}
        self.num_watched = 0
        self.callbacks = []

    def watch(self, param, before, after):
        index = self._index_of[id(param)]
        self.num_watched += 1
        self.watched[index] = types.SimpleNamespace(before=before, after=after)

    def at_end_of_backward(self, callback):
        self.callbacks.append(callback)

    def placeholder(self, param, source, index):
        return torch.zeros_like(param).as_subclass(Placeholder)


class Rank:
    """Three parameters, each cut over ranks in a bucket of its own, and an empty one."""

    def __init__(
        self, group, *, frozen=(), has_autograd=True, is_paused=lambda: False, step_in_backward=None
    ):
        self.group = group
        self.params = [torch.nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
        for index in frozen:
            self.params[index].requires_grad_(False)
        self.specs = read_specs([{"params": self.params}], ["element"])
        layout = plan_element_layout(
            self.specs, world_size=group.world_size, bucket_nbytes=1, alignment_nbytes=1
        )
        self.parts = parts_of(self.specs, [0] * len(NUMELS), layout.buckets, group.rank)
        pool = StagingPool()
        self.buckets = [
            GradientBucket(
                bucket,
                self.params,
                self.specs,
                rank=group.rank,
                num_members=group.num_members,
                wire_dtype=None,
                sum_dtype=None,
                pool=pool,
                scale_into=TORCH.scale_into,
            )
            for bucket in layout.buckets
        ]
        self.bucket_of = {p: n for n, b in enumerate(self.buckets) for p in b.plan.params}
        self.autograd = Autograd(self.params) if has_autograd else None
        self.asked_norms = []
        self.reducer = GradientReducer(
            group, self.buckets, self.params, self.specs, in_flight_nbytes=2**20
        )
        placeholders = GradientPlaceholders(self.params, self.reducer, self.owned, self.autograd)
        self.finalizer = GradientFinalizer(
            group,
            self.reducer,
            placeholders,
            params=self.params,
            bucket_of=self.bucket_of,
            owned=self.owned,
            norms=self._norms,
            is_paused=is_paused,
            step_in_backward=step_in_backward,
        )
        self.hooks = BackwardHooks(
            self.finalizer,
            placeholders,
            params=self.params,
            bucket_of=self.bucket_of,
            autograd=self.autograd,
            is_paused=is_paused,
        )

    def backward(self, values, *, fails=False, between=lambda: None):
        """Accumulate gradients, full of a value each, in the order given; a failure comes after them."""
        for index, value in values.items():
            if index in self.autograd.watched:
                self.autograd.watched[index].before()
                param = self.params[index]
                new = gradient(index, value)
                param.grad = new if param.grad is None else param.grad + new
                self.autograd.watched[index].after()
                between()
        callbacks, self.autograd.callbacks = self.autograd.callbacks, []
        while callbacks:
            callback = callbacks.pop(0)
            if not fails:
                callback()
            del callback

    def finalize(self, *, has_inputs=True):
        """What a step does before it updates."""
        reports = self.group.all_gather_ints(self.finalizer.report(has_inputs=has_inputs))
        self.finalizer.finalize(reports, has_inputs=has_inputs)
        self.reducer.complete_all()

    def step(self, values):
        """A backward, and what a step does around its update."""
        self.backward(values)
        self.finalize()
        self.forget(after_step=True)

    def forget(self, *, after_step):
        """What a step does after its update, and ``zero_grad()``."""
        self.finalizer.forget(after_step=after_step)
        self.hooks.watch()

    def owned(self, index):
        """This rank's part of a parameter's average."""
        if any(part.param == index and part.numel for part in self.parts):
            return self.buckets[self.bucket_of[index]].reduced(index, is_whole=False)
        return None

    def _norms(self, norm_type, used):
        self.asked_norms.append((norm_type, list(used)))
        return torch.tensor([norm_type * (1 + index) for index in range(len(NUMELS))])

    @property
    def averages(self):
        """The values of this rank's part of each average."""
        owned = {part.param: self.owned(part.param) for part in self.parts if part.numel}
        return {index: set(values.tolist()) for index, values in owned.items()}

    @property
    def shown(self):
        """Which parameters with elements show one."""
        return [isinstance(param.grad, Placeholder) for param in self.params[:3]]


def values_of(run, pick=lambda result: result):
    """The values of each parameter's average, from the parts of all ranks."""
    found = {}
    for result in run.results:
        for index, values in pick(result).items():
            found.setdefault(index, set()).update(values)
    return dict(sorted(found.items()))
