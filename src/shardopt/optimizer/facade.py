"""The facade: makes the pieces of one sharded optimizer; its methods stand in groups, each in a file of this room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shardopt.arguments import (
    name_of,
    policy_fingerprint,
    read_param_group,
    read_param_groups,
    require_possible,
    take_granularities,
)
from shardopt.collectives import raise_together
from shardopt.errors import OverlapError
from shardopt.optimizer.assembly import assemble
from shardopt.optimizer.gradients import GradientMethods
from shardopt.optimizer.modules import ModuleMethods
from shardopt.optimizer.state_dicts import StateDictMethods
from shardopt.optimizer.stepping import StepMethods
from shardopt.optimizer.uneven_inputs import JoinMethods
from shardopt.sharding import Sharding
from shardopt.shards import Shards
from shardopt.step import JoinMembership, StepHooks, copy_options

DEFAULT_SHARDING = Sharding()


class ShardedOptimizer(StepMethods, GradientMethods, ModuleMethods, StateDictMethods, JoinMethods):
    """The class that the fronts make an ``Optimizer`` and ``Joinable`` of their framework; see there for its use.

    It stands before the framework's classes in the order of resolution, so ``super()`` is their ``Optimizer``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Any],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        sharding: Sharding = DEFAULT_SHARDING,
        **defaults: Any,
    ) -> None:
        """Read, compare, partition, make the local optimizer, and only then touch parameters. Collective.

        Arguments and errors are those of the class.
        """
        self._groups = []
        self._is_fresh = True
        self._sharding = sharding
        self._membership = JoinMembership()
        self.framework.init_joinable(self)
        shares_memory = getattr(sharding, "shared_memory", False)
        self._group = self.framework.find_group(process_group, shares_memory=shares_memory)
        modes = {"has_views": parameters_as_bucket_view, "overlaps": overlap_with_ddp}
        self._take_granularities = partial(
            take_granularities,
            self.framework,
            optimizer_class,
            sharding,
            has_views=parameters_as_bucket_view and not overlap_with_ddp,
        )
        with raise_together(self._group, doing="making the optimizer"):
            require_possible(self.framework, optimizer_class, sharding, **modes)
            groups = read_param_groups(params, self.framework)
            self._granularities = self._take_granularities(groups)
            super().__init__(groups, dict(defaults))  # type: ignore[call-arg]
        has_views = parameters_as_bucket_view and not overlap_with_ddp
        self.shards = Shards(self._group, self.framework, sharding, has_views=has_views)
        policy = policy_fingerprint(optimizer_class, sharding, **modes)
        plan = self.shards.plan(self.param_groups, self._granularities, policy)
        self.shards.admit(self.param_groups, plan)
        make_optimizer = partial(optimizer_class, **defaults)
        try:
            with raise_together(self._group, doing=f"making the local {name_of(optimizer_class)}"):
                self.optim = make_optimizer(self.shards.local_groups(self.param_groups))
        except Exception:
            self.shards.retract(0)
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self.defaults = self.optim.defaults
        self._pieces = assemble(
            self._group,
            self.framework,
            sharding,
            self.shards,
            self.optim,
            param_groups=self.param_groups,
            fire_hooks=StepHooks(self.framework.fire_step_hooks, self),
            membership=self._membership,
            make_optimizer=make_optimizer,
            is_separable=self.framework.is_separable(optimizer_class),
            overlaps=overlap_with_ddp,
        )
        self.state = self._pieces.state.live

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, also in mid-training; earlier parameters keep owner and state. Collective.

        Raises:
            TypeError, ValueError: As the framework's ``Optimizer`` does, on every rank.
            RankMismatchError: Ranks gave different groups. Either way the optimizer is as before.
        """
        if "optim" not in vars(self):
            super().add_param_group(param_group)  # type: ignore[misc]
            return  # the base constructor is reading the first groups, which __init__ then plans together
        if self._pieces.backward_step is not None and self._pieces.backward_step.is_driven:
            raise OverlapError(
                "add_param_group() after a DDP hook was made, which would not update the new parameters; add all groups "
                "first, then call hook_with_zero_step()"
            )
        start, num_params = len(self.param_groups), len(self.shards.params)
        self.wait()
        try:
            with raise_together(self._group, doing="add_param_group()"):
                group = read_param_group(param_group, self.framework)
                granularities = self._take_granularities([group])
                super().add_param_group(group)  # type: ignore[misc]
            self._granularities += granularities
            policy = [("param groups", str(start + 1))]
            plan = self.shards.plan(self.param_groups, self._granularities, policy)
            self.shards.admit(self.param_groups, plan)
            with raise_together(self._group, doing="add_param_group() of the local optimizer"):
                for group in self.shards.local_groups(self.param_groups, start=start):
                    self.optim.add_param_group(group)
        except Exception:
            del self.param_groups[start:]
            del self.optim.param_groups[start:]
            del self._granularities[start:]
            self.shards.retract(num_params)
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self.state = self._pieces.state.live
        self._pieces.stepper.read_attachments()
        if self._pieces.reduction is not None:
            self._pieces.reduction.hooks.watch()

    def __getattr__(self, name: str) -> Any:
        """Offer what the local optimizer has beyond the common interface, e.g. ``train()`` and ``eval()``.

        Methods are collective: call them on every rank. If one changes parameters or options, all are exchanged.
        """
        if name.startswith("_") or "optim" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.optim, name)
        return partial(self._pieces.stepper.call, value) if callable(value) else value

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or deep-copied.

        Raises:
            TypeError: Always, with the way out.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to a process group and to the other ranks; "
            "save consolidate_state_dict() + state_dict(), or make a second one from the copied model"
        )
