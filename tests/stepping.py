"""One rank with two parameters and everything that steps them, for ranks that are threads."""

import torch

from shardopt import Sharding
from shardopt.frameworks.torch import TORCH
from shardopt.optimizer import assemble
from shardopt.shards import Shards
from shardopt.step import LossScale, copy_options
from tests.sharding import POLICY

NO_SCALE = LossScale(None, None)
POLICIES = {
    "parameter": (Sharding(), False),
    "views": (Sharding(), True),
    "element": (Sharding(granularity="element"), True),
    "gradients": (Sharding(gradients=True), False),
    "element, gradients": (Sharding(granularity="element", gradients=True), True),
    "masters": (Sharding(master_dtype=torch.float64), False),
    "element, masters": (Sharding(granularity="element", master_dtype=torch.float64), True),
    "gradients, masters": (Sharding(gradients=True, master_dtype=torch.float64), True),
}
REDUCING = ["gradients", "element, gradients", "gradients, masters"]


class Local(torch.optim.SGD):
    """SGD with further methods, which can fail on a rank; writes down which parameters each step was about."""

    fails = False

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.stepped = []

    def step(self, closure=None):
        listed = [param for group in self.param_groups for param in group["params"]]
        self.stepped.append([tuple(param.shape) for param in listed])
        super().step()
        if self.fails:
            raise ValueError("odd")
        return "loss"

    def double(self, factor=2.0):
        for group in self.param_groups:
            for param in group["params"]:
                param.detach().mul_(factor)
        if self.fails:
            raise ValueError("odd")
        return factor

    def rename(self, rate):
        self.param_groups[0]["lr"] = rate

    def describe(self, word):
        if self.fails:
            raise ValueError("odd")
        return word, self.param_groups[0]["lr"]


class Membership:
    """Of a ``Join`` that is over when it is told so."""

    def __init__(self, is_set):
        self.is_set = is_set

    def is_active(self):
        return self.is_set


class Rank:
    """Two parameters, of 4 and 9 elements, that two ranks share: by parameter rank 0 owns the larger."""

    def __init__(
        self,
        group,
        policy="parameter",
        *,
        numels=(4, 9),
        is_separable=False,
        is_in_join=False,
        kind=Local,
        **changes,
    ):
        sharding, has_views = POLICIES[policy]
        options = {name: getattr(sharding, name) for name in sharding.__slots__}
        sharding = Sharding(**{**options, **changes})
        self.group = group
        self.params = [torch.nn.Parameter(torch.ones(n)) for n in numels]
        self.groups = [{"params": self.params, "lr": 0.5}]
        self.shards = Shards(group, TORCH, sharding, has_views=has_views)
        plan = self.shards.plan(self.groups, [sharding.granularity], POLICY)
        self.shards.admit(self.groups, plan)
        self.local = kind(self.shards.local_groups(self.groups), lr=0.5)
        copy_options(self.local.param_groups, self.groups)
        self.fired = []
        self.membership = Membership(is_in_join)
        pieces = assemble(
            group,
            TORCH,
            sharding,
            self.shards,
            self.local,
            param_groups=self.groups,
            fire_hooks=lambda *, before: self.fired.append("before" if before else "after"),
            membership=self.membership,
            make_optimizer=kind,
            is_separable=is_separable,
            overlaps=False,
        )
        self.pieces = pieces
        self.stepper, self.reduction, self.exchange = (
            pieces.stepper,
            pieces.reduction,
            pieces.exchange,
        )

    @property
    def is_in_join(self):
        return self.membership.is_active()

    @is_in_join.setter
    def is_in_join(self, is_active):
        self.membership.is_set = is_active

    def give_gradients(self, *values):
        """Gradients assigned by hand; None for no gradient."""
        for param, value in zip(self.params, values, strict=True):
            param.grad = None if value is None else torch.full_like(param, value)
        return self

    def backward(self, *values):
        """A backward that computes the same gradients."""
        used = [(p, v) for p, v in zip(self.params, values, strict=True) if v is not None]
        sum((param * value).sum() for param, value in used).backward()
        return self

    def step(self, *, scale=NO_SCALE, is_joined=False):
        return self.stepper.step(
            self.local.step, scale=scale, is_in_join=self.is_in_join, is_joined=is_joined
        )

    @property
    def values(self):
        """The one value of each parameter."""
        assert all((param == param.detach()[0]).all() for param in self.params)
        return [param.detach()[0].item() for param in self.params]


def counted(group, function):
    """Result of a function, and how many gathers it took on this rank."""
    counts = group.world.num_gathers_by_rank[group.rank]
    before = sum(counts.values())
    result = function()
    return result, sum(counts.values()) - before
